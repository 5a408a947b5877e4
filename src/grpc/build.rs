//! Generates Rust from csi-spec/*.proto without protoc: protox parses, tonic generates. The
//! descriptor set, with comments, is written next to the code: reflection serves it, and
//! tests/no_root/wire.rs checks it.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message;

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

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=csi-spec");
    let descriptors = protox::compile(PROTOS, ["csi-spec"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("csi_descriptor.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().build_server(false).compile_fds(descriptors.clone())?;
    // Generated separately, because only servers use other types for these messages.
    let servers = out.join("servers");
    fs::create_dir_all(&servers)?;
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
        .compile_fds(descriptors)?;
    Ok(())
}
