//! Turns csi-spec/*.proto into Rust, with no protoc on the machine: protox parses, tonic generates.
//! The descriptor set, comments included, goes beside the code: reflection serves it and
//! tests/wire.rs checks it.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message;

const PROTOS: [&str; 5] =
    ["csi.proto", "snapshotmetadata.proto", "snapshotsession.proto", "crust.proto", "admin.proto"];

/// Answers of which there can be millions a second: servers give them already encoded.
const RAW_ANSWERS: [&str; 6] = [
    ".csi.v1.GetMetadataAllocatedResponse",
    ".csi.v1.GetMetadataDeltaResponse",
    ".snapshotmetadata.GetMetadataAllocatedResponse",
    ".snapshotmetadata.GetMetadataDeltaResponse",
    ".snapshotsession.GetAllocatedResponse",
    ".snapshotsession.GetDeltaResponse",
];

/// A request that servers read by a type of their own.
const FORMER_REQUEST: (&str, &str) =
    (".csi.v1.NodePublishVolumeRequest", "crate::proto::former::PublishRequest");

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=csi-spec");
    let descriptors = protox::compile(PROTOS, ["csi-spec"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("csi_descriptor.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().build_server(false).compile_fds(descriptors.clone())?;
    // By themselves, since only they differ in the types of these messages.
    let servers = out.join("servers");
    fs::create_dir_all(&servers)?;
    let configuration = tonic_prost_build::configure()
        .build_client(false)
        .out_dir(servers)
        .extern_path(".csi.v1", "crate::proto::csi::v1")
        .extern_path(".snapshotmetadata", "crate::proto::snapshotmetadata")
        .extern_path(".snapshotsession", "crate::proto::snapshotsession")
        .extern_path(".crust", "crate::proto::crust")
        .extern_path(".csiloopback.admin.v1", "crate::proto::admin::v1")
        .extern_path(FORMER_REQUEST.0, FORMER_REQUEST.1);
    RAW_ANSWERS
        .iter()
        .fold(configuration, |all, answer| all.extern_path(answer, "crate::grpc::RawMessage"))
        .compile_fds(descriptors)?;
    Ok(())
}
