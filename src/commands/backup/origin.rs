//! Where a backup comes from. A driver's socket: the driver lists the blocks, and a temporary
//! volume has the data. Kubernetes: the driver's sidecar lists the blocks, and the data is on a
//! device, that of a PersistentVolumeClaim from the VolumeSnapshot.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::copying::Copying;
use super::listing::{Blocks, Listing};
use super::manifest::{Group, Subject};
use crate::client::block_map::{BlockMap, Consumer, Query, Source, Window};
use crate::client::cluster::{self, ClusterArgs};
use crate::client::connection::Connection;
use crate::client::scratch::Scratch;
use crate::client::{Options, base, format, names};
use grpc::proto::admin::v1 as admin;
use grpc::proto::csi::v1 as csi;

/// Where the blocks and the data of a snapshot come from.
pub enum Origin<'o> {
    Driver {
        connection: &'o Connection,
        snapshot: &'o csi::Snapshot,
    },
    Kubernetes {
        options: &'o Options,
        cluster: &'o ClusterArgs,
        /// Name of the VolumeSnapshot.
        snapshot: &'o str,
        device: &'o Path,
    },
}

/// The snapshot with this name or id, ready to be read.
pub async fn snapshot(connection: &Connection, reference: &str) -> Result<csi::Snapshot> {
    let snapshot = names::find_snapshot(connection, reference).await?;
    let snapshot = snapshot.with_context(|| {
        format!(
            "no snapshot {reference:?}; `snapshot list` shows all, and a deleted one has no data"
        )
    })?;
    ensure!(snapshot.ready_to_use, "snapshot {} is not ready; repeat later", snapshot.snapshot_id);
    Ok(snapshot)
}

/// Sets the size of a snapshot that its driver does not report (CSI, `Snapshot`): that of its
/// listing, else that of its volume.
pub async fn find_size(connection: &Connection, snapshot: &mut csi::Snapshot) -> Result<()> {
    let (id, volume) = (snapshot.snapshot_id.clone(), &snapshot.source_volume_id);
    ensure!(
        !volume.is_empty(),
        "the driver cannot list snapshots, so the volume of {id} is unknown; back up a VolumeSnapshot (--namespace)"
    );
    if names::size(snapshot).is_some() {
        return Ok(());
    }
    let target = names::Subject::of(snapshot);
    let listing = names::listing(connection, None, &target, FIRST).await?;
    let listed = Size.consume(listing).await?.and_then(|bytes| i64::try_from(bytes).ok());
    snapshot.size_bytes = match listed {
        Some(bytes) => bytes,
        None => names::volume(connection, volume).await?.capacity_bytes,
    };
    ensure!(snapshot.size_bytes > 0, "the driver reports no size of snapshot {id} and its volume");
    Ok(())
}

/// Bytes of a VolumeSnapshot without a size: those of its listing, else of the device with its data.
pub async fn size_in_cluster(
    options: &Options,
    cluster: &ClusterArgs,
    snapshot: &str,
    device: &Path,
) -> Result<u64> {
    let query = Query::Allocated { snapshot: snapshot.to_owned() };
    if let Some(bytes) = cluster::list(options, cluster.clone(), query, FIRST, Size).await? {
        return Ok(bytes);
    }
    let opened = File::open(device).with_context(|| format!("open {}", device.display()))?;
    let end = (&opened).seek(SeekFrom::End(0));
    end.with_context(|| format!("get the size of {}", device.display()))
}

/// For a listing of which only the first message is read.
const FIRST: Window = Window { starting_offset: 0, max_results: 1 };

/// Reads the capacity of a listing.
struct Size;

impl Consumer for Size {
    type Output = Option<u64>;

    async fn consume<S: Source>(self, mut map: BlockMap<S>) -> Result<Option<u64>> {
        map.next().await?;
        Ok(map.shape().and_then(|shape| shape.capacity_bytes))
    }
}

/// What a backup of a snapshot, whose size is known, is a backup of.
pub fn subject(snapshot: &csi::Snapshot, group: Option<Group>) -> Result<Subject> {
    let id = &snapshot.snapshot_id;
    let capacity_bytes = names::size(snapshot).context("the snapshot's size is unknown")?;
    Ok(Subject {
        volume_id: snapshot.source_volume_id.clone(),
        volume: names::name_of(&snapshot.source_volume_id).to_owned(),
        snapshot_id: id.clone(),
        snapshot: names::name_of(id).to_owned(),
        // CSI has no place for it.
        change_id: None,
        snapshot_created: format::time(snapshot.creation_time.as_ref()),
        capacity_bytes,
        base: None,
        full_because: None,
        group,
    })
}

/// The same for a VolumeSnapshot of this many bytes.
///
/// # Errors
/// It was not taken of a volume of the cluster.
pub fn subject_in_cluster(
    snapshot: &cluster::Snapshot,
    capacity_bytes: u64,
    group: Option<Group>,
) -> Result<Subject> {
    let cluster::Snapshot { handle, change_id, claim, created, .. } = snapshot;
    let volume_id = snapshot.volume()?.to_owned();
    Ok(Subject {
        volume: claim.clone().unwrap_or_else(|| names::name_of(&volume_id).to_owned()),
        volume_id,
        snapshot_id: handle.clone(),
        snapshot: snapshot.name.clone(),
        change_id: change_id.clone(),
        snapshot_created: created.clone(),
        capacity_bytes,
        base: None,
        full_because: None,
        group,
    })
}

impl Origin<'_> {
    /// The snapshots that can be the base of a backup, in the driver's order, newest first, starting
    /// with the snapshot itself. Empty if the driver does not report them: other drivers do not have
    /// this call.
    pub async fn bases(&self, subject: &Subject) -> Vec<admin::Base> {
        let Self::Driver { connection, .. } = self else { return Vec::new() };
        let request = admin::ListBasesRequest {
            target_snapshot_id: subject.snapshot_id.clone(),
            ..Default::default()
        };
        base::list_all(connection, request).await.unwrap_or_default()
    }

    /// Begins an attempt, only after its listing was accepted, and copies what is missing. The inner
    /// result is that of the clean-up.
    pub async fn copy(&self, copying: Copying<'_, '_>) -> Result<Result<()>> {
        let base = copying.attempt.base_id().map(str::to_owned);
        let query = |target: &str| match base.clone() {
            None => Query::Allocated { snapshot: target.to_owned() },
            Some(base) => Query::Delta { base, target: target.to_owned() },
        };
        match self {
            Self::Driver { connection, snapshot } => {
                by_driver(connection, snapshot, query(&snapshot.snapshot_id), copying).await
            }
            Self::Kubernetes { options, cluster, snapshot, device } => {
                let cluster = ClusterArgs::clone(cluster).base_by_handle(base.is_some());
                let starting_offset = i64::try_from(copying.attempt.writer.end())?;
                let window = Window { starting_offset, max_results: 0 };
                let copy = Copy { copying, device };
                cluster::list(options, cluster, query(snapshot), window, copy).await.map(Ok)
            }
        }
    }
}

async fn by_driver(
    connection: &Connection,
    snapshot: &csi::Snapshot,
    query: Query,
    mut copying: Copying<'_, '_>,
) -> Result<Result<()>> {
    let stop = copying.stop;
    // First of all: what the driver refuses needs no volume.
    let listing = Listing::open(connection, query, copying.attempt.writer.end());
    let mut blocks = stop.wait(listing).await?.into_blocks();
    copying.attempt.begin().await?;
    let first = stop.wait(blocks.next()).await?;
    let mut scratch = Scratch::start(connection).await?;
    let copied = async {
        let device = scratch.attach(connection, stop, snapshot).await?;
        copying.copy(first, blocks, &device).await
    }
    .await;
    match (copied, scratch.clean(connection).await) {
        (Ok(()), cleaned) => Ok(cleaned),
        (Err(error), Ok(())) => Err(error),
        (Err(error), Err(left)) => Err(error.context(format!("{left:#}"))),
    }
}

/// Copies the blocks of a listing through Kubernetes.
struct Copy<'c, 'r> {
    copying: Copying<'c, 'r>,
    device: &'c Path,
}

impl Consumer for Copy<'_, '_> {
    type Output = ();

    async fn consume<S: Source>(mut self, map: BlockMap<S>) -> Result<()> {
        let mut blocks = Blocks::new(map, self.copying.attempt.writer.end());
        // The sidecar's refusal arrives with the first blocks.
        let first = self.copying.stop.wait(blocks.next()).await?;
        self.copying.attempt.begin().await?;
        self.copying.copy(first, blocks, self.device).await
    }
}
