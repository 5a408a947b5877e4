//! Turns csi-spec/*.proto into Rust, with no protoc on the machine: protox parses, tonic generates.
//! The descriptor set, comments included, goes beside the code: reflection serves it and
//! tests/csi_wire.rs checks it.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message;

const PROTOS: [&str; 1] = ["csi.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=csi-spec");
    let descriptors = protox::compile(PROTOS, ["csi-spec"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("csi_descriptor.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
