//! `--publish-bases`: publishes the bases that the driver's BaseAdmin service reports as an
//! annotation of VolumeSnapshotContents, and applies the annotation that requests how long a
//! snapshot remains a base. Works in rounds; state between rounds only saves calls. All replicas
//! write the same values.

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
use crate::grpc::{code_name, truncate};
use crate::kubernetes::cache::{Cache, in_time};
use crate::kubernetes::cached::{BASES, RETENTION, RETENTION_ERROR};
use crate::kubernetes::client::tolerate;
use crate::kubernetes::snapshot::VolumeSnapshotContent;
use crate::proto::admin::v1 as admin;
use crate::telemetry::rate_limited_log::RateLimitedLog;
use crate::telemetry::shutdown::Shutdown;
use admin::set_base_retention_request::Retention;

/// Value of the annotation [`RETENTION`].
const BY_DEFAULT: &str = "default";

/// Maximum number of bases in an annotation. An object's annotations are limited to 256 KiB, and a
/// base takes about 150 bytes.
const MAX_BASES: usize = 100;
/// Maximum bytes of an error in an annotation.
const MAX_ERROR: usize = 512;
/// Interval between attempts to find the service of a driver that is not ready.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// End of the year 9999, the last time that RFC 3339 can express.
const LAST_SECOND: u64 = 253_402_300_799;

type Content = Arc<VolumeSnapshotContent>;

pub struct Bases {
    driver: DriverLink,
    /// Name of the CSI driver.
    name: String,
    contents: Cache<VolumeSnapshotContent>,
    objects: Api<VolumeSnapshotContent>,
    /// Timeout of a call to the driver.
    timeout: Duration,
    /// The last retention that the driver accepted, by content.
    accepted: HashMap<String, String>,
    /// Volumes of snapshots whose contents do not name them, by handle.
    volumes: HashMap<String, String>,
    error_log: RateLimitedLog,
}

/// Value of the annotation [`BASES`].
#[derive(Debug, Serialize)]
struct Published {
    volume: String,
    /// Newest first, starting with the snapshot itself.
    bases: Vec<Base>,
    /// Whether there are older bases than these.
    #[serde(skip_serializing_if = "is_false")]
    more: bool,
}

#[derive(Debug, Serialize)]
struct Base {
    handle: String,
    /// When it stops being a base (RFC 3339). Missing while the retention time has not started.
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
            error_log: RateLimitedLog::default(),
        }
    }

    /// Runs a round every `every` until draining begins. Sends an error to `refused` if the driver
    /// does not have the service.
    pub async fn run(
        mut self,
        every: Duration,
        refused: mpsc::Sender<anyhow::Error>,
        shutdown: Shutdown,
    ) {
        let work = async {
            if let Err(error) = self.find_service().await {
                // A missing receiver means that the process is ending.
                let _ = refused.send(error).await;
                return;
            }
            loop {
                match self.round().await {
                    Ok(()) if self.error_log.clear() => {
                        tracing::info!("publishing bases succeeded")
                    }
                    Ok(()) => {}
                    Err(error) => {
                        let error = format!("{error:#}");
                        if self.error_log.is_new(&error) {
                            tracing::warn!(error, "failed to publish bases; retrying");
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

    /// Waits until the driver responds.
    ///
    /// # Errors
    /// The driver does not have the service.
    async fn find_service(&self) -> anyhow::Result<()> {
        loop {
            // An empty request: every driver that has the service rejects it.
            let request = admin::ListBasesRequest::default();
            match self.driver.list_bases(request, self.timeout).await {
                Err(status) if status.code() == Code::Unimplemented => anyhow::bail!(
                    "--publish-bases: the CSI driver {} does not have the service csiloopback.admin.v1.BaseAdmin; remove the flag",
                    self.name
                ),
                Err(status) if status.code() != Code::InvalidArgument => sleep(RETRY_AFTER).await,
                _ => return Ok(()),
            }
        }
    }

    /// Processes all contents of the driver. An error with one content does not stop the others.
    async fn round(&mut self) -> anyhow::Result<()> {
        let contents = self.contents.all();
        let contents = contents.context("the watch of VolumeSnapshotContents is not running")?;
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
            let mut desired = BTreeMap::new();
            match self.apply_retention(content, handle).await {
                Ok(error) => drop(desired.insert(RETENTION_ERROR, error)),
                Err(error) => failure = Some(error),
            }
            // Without a response of the driver the annotation stays unchanged.
            if let Some(bases) = bases.get(handle) {
                desired.insert(BASES, bases.clone());
            }
            if let Err(error) = self.write(content, desired).await {
                failure = Some(error);
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// The annotation's value by handle: `None` for a handle that is not its volume's newest.
    /// Handles for which the driver gave no answer are missing.
    async fn published(
        &mut self,
        contents: &[Content],
        failure: &mut Option<anyhow::Error>,
    ) -> HashMap<String, Option<String>> {
        let mut of_volumes: HashMap<String, HashSet<&str>> = HashMap::new();
        let mut bases = HashMap::new();
        for content in contents {
            let Some(handle) = content.ready_handle() else { continue };
            match self.volume(content, handle).await {
                Ok(Some(volume)) => {
                    bases.insert(handle.to_owned(), None);
                    of_volumes.entry(volume).or_default().insert(handle);
                }
                Ok(None) => {}
                Err(error) => *failure = Some(error),
            }
        }
        for (volume, handles) in of_volumes {
            let published = self.of_newest(&volume, &handles).await;
            let unknown = !matches!(published, Ok(Some(_)));
            bases.retain(|handle, _| !unknown || !handles.contains(handle.as_str()));
            match published {
                Ok(found) => bases.extend(found.map(|(handle, value)| (handle, Some(value)))),
                Err(error) => *failure = Some(error),
            }
        }
        bases
    }

    /// The newest of these snapshots of a volume and the annotation's value for it. `None` if this
    /// driver has none of them.
    async fn of_newest(
        &self,
        volume: &str,
        handles: &HashSet<&str>,
    ) -> anyhow::Result<Option<(String, String)>> {
        let Some(handle) = self.newest(volume, handles).await? else { return Ok(None) };
        Ok(self.bases(handle).await?.map(|value| (handle.to_owned(), value)))
    }

    /// The newest of these snapshots of a volume, in the driver's order: creation times may descend
    /// after its clock was set back, and that of an imported content may be the import's.
    async fn newest<'h>(
        &self,
        volume: &str,
        handles: &HashSet<&'h str>,
    ) -> anyhow::Result<Option<&'h str>> {
        if let [handle] = handles.iter().copied().collect::<Vec<_>>()[..] {
            return Ok(Some(handle));
        }
        let mut request =
            admin::ListBasesRequest { volume_id: volume.to_owned(), ..Default::default() };
        loop {
            let Some(page) = self.list(volume, request.clone()).await? else { return Ok(None) };
            let mut existing = page.bases.iter().filter(|base| base.deleted_at.is_none());
            let listed = existing.find_map(|base| handles.get(base.snapshot_id.as_str()));
            if listed.is_some() || page.next_token.is_empty() {
                return Ok(listed.copied());
            }
            request.starting_token = page.next_token;
        }
    }

    /// The handle of a snapshot's volume. A pre-provisioned content does not name it.
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
        let Some(answer) = self.list(handle, of_target(handle, 1)).await? else { return Ok(None) };
        let volume = answer.bases.into_iter().next().map(|base| base.volume_id);
        if let Some(volume) = &volume {
            self.volumes.insert(handle.to_owned(), volume.clone());
        }
        Ok(volume)
    }

    /// The annotation's value for this snapshot, or `None` if this driver does not have the
    /// snapshot.
    async fn bases(&self, handle: &str) -> anyhow::Result<Option<String>> {
        let request = of_target(handle, MAX_BASES);
        let Some(answer) = self.list(handle, request).await? else { return Ok(None) };
        published(answer).map(Some)
    }

    /// Bases of the object with this handle, or `None` if it is deleted or belongs to a driver of the
    /// same name on another node.
    async fn list(
        &self,
        handle: &str,
        request: admin::ListBasesRequest,
    ) -> anyhow::Result<Option<admin::ListBasesResponse>> {
        match self.driver.list_bases(request, self.timeout).await {
            Ok(answer) => Ok(Some(answer)),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(of_driver(handle, &status)),
        }
    }

    /// Sets the retention that the content's annotation requests. Returns why the request is
    /// invalid.
    async fn apply_retention(
        &mut self,
        content: &VolumeSnapshotContent,
        handle: &str,
    ) -> anyhow::Result<Option<String>> {
        let Some(requested) = content.annotations().get(RETENTION) else { return Ok(None) };
        let retention = match retention(requested) {
            Ok(retention) => retention,
            Err(error) => return Ok(Some(error)),
        };
        let name = content.name_any();
        if self.accepted.get(&name) == Some(requested) {
            return Ok(None);
        }
        let request = admin::SetBaseRetentionRequest {
            snapshot_id: handle.to_owned(),
            retention: Some(retention),
        };
        match self.driver.set_base_retention(request, self.timeout).await {
            Ok(_) => {
                tracing::info!(
                    snapshot_id = handle,
                    retention = requested,
                    "set the retention of a base"
                );
                self.accepted.insert(name, requested.clone());
                Ok(None)
            }
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) if status.code() == Code::Unimplemented => Ok(Some(
                "the driver's socket for the sidecar sets no retention; start the driver with --metadata-base-retention"
                    .to_owned(),
            )),
            Err(status) if status.code() == Code::InvalidArgument => {
                Ok(Some(truncate(status.message(), MAX_ERROR)))
            }
            Err(status) => Err(of_driver(handle, &status)),
        }
    }

    /// Updates the object's annotations where they differ; `None` removes an annotation.
    async fn write(
        &self,
        content: &VolumeSnapshotContent,
        mut desired: BTreeMap<&str, Option<String>>,
    ) -> anyhow::Result<()> {
        desired.retain(|name, value| content.annotations().get(*name) != value.as_ref());
        if desired.is_empty() {
            return Ok(());
        }
        let name = content.name_any();
        if let Some(Some(error)) = desired.get(RETENTION_ERROR) {
            tracing::warn!(content = name, error, "cannot apply the annotation {RETENTION}");
        }
        let patch = Patch::Merge(json!({ "metadata": { "annotations": desired } }));
        let patched = in_time(self.objects.patch(&name, &PatchParams::default(), &patch)).await;
        tolerate(patched, &[404])
            .with_context(|| format!("failed to annotate VolumeSnapshotContent {name}"))
    }
}

/// The first bases of deltas to this snapshot.
fn of_target(handle: &str, max: usize) -> admin::ListBasesRequest {
    admin::ListBasesRequest {
        target_snapshot_id: handle.to_owned(),
        max_entries: i32::try_from(max).unwrap_or(i32::MAX),
        ..Default::default()
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
            let text = truncate(text, MAX_ERROR / 4);
            Err(format!("{text:?} is neither a duration such as 30days nor {BY_DEFAULT}: {error}"))
        }
    }
}

fn of_driver(handle: &str, status: &Status) -> anyhow::Error {
    let (code, message) = (code_name(status.code()), status.message());
    anyhow::anyhow!("the driver returned {code} for {handle}: {message}")
}

#[cfg(test)]
mod tests {
    use prost_types::Timestamp;

    use super::*;

    #[test]
    fn a_retention_is_a_duration_or_the_default() {
        assert_eq!(retention("30days"), Ok(Retention::ForSeconds(30 * 86_400)));
        assert_eq!(retention("0s"), Ok(Retention::ForSeconds(0)));
        assert_eq!(retention("default"), Ok(Retention::ByDefault(true)));
        for bad in ["", "30", "-1s", "soon", &"9".repeat(10_000)] {
            let error = retention(bad).unwrap_err();
            assert!(error.contains("30days") && error.len() < MAX_ERROR, "{error}");
        }
    }

    #[test]
    fn the_annotation_is_compact_and_deterministic() {
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
