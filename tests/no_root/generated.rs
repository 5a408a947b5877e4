//! The Rust code of the protocols, src/grpc/generated, is what tonic generates from
//! src/grpc/csi-spec. It is committed, so that a build of the program compiles no generator.

use std::fs;
use std::path::Path;

use prost::Message;
use prost_types::FileDescriptorSet;

use crate::tree::root;

const PROTOS: [&str; 5] =
    ["csi.proto", "snapshotmetadata.proto", "snapshotsession.proto", "crust.proto", "admin.proto"];

/// Responses that can be sent millions of times per second: servers return them already encoded.
const RAW_RESPONSES: [&str; 6] = [
    ".csi.v1.GetMetadataAllocatedResponse",
    ".csi.v1.GetMetadataDeltaResponse",
    ".snapshotmetadata.GetMetadataAllocatedResponse",
    ".snapshotmetadata.GetMetadataDeltaResponse",
    ".snapshotsession.GetAllocatedResponse",
    ".snapshotsession.GetDeltaResponse",
];

/// The files of csi-spec and their imports, with comments. protox reads them without protoc.
pub fn descriptors() -> FileDescriptorSet {
    protox::compile(PROTOS, [root().join("src/grpc/csi-spec")]).unwrap()
}

fn generate(out: &Path) {
    let mut descriptors = descriptors();
    tonic_prost_build::configure()
        .build_server(false)
        .out_dir(out)
        .compile_fds(descriptors.clone())
        .unwrap();
    // Generated separately, because only servers use other types for these messages.
    let servers = out.join("servers");
    fs::create_dir_all(&servers).unwrap();
    let configuration = tonic_prost_build::configure()
        .build_client(false)
        .out_dir(servers)
        .extern_path(".csi.v1", "crate::proto::csi::v1")
        .extern_path(".snapshotmetadata", "crate::proto::snapshotmetadata")
        .extern_path(".snapshotsession", "crate::proto::snapshotsession")
        .extern_path(".crust", "crate::proto::crust")
        .extern_path(".csiloopback.admin.v1", "crate::proto::admin::v1");
    RAW_RESPONSES
        .iter()
        .fold(configuration, |all, message| all.extern_path(message, "crate::RawMessage"))
        .compile_fds(descriptors.clone())
        .unwrap();
    // Reflection sends no comments, which are most of a descriptor.
    descriptors.file.iter_mut().for_each(|file| file.source_code_info = None);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec()).unwrap();
}

/// The names of the generated files, relative to `directory`.
fn names(directory: &Path) -> Vec<String> {
    let mut found: Vec<_> = [directory.to_owned(), directory.join("servers")]
        .iter()
        .flat_map(|directory| fs::read_dir(directory).unwrap())
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .map(|path| path.strip_prefix(directory).unwrap().display().to_string())
        .collect();
    found.sort();
    found
}

#[test]
fn the_code_of_the_protocols_is_generated_from_their_files() {
    let committed = root().join("src/grpc/generated");
    if std::env::var_os("UPDATE_NAMES").is_some() {
        fs::remove_dir_all(&committed).unwrap();
        fs::create_dir(&committed).unwrap();
        generate(&committed);
        return;
    }
    let fresh = tempfile::tempdir().unwrap();
    generate(fresh.path());
    assert_eq!(names(&committed), names(fresh.path()), "{HOW}");
    for name in names(&committed) {
        let same =
            fs::read(committed.join(&name)).unwrap() == fs::read(fresh.path().join(&name)).unwrap();
        assert!(same, "src/grpc/generated/{name} is not of csi-spec; {HOW}");
    }
}

const HOW: &str = "run: UPDATE_NAMES=1 cargo test --all-features --test no_root generated::";
