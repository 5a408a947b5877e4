//! Snapshots that last as long as their backup (`backup create --claim`). An annotation says how long
//! a mover may read one. When that is over, a later command of the namespace removes what a killed
//! one has left. Only the API server's clock decides: the times at which it created the old snapshot
//! and that of the later command.

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
/// Annotation with the time for which it is used.
const LIFETIME: &str = "backup.loopback.csi.local/lifetime";

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
    let lifetime = humantime::format_duration(lifetime).to_string();
    snapshot.metadata.labels = Some(BTreeMap::from([(LABEL.to_owned(), "true".to_owned())]));
    snapshot.metadata.annotations = Some(BTreeMap::from([(LIFETIME.to_owned(), lifetime)]));
    snapshot
}

/// Whether its time was over when the API server created `later`. A snapshot without a lifetime is
/// not ours.
fn has_expired(snapshot: &VolumeSnapshot, later: &VolumeSnapshot) -> bool {
    let lifetime = snapshot.annotations().get(LIFETIME);
    let lifetime = lifetime.and_then(|text| humantime::parse_duration(text).ok());
    let created = |one: &VolumeSnapshot| Some(SystemTime::from(one.creation_timestamp()?.0));
    let end = created(snapshot).zip(lifetime).and_then(|(start, time)| start.checked_add(time));
    end.zip(created(later)).is_some_and(|(end, now)| end <= now)
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
        // The snapshot becomes ready within the first, and its mover ends within the second.
        let lifetime = self.options.timeout + self.flags.mover_timeout;
        let snapshot = temporary(claim, class, SystemTime::now(), lifetime);
        let name = snapshot.name_any();
        let what = format!("VolumeSnapshot {}/{name}", self.namespace);
        // A stop is noticed between calls, so that the creation is never cut off.
        self.stop.check()?;
        self.create(&snapshots, snapshot).await?;
        self.remove_expired(&snapshots, &name).await;
        let is_ready = self.stop.wait(wait_until_ready(&snapshots, &name, &what)).await;
        let outcome = match is_ready.with_context(|| format!("{what}: not ready to use")) {
            Ok(()) => self.back_up(&name, flags).await,
            Err(error) => Err(error),
        };
        after(outcome, self.discard(&snapshots, &name, Duration::ZERO).await, &what)
    }

    /// Removes what killed commands of this namespace have left, by the age of the snapshot `own`.
    async fn remove_expired(&self, snapshots: &Api<VolumeSnapshot>, own: &str) {
        let labelled = ListParams::default().labels(LABEL);
        let found = match call("VolumeSnapshots", snapshots.list(&labelled)).await {
            Ok(found) => found.items,
            // The user may lack the right to list them.
            Err(Failure { retry: Retry::Never, .. }) => return,
            Err(failure) => return progress::note(&format!("{:#}", failure.error)),
        };
        let Some(own) = found.iter().find(|snapshot| snapshot.name_any() == own) else { return };
        for snapshot in found.iter().filter(|snapshot| has_expired(snapshot, own)) {
            let name = snapshot.name_any();
            let uid = snapshot.uid();
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
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    #[test]
    fn a_temporary_snapshot_expires_after_its_lifetime() {
        let start = humantime::parse_rfc3339("2026-11-27T01:02:03Z").unwrap();
        let lifetime = Duration::from_secs(3600);
        let made = |at: SystemTime| {
            let mut snapshot = temporary("data", Some("class"), start, lifetime);
            let seconds = at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
            let time = Timestamp::from_second(seconds.cast_signed()).unwrap();
            snapshot.metadata.creation_timestamp = Some(Time(time));
            snapshot
        };
        let snapshot = made(start);
        assert_eq!(snapshot.name_any(), "data-20261127t010203z");
        assert_eq!(snapshot.spec.volume_snapshot_class_name.as_deref(), Some("class"));
        assert!(!has_expired(&snapshot, &made(start + lifetime - Duration::from_secs(1))));
        let later = made(start + lifetime);
        assert!(has_expired(&snapshot, &later));
        for text in [None, Some("soon"), Some("99999999999years")] {
            let mut other = snapshot.clone();
            other.metadata.annotations =
                text.map(|text| BTreeMap::from([(LIFETIME.to_owned(), text.to_owned())]));
            assert!(!has_expired(&other, &later), "{text:?}");
        }
    }
}
