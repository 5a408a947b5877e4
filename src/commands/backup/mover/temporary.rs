//! Snapshots that last as long as their backup (`backup create --claim`). The snapshot of a command
//! that was killed has an annotation with the time after which no mover reads it. A later command
//! of the namespace then removes it.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use kube::api::{DeleteParams, ListParams, Preconditions};
use kube::{Api, ResourceExt};
use tokio::time::sleep;

use super::{Mover, POLL, after};
use crate::client::cluster::removal::request_deletion;
use crate::client::cluster::{Failure, Retry, call};
use crate::client::progress;
use kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotSource, VolumeSnapshotSpec};

/// Label of these snapshots.
const LABEL: &str = "backup.loopback.csi.local/temporary";
/// Annotation with the time, in UTC.
const EXPIRES: &str = "backup.loopback.csi.local/expires";

/// A snapshot of a claim, named after it and the time.
fn temporary(
    claim: &str,
    class: Option<&str>,
    now: SystemTime,
    lifetime: Duration,
) -> VolumeSnapshot {
    let time = humantime::format_rfc3339_seconds(now).to_string().to_lowercase();
    let name = format!("{claim}-{}", time.replace(['-', ':'], ""));
    let source = VolumeSnapshotSource {
        persistent_volume_claim_name: Some(claim.to_owned()),
        ..VolumeSnapshotSource::default()
    };
    let volume_snapshot_class_name = class.map(str::to_owned);
    let spec = VolumeSnapshotSpec { source, volume_snapshot_class_name };
    let mut snapshot = VolumeSnapshot::new(&name, spec);
    let expires = humantime::format_rfc3339_seconds(now + lifetime).to_string();
    snapshot.metadata.labels = Some(BTreeMap::from([(LABEL.to_owned(), "true".to_owned())]));
    snapshot.metadata.annotations = Some(BTreeMap::from([(EXPIRES.to_owned(), expires)]));
    snapshot
}

/// Whether the time is over. A snapshot with another or no time is not ours.
fn has_expired(snapshot: &VolumeSnapshot, now: SystemTime) -> bool {
    let time = snapshot.annotations().get(EXPIRES);
    let time = time.and_then(|time| humantime::parse_rfc3339(time).ok());
    time.is_some_and(|time| time < now)
}

impl Mover<'_> {
    /// Takes a snapshot of a claim, backs it up, and removes it in any case; returns what the pod
    /// printed.
    pub async fn back_up_claim(
        &self,
        claim: &str,
        class: Option<&str>,
        flags: &[String],
    ) -> Result<String> {
        let snapshots: Api<VolumeSnapshot> = Api::namespaced(self.client.clone(), self.namespace);
        self.remove_expired(&snapshots).await;
        // The snapshot becomes ready within the first, and its mover ends within the second.
        let lifetime = self.options.timeout + self.flags.mover_timeout;
        let snapshot = temporary(claim, class, SystemTime::now(), lifetime);
        let name = snapshot.name_any();
        let what = format!("VolumeSnapshot {}/{name}", self.namespace);
        // A stop is noticed between calls, so that the creation is never cut off.
        self.stop.check()?;
        self.create(&snapshots, snapshot).await?;
        let is_ready = self.stop.wait(wait_until_ready(&snapshots, &name, &what)).await;
        let outcome = match is_ready.with_context(|| format!("{what}: not ready to use")) {
            Ok(()) => self.back_up(&name, flags).await,
            Err(error) => Err(error),
        };
        after(outcome, self.discard(&snapshots, &name, Duration::ZERO).await, &what)
    }

    /// Removes what killed commands of this namespace have left.
    async fn remove_expired(&self, snapshots: &Api<VolumeSnapshot>) {
        let labelled = ListParams::default().labels(LABEL);
        let found = match call("VolumeSnapshots", snapshots.list(&labelled)).await {
            Ok(found) => found.items,
            // The user may lack the right to list them.
            Err(Failure { retry: Retry::Never, .. }) => return,
            Err(failure) => return progress::note(&format!("{:#}", failure.error)),
        };
        let now = SystemTime::now();
        for snapshot in found.into_iter().filter(|snapshot| has_expired(snapshot, now)) {
            let name = snapshot.name_any();
            let uid = snapshot.metadata.uid;
            let preconditions = Some(Preconditions { uid, ..Preconditions::default() });
            let params = DeleteParams { preconditions, ..DeleteParams::default() };
            let what = format!("VolumeSnapshot {}/{name}", self.namespace);
            if let Err(failure) = call(&what, request_deletion(snapshots, &name, &params)).await {
                progress::note(&format!("{:#}", failure.error));
            }
        }
    }
}

/// Notes each error that a controller reports meanwhile.
async fn wait_until_ready(snapshots: &Api<VolumeSnapshot>, name: &str, what: &str) -> Result<()> {
    let mut noted = None;
    loop {
        let status = match call(what, snapshots.get(name)).await {
            Ok(found) => found.status.unwrap_or_default(),
            Err(Failure { error, retry: Retry::Never, .. }) => return Err(error),
            Err(_) => Default::default(),
        };
        if status.ready_to_use == Some(true) {
            return Ok(());
        }
        let error = status.error.and_then(|error| error.message);
        if let Some(message) = error.as_deref().filter(|_| error != noted) {
            progress::note(&format!("{what}: {message}"));
            noted = error;
        }
        sleep(POLL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_snapshot_expires_after_its_lifetime() {
        let now = humantime::parse_rfc3339("2026-11-27T01:02:03Z").unwrap();
        let lifetime = Duration::from_secs(3600);
        let snapshot = temporary("data", Some("class"), now, lifetime);
        assert_eq!(snapshot.name_any(), "data-20261127t010203z");
        assert_eq!(snapshot.spec.volume_snapshot_class_name.as_deref(), Some("class"));
        assert!(!has_expired(&snapshot, now + lifetime));
        assert!(has_expired(&snapshot, now + lifetime + Duration::from_secs(1)));
        let mut other = snapshot;
        other.metadata.annotations = None;
        assert!(!has_expired(&other, now + 2 * lifetime));
    }
}
