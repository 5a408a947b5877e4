//! What `--version` prints: the package's version, and the commit if CSI_LOOPBACK_COMMIT names one, as
//! hack/image.sh does. Git is not called, since a commit would then rebuild the crate in each clone.

use std::{env, error::Error};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-env-changed=CSI_LOOPBACK_COMMIT");
    let version = env::var("CARGO_PKG_VERSION")?;
    let version = match env::var("CSI_LOOPBACK_COMMIT") {
        Ok(commit) if !commit.is_empty() => format!("{version} ({commit})"),
        _ => version,
    };
    println!("cargo:rustc-env=CSI_LOOPBACK_VERSION={version}");
    Ok(())
}
