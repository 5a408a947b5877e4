//! The claims that restores write to. A backup is restored to a block device, so a claim in
//! filesystem mode is made in two steps: a claim in block mode is written, and its volume is then
//! given to a claim in filesystem mode ([`super::rebind`]).

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::{Value, json};

use super::super::args::VolumeMode;
use super::job::labels;

/// # Errors
/// An existing claim cannot be restored to.
pub fn check(name: &str, claim: &PersistentVolumeClaim, mode: VolumeMode) -> Result<()> {
    ensure!(
        mode == VolumeMode::Block,
        "--to-claim {name}: the claim exists already; name a new one for --volume-mode filesystem"
    );
    let volume_mode = claim.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref());
    ensure!(
        volume_mode == Some("Block"),
        "--to-claim {name}: the claim exists and has a filesystem; name a claim in block mode, or a new one"
    );
    Ok(())
}

/// A new claim in block mode.
pub fn empty(name: &str, bytes: u64, class: Option<&str>) -> Result<PersistentVolumeClaim> {
    let mut spec = json!({
        "accessModes": ["ReadWriteOnce"],
        "volumeMode": "Block",
        "resources": {"requests": {"storage": bytes.to_string()}},
    });
    if let Some(class) = class {
        spec["storageClassName"] = json!(class);
    }
    made(name, spec)
}

pub fn made(name: &str, spec: Value) -> Result<PersistentVolumeClaim> {
    let metadata = json!({"name": name, "labels": labels()});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).context("the claim")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_existing_claim_in_block_mode_is_a_target() {
        let claim = |mode: &str| made("c", json!({"volumeMode": mode})).unwrap();
        check("c", &claim("Block"), VolumeMode::Block).unwrap();
        assert!(check("c", &claim("Filesystem"), VolumeMode::Block).is_err());
        assert!(check("c", &claim("Block"), VolumeMode::Filesystem).is_err());
    }
}
