//! The claims that restores write to. A backup is restored to a block device, so a claim in
//! filesystem mode is made in two steps: a claim in block mode is written, and its volume is then
//! given to a claim in filesystem mode.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{
    ObjectReference, PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::super::args::VolumeMode;
use super::Mover;
use crate::client::cluster::call;

const POLL: Duration = Duration::from_millis(500);

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

fn made(name: &str, spec: Value) -> Result<PersistentVolumeClaim> {
    serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).context("the claim")
}

/// Gives the volume of the claim `from`, which no pod uses, to a new claim `to` in filesystem mode.
///
/// The new objects exist before the old ones are removed, and the volume is retained meanwhile, so
/// an interruption loses nothing.
pub async fn rebind(mover: &Mover<'_>, from: &str, to: &str) -> Result<()> {
    let claim = mover.claim(from).await?.with_context(|| format!("claim {from} is gone"))?;
    let spec = claim.spec.unwrap_or_default();
    let old = spec.volume_name.with_context(|| format!("claim {from} has no volume"))?;
    let volumes: Api<PersistentVolume> = Api::all(mover.client.clone());
    let what = format!("PersistentVolume {old}");
    let volume = call(&what, volumes.get(&old)).await.map_err(|failure| failure.error)?;
    let policy =
        volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.clone());

    let retain = Patch::Merge(json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}}));
    let params = PatchParams::default();
    let retained = volumes.patch(&old, &params, &retain);
    call(&what, retained).await.map_err(|failure| failure.error)?;

    let new = in_filesystem_mode(&volume, policy, mover.namespace, to)?;
    let name = new.metadata.name.clone().unwrap_or_default();
    let what = format!("PersistentVolume {name}");
    let created = call(&what, volumes.create(&PostParams::default(), &new)).await;
    created.map_err(|failure| failure.error)?;
    let claim = made(
        to,
        json!({
            "accessModes": spec.access_modes,
            "volumeMode": "Filesystem",
            "storageClassName": spec.storage_class_name,
            "resources": spec.resources,
            "volumeName": name,
        }),
    )?;
    let what = format!("PersistentVolumeClaim {}/{to}", mover.namespace);
    let created = call(&what, mover.claims().create(&PostParams::default(), &claim)).await;
    created.map_err(|failure| failure.error)?;

    mover.delete_claim(from).await?;
    while mover.claim(from).await?.is_some() {
        sleep(POLL).await;
    }
    let what = format!("PersistentVolume {old}");
    let deleted = call(&what, volumes.delete(&old, &DeleteParams::default())).await;
    deleted.map(drop).map_err(|failure| failure.error)
}

/// The same volume in filesystem mode, for another claim.
fn in_filesystem_mode(
    volume: &PersistentVolume,
    policy: Option<String>,
    namespace: &str,
    claim: &str,
) -> Result<PersistentVolume> {
    let name = volume.metadata.name.clone().unwrap_or_default();
    let Some(spec) = volume.spec.clone() else { bail!("PersistentVolume {name} has no spec") };
    Ok(PersistentVolume {
        metadata: ObjectMeta {
            name: Some(format!("{name}-filesystem")),
            // By this the provisioner knows that it may delete the volume.
            annotations: volume.metadata.annotations.clone().map(|all| {
                let own = |(key, _): &(String, String)| key == "pv.kubernetes.io/provisioned-by";
                all.into_iter().filter(own).collect()
            }),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeSpec {
            volume_mode: Some("Filesystem".to_owned()),
            persistent_volume_reclaim_policy: policy,
            claim_ref: Some(ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("PersistentVolumeClaim".to_owned()),
                namespace: Some(namespace.to_owned()),
                name: Some(claim.to_owned()),
                ..ObjectReference::default()
            }),
            ..spec
        }),
        status: None,
    })
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

    #[test]
    fn a_rebound_volume_keeps_its_handle_and_policy() {
        let volume: PersistentVolume = serde_json::from_value(json!({
            "metadata": {
                "name": "pv", "uid": "1", "resourceVersion": "7",
                "annotations": {"pv.kubernetes.io/provisioned-by": "d", "other": "x"},
            },
            "spec": {
                "csi": {"driver": "d", "volumeHandle": "h"}, "volumeMode": "Block",
                "claimRef": {"name": "old", "uid": "2"}, "persistentVolumeReclaimPolicy": "Retain",
            },
        }))
        .unwrap();
        let new = in_filesystem_mode(&volume, Some("Delete".to_owned()), "shop", "new").unwrap();
        let new = serde_json::to_value(new).unwrap();
        let expected = json!({"name": "pv-filesystem", "annotations": {"pv.kubernetes.io/provisioned-by": "d"}});
        assert_eq!(new["metadata"], expected);
        let spec = &new["spec"];
        assert_eq!(spec["csi"]["volumeHandle"], "h");
        assert_eq!(
            (&spec["volumeMode"], &spec["persistentVolumeReclaimPolicy"]),
            (&json!("Filesystem"), &json!("Delete"))
        );
        let expected = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "shop", "name": "new"});
        assert_eq!(spec["claimRef"], expected);
    }
}
