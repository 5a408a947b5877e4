//! From the name of a VolumeSnapshot to the service that lists its blocks: VolumeSnapshot,
//! VolumeSnapshotContent, driver, SnapshotMetadataService.

use std::time::Duration;

use anyhow::{Context, anyhow};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::ListParams;
use kube::{Api, Client};

use super::failure::{Failure, Retry};
use super::wire::Place;
use common::quantity;
use kubernetes::definition::next_step;
use kubernetes::metadata_service::{
    DRIVER_LABEL, SnapshotMetadataService, SnapshotMetadataServiceSpec,
};
use kubernetes::name;
use kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};

/// Time limit of one call of the API server.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Looks up objects in a cluster.
pub struct Finder {
    client: Client,
    namespace: String,
    address: Option<String>,
}

/// A VolumeSnapshot that is ready to use, with what a backup of it needs.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub name: String,
    /// What messages call it.
    pub what: String,
    pub driver: String,
    /// CSI handle.
    pub handle: String,
    /// What its driver takes as the base of a delta, if not the handle.
    pub change_id: Option<String>,
    /// CSI handle of its volume; an imported snapshot has none.
    pub volume_handle: Option<String>,
    /// The PersistentVolumeClaim that it was taken of.
    pub claim: Option<String>,
    /// When it was taken, in UTC.
    pub created: Option<String>,
    /// The size that its driver reports, which CSI does not require.
    pub bytes: Option<u64>,
    /// Name of its VolumeSnapshotContent.
    pub content: String,
    /// The node that holds it, if each node's controllers have their own.
    pub node: Option<String>,
    /// Whether its volume has a filesystem, so that a claim in block mode from it is refused while
    /// the content lacks [`ALLOW_MODE_CHANGE`].
    pub is_bound_to_filesystem: bool,
}

impl Snapshot {
    /// CSI handle of its volume.
    ///
    /// # Errors
    /// The snapshot was imported.
    pub fn volume(&self) -> anyhow::Result<&str> {
        self.volume_handle.as_deref().with_context(|| {
            let what = &self.what;
            format!("{what} was imported, so its volume is unknown: back up a snapshot of a claim")
        })
    }
}

/// Annotation of a VolumeSnapshotContent that allows claims in another volume mode (KEP-3141).
pub const ALLOW_MODE_CHANGE: &str = "snapshot.storage.kubernetes.io/allow-volume-mode-change";

/// A driver's sidecar, and the audience of its tokens.
#[derive(Debug)]
pub struct Service {
    pub place: Place,
    pub audience: String,
}

impl Finder {
    /// `address` replaces the one that a SnapshotMetadataService names.
    pub fn new(client: Client, namespace: &str, address: Option<String>) -> Self {
        Self { client, namespace: namespace.to_owned(), address }
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The CSI driver that holds a snapshot, and the snapshot's size in bytes, if known.
    pub async fn target(&self, snapshot: &str) -> Result<(String, Option<u64>), Failure> {
        let (_, found, content) = self.found(snapshot).await?;
        let claim = found.spec.source.persistent_volume_claim_name;
        let size = match (restore_size(&content), claim) {
            (None, Some(claim)) => {
                let claims = Api::namespaced(self.client.clone(), &self.namespace);
                // It is not needed if the listing has messages.
                call("", claims.get_opt(&claim)).await.ok().flatten().as_ref().and_then(capacity)
            }
            (size, _) => size,
        };
        Ok((content.spec.driver, size))
    }

    /// The CSI handle of the base of a delta, which every sidecar accepts, or what its driver takes
    /// instead. Names are looked up here, with the caller's rights, so that an object of another
    /// user cannot replace a handle.
    pub async fn base(&self, base: &str) -> Result<String, Failure> {
        let what = self.what(base);
        if !name::is_object(base) {
            return Err(no_name(base, BASE_ID));
        }
        let found = call(&what, self.snapshots().get_opt(base)).await?;
        let found =
            found.ok_or_else(|| Failure::never(anyhow!("{what} does not exist{BASE_ID}")))?;
        if let Some(change_id) = found.change_id() {
            return Ok(change_id.to_owned());
        }
        let status = self.content(&what, &found).await?.status;
        let handle = status.and_then(|status| status.snapshot_handle).filter(|it| !it.is_empty());
        handle.ok_or_else(|| Failure::new(Retry::Always, anyhow!("{what} has no CSI handle yet")))
    }

    /// Whether a VolumeSnapshot has this name, as far as the caller may know.
    pub async fn exists(&self, text: &str) -> bool {
        let snapshots = self.snapshots();
        name::is_object(text) && matches!(call("", snapshots.get_opt(text)).await, Ok(Some(_)))
    }

    /// The SnapshotMetadataService of a driver: the one with its name, else the one with its label.
    pub async fn service(&self, driver: &str) -> Result<Service, Failure> {
        let api: Api<SnapshotMetadataService> = Api::all(self.client.clone());
        let what = format!("SnapshotMetadataService of driver {driver}");
        let spec = match call(&what, async { if_found(api.get(driver).await) }).await? {
            Some(found) => found.spec,
            None => {
                let labelled = ListParams::default().labels(&format!("{DRIVER_LABEL}={driver}"));
                let listed = async { if_found(api.list(&labelled).await) };
                let Some(listed) = call(&what, listed).await? else {
                    let step = next_step::<SnapshotMetadataService>(&self.client).await;
                    return Err(Failure::never(anyhow!("{what}: {step}")));
                };
                only(driver, listed.items)?
            }
        };
        let place = Place::new(&what, spec.address, self.address.as_deref(), spec.ca_cert.0)?;
        Ok(Service { place, audience: spec.audience })
    }

    /// A snapshot that is ready to use.
    pub async fn snapshot(&self, snapshot: &str) -> Result<Snapshot, Failure> {
        let (what, found, content) = self.found(snapshot).await?;
        let not_ready =
            || Failure::new(Retry::Always, anyhow!("{what} is not ready to use; repeat later"));
        let handle = content.ready_handle().ok_or_else(not_ready)?.to_owned();
        let bytes = restore_size(&content);
        let status = content.status.clone().unwrap_or_default();
        let mode = content.spec.source_volume_mode.as_deref();
        Ok(Snapshot {
            name: snapshot.to_owned(),
            node: content.node().map(str::to_owned),
            handle,
            change_id: found.change_id().map(str::to_owned),
            driver: content.spec.driver,
            volume_handle: content.spec.source.volume_handle,
            claim: found.spec.source.persistent_volume_claim_name,
            created: status.creation_time.and_then(utc),
            bytes,
            content: content.metadata.name.unwrap_or_default(),
            is_bound_to_filesystem: mode == Some("Filesystem"),
            what,
        })
    }

    /// A VolumeSnapshot with what messages call it, and its content.
    async fn found(
        &self,
        snapshot: &str,
    ) -> Result<(String, VolumeSnapshot, VolumeSnapshotContent), Failure> {
        let what = self.what(snapshot);
        if !name::is_object(snapshot) {
            return Err(no_name(snapshot, ""));
        }
        let found = call(&what, self.snapshots().get(snapshot)).await?;
        let content = self.content(&what, &found).await?;
        Ok((what, found, content))
    }

    pub fn snapshots(&self) -> Api<VolumeSnapshot> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn what(&self, snapshot: &str) -> String {
        format!("VolumeSnapshot {}/{snapshot}", self.namespace)
    }

    /// The content of a VolumeSnapshot, which messages call `what`.
    async fn content(
        &self,
        what: &str,
        snapshot: &VolumeSnapshot,
    ) -> Result<VolumeSnapshotContent, Failure> {
        let status = snapshot.status.clone().unwrap_or_default();
        let name = status.bound_volume_snapshot_content_name.filter(|name| !name.is_empty());
        let Some(name) = name else {
            let error = status.error.and_then(|error| error.message).unwrap_or_default();
            let because = if error.is_empty() { error } else { format!(": {error}") };
            return Err(Failure::new(
                Retry::Always,
                anyhow!("{what} is not bound to a VolumeSnapshotContent yet{because}"),
            ));
        };
        let content_what = format!("VolumeSnapshotContent {name}");
        let contents: Api<VolumeSnapshotContent> = Api::all(self.client.clone());
        let content = call(&content_what, contents.get(&name)).await?;
        if !content.belongs_to(snapshot) {
            let error = anyhow!("{content_what} is not bound to {what}");
            return Err(Failure::new(Retry::Always, error));
        }
        Ok(content)
    }
}

/// The size in bytes that the driver reports; 0 means that it does not (CSI, `Snapshot`).
fn restore_size(content: &VolumeSnapshotContent) -> Option<u64> {
    let bytes = content.status.as_ref()?.restore_size?;
    u64::try_from(bytes).ok().filter(|bytes| *bytes > 0)
}

/// Bytes of a claim's volume.
pub fn capacity(claim: &PersistentVolumeClaim) -> Option<u64> {
    let storage = claim.status.as_ref()?.capacity.as_ref()?.get("storage")?;
    quantity::parse(&storage.0).ok().filter(|bytes| *bytes > 0)
}

/// A time in nanoseconds since 1970, in UTC.
fn utc(nanos: i64) -> Option<String> {
    let since = Duration::from_nanos(u64::try_from(nanos).ok()?);
    Some(humantime::format_rfc3339_millis(std::time::UNIX_EPOCH + since).to_string())
}

/// The next step for a base without a VolumeSnapshot.
const BASE_ID: &str = "; --base-id accepts the CSI handle of a deleted base";

fn no_name(snapshot: &str, step: &str) -> Failure {
    Failure::never(anyhow!(
        "{snapshot:?} cannot be the name of a VolumeSnapshot: --namespace requires names instead of ids{step}"
    ))
}

fn only(
    driver: &str,
    mut found: Vec<SnapshotMetadataService>,
) -> Result<SnapshotMetadataServiceSpec, Failure> {
    match (found.pop(), found.as_slice()) {
        (Some(one), []) => Ok(one.spec),
        (None, _) => Err(Failure::never(anyhow!(
            "no SnapshotMetadataService is named {driver} or labelled {DRIVER_LABEL}={driver}: the \
             driver's sidecar does not publish itself to backup applications"
        ))),
        (Some(last), others) => {
            let all = others.iter().chain([&last]);
            let names: Vec<_> = all.filter_map(|one| one.metadata.name.as_deref()).collect();
            Err(Failure::never(anyhow!(
                "several SnapshotMetadataServices are labelled {DRIVER_LABEL}={driver}, and none has the \
                 driver's name: {}",
                names.join(", ")
            )))
        }
    }
}

/// `None` without the object or its kind: the 404 for an unknown kind is no JSON.
fn if_found<T>(answer: kube::Result<T>) -> kube::Result<Option<T>> {
    match answer {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        found => found.map(Some),
    }
}

/// One call of the API server with a time limit.
pub async fn call<T>(
    what: &str,
    work: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Failure> {
    call_within(CALL_TIMEOUT, what, work).await
}

/// The same with another time limit.
pub async fn call_within<T>(
    limit: Duration,
    what: &str,
    work: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(limit, work).await {
        Ok(outcome) => outcome.map_err(|error| Failure::api(what, error)),
        Err(_) => Err(Failure::new(
            Retry::OnceBegun,
            anyhow!("{what}: no response from the API server within {} s", limit.as_secs()),
        )),
    }
}
