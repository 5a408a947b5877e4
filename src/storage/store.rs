//! The shared state of all operations: pool, catalog, locks and file names.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{SystemTime, UNIX_EPOCH};

use super::Config;
use super::catalog::{Catalog, SnapshotFile};
use super::clone_ahead::ClonesAhead;
use super::error::{Context, Error, Result};
use super::freeze_guard::Guard;
use super::locks::Locks;
use super::loop_device::{LoopDevice, timeless};
use super::model::{Predecessor, Snapshot, Volume};
use super::pool::{self, Pool};
use super::steady_clock::SteadyClock;
use super::tracker::RecordReader;
use super::writeback::Unrecorded;

/// Prefixes of lock keys for names.
pub const SNAPSHOT_NAME_LOCK: &str = "name of snapshot ";
pub const VOLUME_NAME_LOCK: &str = "name of volume ";
pub const GROUP_NAME_LOCK: &str = "name of group snapshot ";

#[derive(Debug)]
pub struct Store {
    pub pool: Arc<dyn Pool>,
    pub pool_reason: String,
    pub catalog: Catalog,
    pub locks: Locks,
    pub config: Config,
    /// The largest volume whose backing file the pool's filesystem supports, in bytes.
    pub max_volume_bytes: u64,
    /// The number of snapshots since the start whose filesystem could not be frozen.
    pub crash_consistent: AtomicU64,
    /// Lost writes that are not recorded in the catalog.
    pub unrecorded: Unrecorded,
    pub clones_ahead: ClonesAhead,
    /// Whether pods need the space of deleted data that is in use ([`maintenance::check_need`]).
    ///
    /// [`maintenance::check_need`]: super::maintenance::check_need
    pub needs_space: AtomicBool,
    pub clock: SteadyClock,
    /// Thaws filesystems if this process is killed.
    pub freeze_guard: Arc<Guard>,
    /// Excludes other instances while it is open.
    pub _instance_lock: nix::fcntl::Flock<File>,
}

impl Store {
    /// Removes the clone made ahead from a snapshot, if there is one, with `remove`.
    pub fn remove_clone_ahead(
        &self,
        snapshot_id: &str,
        remove: fn(&Path) -> Result<()>,
    ) -> Result<()> {
        self.clones_ahead.remove(&self.pool.clone_ahead_path(snapshot_id), remove)
    }

    /// Removes a file that the catalog no longer refers to.
    pub fn remove(&self, file: SnapshotFile) -> Result<()> {
        self.remove_with(file, pool::remove)
    }

    /// Like [`Self::remove`], but waits until the blocks are free.
    pub fn remove_and_free(&self, file: SnapshotFile) -> Result<()> {
        self.remove_with(file, pool::remove_and_free)
    }

    fn remove_with(&self, file: SnapshotFile, remove: fn(&Path) -> Result<()>) -> Result<()> {
        if let SnapshotFile::Data { id } = &file {
            // The clone shares the blocks of the data.
            self.remove_clone_ahead(id, remove)?;
        }
        remove(&self.path_of(&file))?;
        self.catalog.note_removal(file);
        Ok(())
    }

    fn path_of(&self, file: &SnapshotFile) -> PathBuf {
        match file {
            SnapshotFile::Data { id } => self.pool.snapshot_path(id),
            SnapshotFile::Record { id, generation } => self.pool.record_path(id, *generation),
        }
    }

    /// The default retention of a deleted snapshot's record, in seconds.
    pub fn retention(&self) -> u64 {
        self.config.retention.as_secs()
    }

    /// Opens the backing file of a volume for its loop device.
    pub fn open_for_device(&self, volume: &Volume) -> Result<File> {
        self.open_volume(volume).map(|file| timeless(file, self.pool.root()))
    }

    /// Opens the backing file of a volume for reading and writing. `Damaged` if it is missing or
    /// too short.
    pub fn open_volume(&self, volume: &Volume) -> Result<File> {
        let file = self.find_volume(volume)?;
        let what = format_args!("the backing file of volume {:?}", volume.id);
        pool::check_length(&file, what, volume.capacity_bytes).map(|()| file)
    }

    /// Opens the backing file of a volume, which may be too short, for reading and writing.
    pub fn find_volume(&self, volume: &Volume) -> Result<File> {
        pool::open_file(&self.pool.volume_path(&volume.id), true)?.ok_or_else(|| {
            Error::Damaged(format!(
                "the backing file of volume {:?} is missing; restore the volume from a backup",
                volume.id
            ))
        })
    }

    /// Opens the data of a snapshot for reading. `Damaged` if it is missing or too short.
    pub fn open_snapshot(&self, snapshot: &Snapshot) -> Result<File> {
        let id = &snapshot.id;
        let file = pool::open_file(&self.pool.snapshot_path(id), false)?.ok_or_else(|| {
            Error::Damaged(format!("the data of snapshot {id:?} is missing; run `pool check`"))
        })?;
        let what = format_args!("the data of snapshot {id:?}");
        pool::check_length(&file, what, snapshot.capacity_bytes).map(|()| file)
    }

    /// Whether an operation or another process has the data of a snapshot open. Ends the clone that
    /// is made ahead from it.
    pub fn is_in_use(&self, snapshot_id: &str) -> Result<bool> {
        self.clones_ahead.stop(&self.pool.clone_ahead_path(snapshot_id));
        pool::has_users(&self.pool.snapshot_path(snapshot_id))
    }

    /// Opens the change record of a snapshot and checks that it matches the row.
    pub fn open_record(&self, snapshot: &Snapshot) -> Result<Arc<RecordReader>> {
        let path = self.pool.record_path(&snapshot.id, snapshot.record_generation);
        let file = pool::open_file(&path, false)?.ok_or_else(|| {
            Error::Damaged(format!(
                "the change record of {:?} is missing; take a full backup and run `pool check`",
                snapshot.id
            ))
        })?;
        let record = RecordReader::open(file)?;
        let header = record.header();
        let since = match &snapshot.predecessor {
            Predecessor::Snapshot(id) => Some(id),
            Predecessor::None(_) => None,
        };
        if header.snapshot_id != snapshot.id
            || header.capacity_bytes != snapshot.capacity_bytes
            || header.predecessor.as_ref() != since
        {
            return Err(Error::Damaged(format!(
                "the change record of {:?} belongs to another snapshot; take a full backup and run `pool check`",
                snapshot.id
            )));
        }
        Ok(Arc::new(record))
    }

    /// The loop device of a volume, if it is attached.
    pub fn device_of(&self, volume: &Volume) -> Result<Option<LoopDevice>> {
        let backing = self.find_volume(volume)?;
        Ok(LoopDevice::find(&backing)?.into_iter().next())
    }
}

/// Seconds and nanoseconds since the epoch.
pub fn now() -> (u64, u32) {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (since.as_secs(), since.subsec_nanos())
}

/// The length of an open file in bytes.
pub fn length(file: &File) -> Result<u64> {
    Ok(file.metadata().context(|| "reading the size of a pool file".to_owned())?.len())
}
