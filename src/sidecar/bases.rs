//! `--publish-bases`: the bases that the driver's BaseAdmin service reports, as an annotation of VolumeSnapshotContents, where backup
//! products see it; and an annotation by which they say how long a snapshot is to stay a base. It is done in rounds, and nothing
//! is kept but what spares calls. All replicas write the same.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::Context;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde::Serialize;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tonic::{Code, Status};

use super::driver_link::DriverLink;
use crate::grpc::{code_name, cut};
use crate::kubernetes::cache::{Cache, in_time};
use crate::kubernetes::client::tolerate;
use crate::kubernetes::snapshot::VolumeSnapshotContent;
use crate::proto::admin::v1 as admin;
use crate::telemetry::complaint::Complaint;
use crate::telemetry::shutdown::Shutdown;
use admin::set_base_retention_request::Retention;

/// The bases of deltas to the newest snapshot of a volume: [`Published`] as JSON.
const BASES: &str = "cbt.storage.k8s.io/bases";
/// How long the snapshot is to stay a base after its deletion: a time such as 30days, or [`BY_DEFAULT`].
const RETENTION: &str = "cbt.storage.k8s.io/base-retention";
/// Why that cannot be.
const RETENTION_ERROR: &str = "cbt.storage.k8s.io/base-retention-error";
const BY_DEFAULT: &str = "default";

/// Bases in an annotation, at most. The annotations of an object have 256 KiB together, and a base takes some 150 bytes.
const MAX_BASES: usize = 100;
/// Bytes of an error in an annotation, at most.
const MAX_ERROR: usize = 512;
/// Pause before a driver that is away is asked again whether it has the service.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Of the year 9999, after which times cannot be written down.
const LAST_SECOND: u64 = 253_402_300_799;

type Content = Arc<VolumeSnapshotContent>;

pub struct Bases {
    driver: DriverLink,
    /// The driver's.
    name: String,
    contents: Cache<VolumeSnapshotContent>,
    objects: Api<VolumeSnapshotContent>,
    /// How long a call of the driver may take.
    timeout: Duration,
    /// The retention that the driver accepted last, by content.
    accepted: HashMap<String, String>,
    /// The volumes of snapshots whose contents do not name them, by handle.
    volumes: HashMap<String, String>,
    complaint: Complaint,
}

/// What the annotation says.
#[derive(Debug, Serialize)]
struct Published {
    volume: String,
    /// Newest first, and so the snapshot itself before all others.
    bases: Vec<Base>,
    /// Whether there are older ones than these.
    #[serde(skip_serializing_if = "is_false")]
    more: bool,
}

#[derive(Debug, Serialize)]
struct Base {
    handle: String,
    /// When it ceases to be one (RFC 3339). Missing while its time has not begun.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires: Option<String>,
}

fn is_false(value: &bool) -> bool {
    !value
}

impl Bases {
    pub fn new(
        driver: DriverLink,
        name: &str,
        contents: Cache<VolumeSnapshotContent>,
        objects: Api<VolumeSnapshotContent>,
        timeout: Duration,
    ) -> Self {
        Self {
            driver,
            name: name.to_owned(),
            contents,
            objects,
            timeout,
            accepted: HashMap::new(),
            volumes: HashMap::new(),
            complaint: Complaint::default(),
        }
    }

    /// Makes rounds, with pauses of `every`, until draining begins. Sends an error to `refused` where the driver lacks the service.
    pub async fn keep(
        mut self,
        every: Duration,
        refused: mpsc::Sender<anyhow::Error>,
        shutdown: Shutdown,
    ) {
        let work = async {
            if let Err(error) = self.find_service().await {
                // Without a receiver the process is ending.
                let _ = refused.send(error).await;
                return;
            }
            loop {
                match self.round().await {
                    Ok(()) if self.complaint.is_over() => tracing::info!("bases are published"),
                    Ok(()) => {}
                    Err(error) => {
                        let error = format!("{error:#}");
                        if self.complaint.is_new(&error) {
                            tracing::warn!(error, "bases cannot be published; trying again");
                        }
                    }
                }
                sleep(every).await;
            }
        };
        tokio::select! {
            () = work => {}
            () = shutdown.draining() => {}
        }
    }

    /// # Errors
    /// The driver does not have it.
    async fn find_service(&self) -> anyhow::Result<()> {
        loop {
            // It names nothing, which every driver that has the service refuses.
            let asked = admin::ListBasesRequest::default();
            match self.driver.list_bases(asked, self.timeout).await {
                Err(status) if status.code() == Code::Unimplemented => anyhow::bail!(
                    "--publish-bases: the CSI driver {} does not have the service csiloopback.admin.v1.BaseAdmin; start without this flag",
                    self.name
                ),
                Err(status) if status.code() != Code::InvalidArgument => sleep(ASK_AGAIN).await,
                _ => return Ok(()),
            }
        }
    }

    /// Does for all contents of the driver what is to be done now. What goes wrong with one does not keep the others.
    async fn round(&mut self) -> anyhow::Result<()> {
        let contents = self.contents.all();
        let contents = contents.context("the watch of VolumeSnapshotContents does not run")?;
        let is_ours = |content: &Content| {
            content.spec.driver == self.name
                && content.metadata.deletion_timestamp.is_none()
                && content.ready_handle().is_some()
        };
        let contents: Vec<Content> = contents.into_iter().filter(is_ours).collect();
        let handles = contents.iter().filter_map(|content| content.ready_handle());
        let handles: HashSet<&str> = handles.collect();
        let names: HashSet<String> = contents.iter().map(|content| content.name_any()).collect();
        self.accepted.retain(|name, _| names.contains(name));
        self.volumes.retain(|handle, _| handles.contains(handle.as_str()));
        let mut failure = None;
        let bases = self.published(&contents, &mut failure).await;
        for content in &contents {
            let Some(handle) = content.ready_handle() else { continue };
            let mut wanted = BTreeMap::new();
            match self.heed(content, handle).await {
                Ok(error) => drop(wanted.insert(RETENTION_ERROR, error)),
                Err(error) => failure = Some(error),
            }
            // What the driver could not say stays as it is.
            if let Some(bases) = bases.get(handle) {
                wanted.insert(BASES, bases.clone());
            }
            if let Err(error) = self.write(content, wanted).await {
                failure = Some(error);
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// The annotation of each handle that is known: nothing for those that are not the newest of their volumes.
    async fn published(
        &mut self,
        contents: &[Content],
        failure: &mut Option<anyhow::Error>,
    ) -> HashMap<String, Option<String>> {
        // By volume: time of creation and handle.
        let mut newest: HashMap<String, (i64, &str)> = HashMap::new();
        let mut bases = HashMap::new();
        for content in contents {
            let Some(handle) = content.ready_handle() else { continue };
            match self.volume(content, handle).await {
                Ok(Some(volume)) => {
                    bases.insert(handle.to_owned(), None);
                    let created = content.status.as_ref().and_then(|status| status.creation_time);
                    let created = (created.unwrap_or_default(), handle);
                    let known = newest.entry(volume).or_insert(created);
                    *known = created.max(*known);
                }
                Ok(None) => {}
                Err(error) => *failure = Some(error),
            }
        }
        for (_, handle) in newest.into_values() {
            match self.bases(handle).await {
                Ok(Some(published)) => drop(bases.insert(handle.to_owned(), Some(published))),
                Ok(None) => drop(bases.remove(handle)),
                Err(error) => {
                    bases.remove(handle);
                    *failure = Some(error);
                }
            }
        }
        bases
    }

    /// The volume that a snapshot is of. A content that was made for a snapshot that was there before does not say.
    async fn volume(
        &mut self,
        content: &VolumeSnapshotContent,
        handle: &str,
    ) -> anyhow::Result<Option<String>> {
        if let Some(volume) = &content.spec.source.volume_handle {
            return Ok(Some(volume.clone()));
        }
        if let Some(volume) = self.volumes.get(handle) {
            return Ok(Some(volume.clone()));
        }
        let Some(answer) = self.list(handle, 1).await? else { return Ok(None) };
        let volume = answer.bases.into_iter().next().map(|base| base.volume_id);
        if let Some(volume) = &volume {
            self.volumes.insert(handle.to_owned(), volume.clone());
        }
        Ok(volume)
    }

    /// What is published of this snapshot, if it is this driver's.
    async fn bases(&self, handle: &str) -> anyhow::Result<Option<String>> {
        let Some(answer) = self.list(handle, MAX_BASES).await? else { return Ok(None) };
        published(answer).map(Some)
    }

    /// The first bases of deltas to this snapshot; nothing where it is of a driver of this name on another node, or gone.
    async fn list(
        &self,
        handle: &str,
        max: usize,
    ) -> anyhow::Result<Option<admin::ListBasesResponse>> {
        let asked = admin::ListBasesRequest {
            target_snapshot_id: handle.to_owned(),
            max_entries: i32::try_from(max).unwrap_or(i32::MAX),
            ..Default::default()
        };
        match self.driver.list_bases(asked, self.timeout).await {
            Ok(answer) => Ok(Some(answer)),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(of_driver(handle, &status)),
        }
    }

    /// Tells the driver how long the snapshot is to stay a base, if its content says so. Returns why it cannot.
    async fn heed(
        &mut self,
        content: &VolumeSnapshotContent,
        handle: &str,
    ) -> anyhow::Result<Option<String>> {
        let Some(asked) = content.annotations().get(RETENTION) else { return Ok(None) };
        let retention = match retention(asked) {
            Ok(retention) => retention,
            Err(error) => return Ok(Some(error)),
        };
        let name = content.name_any();
        if self.accepted.get(&name) == Some(asked) {
            return Ok(None);
        }
        let request = admin::SetBaseRetentionRequest {
            snapshot_id: handle.to_owned(),
            retention: Some(retention),
        };
        match self.driver.set_base_retention(request, self.timeout).await {
            Ok(_) => {
                tracing::info!(snapshot_id = handle, retention = asked, "a base has its retention");
                self.accepted.insert(name, asked.clone());
                Ok(None)
            }
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) if status.code() == Code::InvalidArgument => {
                Ok(Some(cut(status.message(), MAX_ERROR)))
            }
            Err(status) => Err(of_driver(handle, &status)),
        }
    }

    /// Gives the object these annotations, `None` for no such one, where they are not as they should be.
    async fn write(
        &self,
        content: &VolumeSnapshotContent,
        mut wanted: BTreeMap<&str, Option<String>>,
    ) -> anyhow::Result<()> {
        wanted.retain(|name, value| content.annotations().get(*name) != value.as_ref());
        if wanted.is_empty() {
            return Ok(());
        }
        let name = content.name_any();
        if let Some(Some(error)) = wanted.get(RETENTION_ERROR) {
            tracing::warn!(content = name, error, "{RETENTION} cannot be heeded");
        }
        let patch = Patch::Merge(json!({ "metadata": { "annotations": wanted } }));
        let patched = in_time(self.objects.patch(&name, &PatchParams::default(), &patch)).await;
        tolerate(patched, &[404]).with_context(|| format!("annotating {name}"))
    }
}

fn published(answer: admin::ListBasesResponse) -> anyhow::Result<String> {
    let more = !answer.next_token.is_empty();
    let volume = answer.bases.first().map(|base| base.volume_id.clone()).unwrap_or_default();
    let base = |base: admin::Base| {
        let seconds = base.expires_at.and_then(|time| u64::try_from(time.seconds).ok());
        let time =
            seconds.map(|seconds| UNIX_EPOCH + Duration::from_secs(seconds.min(LAST_SECOND)));
        Base {
            handle: base.snapshot_id,
            expires: time.map(|time| humantime::format_rfc3339_seconds(time).to_string()),
        }
    };
    let bases = answer.bases.into_iter().map(base).collect();
    Ok(serde_json::to_string(&Published { volume, bases, more })?)
}

fn retention(text: &str) -> Result<Retention, String> {
    if text == BY_DEFAULT {
        return Ok(Retention::ByDefault(true));
    }
    match humantime::parse_duration(text) {
        Ok(time) => Ok(Retention::ForSeconds(time.as_secs())),
        Err(error) => {
            let text = cut(text, MAX_ERROR / 4);
            Err(format!("{text:?} is neither a time such as 30days nor {BY_DEFAULT}: {error}"))
        }
    }
}

fn of_driver(handle: &str, status: &Status) -> anyhow::Error {
    let (code, message) = (code_name(status.code()), status.message());
    anyhow::anyhow!("the driver answers {code} for {handle}: {message}")
}

#[cfg(test)]
mod tests {
    use prost_types::Timestamp;

    use super::*;

    #[test]
    fn a_retention_is_a_time_or_the_default() {
        assert_eq!(retention("30days"), Ok(Retention::ForSeconds(30 * 86_400)));
        assert_eq!(retention("0s"), Ok(Retention::ForSeconds(0)));
        assert_eq!(retention("default"), Ok(Retention::ByDefault(true)));
        for bad in ["", "30", "-1s", "soon", &"9".repeat(10_000)] {
            let error = retention(bad).unwrap_err();
            assert!(error.contains("30days") && error.len() < MAX_ERROR, "{error}");
        }
    }

    #[test]
    fn what_is_published_is_short_and_the_same_each_time() {
        let base = |handle: &str, expires: Option<i64>| admin::Base {
            snapshot_id: handle.into(),
            volume_id: "vol".into(),
            expires_at: expires.map(|seconds| Timestamp { seconds, nanos: 0 }),
            ..Default::default()
        };
        let answer = |next_token: &str| admin::ListBasesResponse {
            bases: vec![base("b", None), base("a", Some(1_800_000_000))],
            next_token: next_token.into(),
        };
        let expected = r#"{"volume":"vol","bases":[{"handle":"b"},{"handle":"a","expires":"2027-01-15T08:00:00Z"}]"#;
        assert_eq!(published(answer("")).unwrap(), format!("{expected}}}"));
        assert_eq!(published(answer("7")).unwrap(), format!("{expected},\"more\":true}}"));
    }
}
