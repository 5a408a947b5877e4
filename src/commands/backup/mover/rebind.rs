//! Gives the volume of a claim in block mode, which no pod uses, to a new claim in filesystem mode.
//!
//! Meanwhile two PersistentVolumes name the volume. If one of them had the policy Delete, the end of
//! its claim would destroy the volume of the other. So both have Retain until the old one is gone,
//! and the policy of the volume is set last. A failure before the old claim is deleted undoes all,
//! a later one leaves the new claim with its data; an interruption destroys nothing at any time.

use std::time::Duration;

use anyhow::{Context, Error, Result, bail};
use k8s_openapi::api::core::v1::{
    ObjectReference, PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimSpec,
    PersistentVolumeSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::job::labels;
use super::own::until_gone;
use super::{Mover, POLL, claim};
use crate::client::cluster::removal::request_deletion;
use crate::client::cluster::{Failure, Retry, call};
use crate::client::timed_out;
use common::fail_point::hit;

/// Annotation of the new PersistentVolume with a [`Plan`], until it has the policy of the old one.
const PLAN: &str = "backup.loopback.csi.local/rebinding";
const RETAIN: &str = "Retain";
/// Annotations by which the provisioner knows that and how it may delete the volume.
const OF_PROVISIONER: [&str; 3] = [
    "pv.kubernetes.io/provisioned-by",
    "volume.kubernetes.io/provisioner-deletion-secret-name",
    "volume.kubernetes.io/provisioner-deletion-secret-namespace",
];

/// Why a volume was not given to another claim.
pub enum Failed {
    /// Everything is as before, and the old claim can be deleted.
    Undone(Error),
    /// The volume is retained; the error names what names it.
    Remains(Error),
}

/// The objects of a volume, by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Plan {
    from: String,
    to: String,
    old: String,
    new: String,
    /// Reclaim policy.
    policy: String,
}

impl Plan {
    /// What exists in between, and the steps to its end.
    fn steps(&self) -> String {
        let Self { from, to, old, new, policy } = self;
        format!(
            "the volume of PersistentVolumes {old} and {new}, which have the reclaim policy Retain, has the restored \
             data; to use it as claim {to}, delete claim {from} and then PersistentVolume {old}, as far as they exist, \
             and then set the reclaim policy of PersistentVolume {new} to {policy}"
        )
    }
}

/// Gives the volume of the claim `from` to a new claim `to`.
pub async fn rebind(mover: &Mover<'_>, from: &str, to: &str) -> Result<(), Failed> {
    let what = || {
        format!(
            "claim {to} did not get the volume of claim {from}, to which the backup was restored"
        )
    };
    let (rebinding, found) = match Rebinding::find(mover, from, to).await {
        Ok(found) => found,
        Err(error) => return Err(Failed::Undone(error.context(what()))),
    };
    if let Err(error) = rebinding.join(found).await {
        return Err(match rebinding.undo().await {
            Ok(()) => Failed::Undone(error.context(what())),
            Err(left) => {
                let steps = rebinding.plan.steps();
                Failed::Remains(error.context(format!("{}: {left:#}; {steps}", what())))
            }
        });
    }
    let finished = rebinding.finish().await;
    finished.map_err(|error| Failed::Remains(error.context(rebinding.plan.steps())))
}

/// If a claim is the result of a run that was killed: what exists, and the next steps.
pub async fn interrupted(mover: &Mover<'_>, claim: &PersistentVolumeClaim) -> Option<String> {
    let volume = claim.spec.as_ref()?.volume_name.as_deref()?;
    let volumes: Api<PersistentVolume> = Api::all(mover.client.clone());
    let found = call("PersistentVolume", volumes.get_opt(volume)).await.ok()??;
    let plan = found.metadata.annotations?.remove(PLAN)?;
    let plan: Plan = serde_json::from_str(&plan).ok()?;
    Some(format!("an earlier restore was interrupted: {}", plan.steps()))
}

struct Rebinding<'r> {
    mover: &'r Mover<'r>,
    volumes: Api<PersistentVolume>,
    plan: Plan,
}

impl<'r> Rebinding<'r> {
    async fn find(
        mover: &'r Mover<'r>,
        from: &str,
        to: &str,
    ) -> Result<(Self, (PersistentVolumeClaimSpec, PersistentVolume))> {
        let claim = mover.claim(from).await?.with_context(|| format!("claim {from} is gone"))?;
        let spec = claim.spec.unwrap_or_default();
        let old = spec.volume_name.clone();
        let old = old.with_context(|| format!("claim {from} has no volume"))?;
        let volumes: Api<PersistentVolume> = Api::all(mover.client.clone());
        let what = format!("PersistentVolume {old}");
        let volume = call(&what, volumes.get(&old)).await.map_err(|failure| failure.error)?;
        let policy =
            volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.clone());
        let plan = Plan {
            from: from.to_owned(),
            to: to.to_owned(),
            new: format!("{old}-filesystem"),
            old,
            policy: policy.unwrap_or_else(|| RETAIN.to_owned()),
        };
        Ok((Self { mover, volumes, plan }, (spec, volume)))
    }

    /// Makes the new claim with its PersistentVolume. Nothing is removed.
    async fn join(&self, found: (PersistentVolumeClaimSpec, PersistentVolume)) -> Result<()> {
        let (spec, volume) = found;
        let (stop, plan) = (self.mover.stop, &self.plan);
        stop.check()?;
        self.set(&plan.old, json!({"spec": {"persistentVolumeReclaimPolicy": RETAIN}})).await?;
        hit("mover.old_retained")?;
        stop.check()?;
        let new = in_filesystem_mode(&volume, plan, self.mover.namespace)?;
        self.mover.create(&self.volumes, new).await?;
        hit("mover.new_volume_created")?;
        stop.check()?;
        let claim = claim::made(
            &plan.to,
            json!({
                "accessModes": spec.access_modes,
                "volumeMode": "Filesystem",
                "storageClassName": spec.storage_class_name,
                "volumeAttributesClassName": spec.volume_attributes_class_name,
                "resources": spec.resources,
                "volumeName": plan.new,
            }),
        )?;
        self.mover.create(&self.mover.claims(), claim).await?;
        hit("mover.new_claim_created")?;
        stop.wait(self.bound()).await?;
        hit("mover.new_claim_bound")?;
        stop.check()
    }

    /// Returns when the new claim has its volume.
    async fn bound(&self) -> Result<()> {
        let (limit, Plan { to, new, .. }) = (self.mover.options.timeout, &self.plan);
        let bound = async {
            loop {
                match self.mover.is_bound(to).await {
                    Ok(true) => return Ok(()),
                    Err(Failure { error, retry: Retry::Never, .. }) => return Err(error),
                    Ok(false) | Err(_) => sleep(POLL).await,
                }
            }
        };
        timeout(limit, bound).await.with_context(|| {
            format!("claim {to} is not bound to PersistentVolume {new}: {}", timed_out(limit))
        })?
    }

    /// Removes what [`Self::join`] has made.
    async fn undo(&self) -> Result<()> {
        let Plan { to, old, new, policy, .. } = &self.plan;
        self.mover.discard(&self.mover.claims(), to, Duration::ZERO).await?;
        self.mover.discard(&self.volumes, new, Duration::ZERO).await?;
        hit("mover.undone")?;
        self.set(old, json!({"spec": {"persistentVolumeReclaimPolicy": policy}})).await
    }

    /// Removes the old claim with its PersistentVolume. A signal does not interrupt this.
    async fn finish(&self) -> Result<()> {
        let Plan { from, old, new, policy, .. } = &self.plan;
        self.mover.delete_claim(from).await?;
        hit("mover.old_claim_deleted")?;
        self.delete(old).await?;
        hit("mover.old_volume_deleted")?;
        let patch = json!({
            "metadata": {"annotations": {PLAN: null}},
            "spec": {"persistentVolumeReclaimPolicy": policy},
        });
        self.set(new, patch).await
    }

    async fn set(&self, volume: &str, patch: Value) -> Result<()> {
        let what = format!("PersistentVolume {volume}");
        let (patch, params) = (Patch::Merge(patch), PatchParams::default());
        let patched = self.volumes.patch(volume, &params, &patch);
        call(&what, patched).await.map(drop).map_err(|failure| failure.error)
    }

    /// Deletes a PersistentVolume, and returns when it is gone.
    async fn delete(&self, name: &str) -> Result<()> {
        let params = DeleteParams::default();
        let request = || request_deletion(&self.volumes, name, &params);
        let gone = until_gone(Duration::ZERO, request).await;
        gone.with_context(|| format!("PersistentVolume {name}"))
    }
}

/// The same volume in filesystem mode, for the new claim.
fn in_filesystem_mode(
    volume: &PersistentVolume,
    plan: &Plan,
    namespace: &str,
) -> Result<PersistentVolume> {
    let Some(spec) = volume.spec.clone() else {
        bail!("PersistentVolume {} has no spec", plan.old)
    };
    let of_volume = volume.metadata.annotations.clone().unwrap_or_default().into_iter();
    let mut annotations: std::collections::BTreeMap<_, _> =
        of_volume.filter(|(key, _)| OF_PROVISIONER.contains(&key.as_str())).collect();
    annotations.insert(PLAN.to_owned(), serde_json::to_string(plan)?);
    Ok(PersistentVolume {
        metadata: ObjectMeta {
            name: Some(plan.new.clone()),
            annotations: Some(annotations),
            labels: serde_json::from_value(labels())?,
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeSpec {
            volume_mode: Some("Filesystem".to_owned()),
            persistent_volume_reclaim_policy: Some(RETAIN.to_owned()),
            claim_ref: Some(ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("PersistentVolumeClaim".to_owned()),
                namespace: Some(namespace.to_owned()),
                name: Some(plan.to.clone()),
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
    fn a_rebound_volume_keeps_its_handle_and_is_retained() {
        let volume: PersistentVolume = serde_json::from_value(json!({
            "metadata": {
                "name": "pv", "uid": "1", "resourceVersion": "7",
                "annotations": {
                    "pv.kubernetes.io/provisioned-by": "d", "other": "x",
                    "volume.kubernetes.io/provisioner-deletion-secret-name": "s",
                },
            },
            "spec": {
                "csi": {"driver": "d", "volumeHandle": "h"}, "volumeMode": "Block",
                "claimRef": {"name": "old", "uid": "2"}, "persistentVolumeReclaimPolicy": "Delete",
            },
        }))
        .unwrap();
        let [from, to, old, new, policy] =
            ["old", "new", "pv", "pv-filesystem", "Delete"].map(str::to_owned);
        let plan = Plan { from, to, old, new, policy };
        let new = in_filesystem_mode(&volume, &plan, "shop").unwrap();
        let new = serde_json::to_value(new).unwrap();
        let metadata = &new["metadata"];
        assert_eq!(metadata["name"], "pv-filesystem");
        let annotations = metadata["annotations"].as_object().unwrap();
        assert_eq!(annotations.len(), 3, "{annotations:?}");
        let written: Plan = serde_json::from_str(annotations[PLAN].as_str().unwrap()).unwrap();
        assert_eq!(written, plan);
        let spec = &new["spec"];
        assert_eq!(spec["csi"]["volumeHandle"], "h");
        assert_eq!(spec["volumeMode"], "Filesystem");
        assert_eq!(spec["persistentVolumeReclaimPolicy"], "Retain");
        let expected = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "shop", "name": "new"});
        assert_eq!(spec["claimRef"], expected);
        assert!(plan.steps().contains("PersistentVolumes pv and pv-filesystem"));
    }
}
