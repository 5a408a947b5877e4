//! The loopback-file block backend (skeleton: bodies follow).

pub mod error;
pub mod model;
pub mod units;

use std::path::{Path, PathBuf};
use std::time::Duration;

pub use error::{Error, Kind, Result};
pub use model::*;
pub use units::{BLOCK_SIZE, Block, BlockRange, Extent, MAX_VOLUME_BYTES, MIN_VOLUME_BYTES};

/// `--pool`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolChoice {
    Auto,
    Reflink,
    Image,
    Copy,
}

impl std::str::FromStr for PoolChoice {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let _ = s;
        todo!()
    }
}

#[derive(Debug, Clone)]
pub struct Config {
    pub data_dir: PathBuf,
    pub pool: PoolChoice,
    /// Size of the image pool's `pool.img` in bytes, when it is made.
    pub pool_size: Option<u64>,
    /// How long the record of a deleted snapshot stays usable as a base.
    pub retention: Duration,
    /// How much larger than the pool the volumes may be in all.
    pub overcommit: f64,
}

#[derive(Debug, Clone)]
pub struct CreateVolume {
    pub name: String,
    pub request: VolumeRequest,
}

#[derive(Debug, Clone, Default)]
pub struct SnapshotFilter {
    pub snapshot_id: Option<String>,
    pub volume_id: Option<String>,
}

/// One page of a list, in order of id.
#[derive(Debug)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// Where the next page starts; `None` at the end.
    pub next: Option<String>,
}

/// How blocks are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    Variable,
    /// Extents of at most this many bytes each, all of one size: the largest power of two up to it
    /// that divides the capacity. A power of two, at least 4096.
    Fixed(u64),
}

/// The answer to `allocated` or `delta`: lazily read from change records. Cheap to make, `Send`.
pub struct BlockMap {}

impl BlockMap {
    /// Capacity of the (target) snapshot in bytes.
    pub fn capacity_bytes(&self) -> u64 {
        todo!()
    }

    /// The extents from the block that holds `starting_offset` on, ascending, not overlapping.
    /// `OutOfRange` past the capacity.
    pub fn extents(self, style: Style, starting_offset: u64) -> Result<Extents> {
        let _ = (style, starting_offset);
        todo!()
    }
}

/// `Iterator<Item = Result<Extent>> + Send + 'static`.
pub struct Extents {}

impl Iterator for Extents {
    type Item = Result<Extent>;
    fn next(&mut self) -> Option<Self::Item> {
        todo!()
    }
}

/// Cheap to clone; all methods block and may be called from many threads at once. Operations on
/// one volume exclude each other with `Error::Busy`.
#[derive(Clone)]
pub struct Backend {}

impl Backend {
    pub fn open(config: Config) -> Result<Self> {
        let _ = config;
        todo!()
    }
    /// One line on which kind of pool was chosen and why.
    pub fn pool_description(&self) -> String {
        todo!()
    }
    /// Housekeeping that a timer calls about once a second: drops hidden baselines under pressure,
    /// forgets records past their retention.
    pub fn tend(&self) {
        todo!()
    }
    /// Err when the catalog or the pool no longer answers (health endpoint, Probe).
    pub fn healthy(&self) -> Result<()> {
        todo!()
    }
    pub fn create_volume(&self, request: CreateVolume) -> Result<Volume> {
        let _ = request;
        todo!()
    }
    /// OK when unknown.
    pub fn delete_volume(&self, id: &str) -> Result<()> {
        let _ = id;
        todo!()
    }
    pub fn volume(&self, id: &str) -> Result<Volume> {
        let _ = id;
        todo!()
    }
    /// `after`: a token of an earlier page (`Error::Busy` when malformed); `max` 0 means all.
    pub fn volumes(&self, after: Option<&str>, max: usize) -> Result<Page<Volume>> {
        let _ = (after, max);
        todo!()
    }
    /// Grows the volume; to less than it has is OK. Returns it as it then is.
    pub fn expand_volume(&self, id: &str, required_bytes: u64, limit_bytes: u64) -> Result<Volume> {
        let _ = (id, required_bytes, limit_bytes);
        todo!()
    }
    pub fn set_change_tracking(&self, id: &str, on: bool) -> Result<()> {
        let _ = (id, on);
        todo!()
    }
    pub fn volume_condition(&self, id: &str) -> Result<Condition> {
        let _ = id;
        todo!()
    }
    pub fn capacity(&self) -> Result<Capacity> {
        todo!()
    }
    pub fn create_snapshot(&self, name: &str, volume_id: &str) -> Result<Snapshot> {
        let _ = (name, volume_id);
        todo!()
    }
    /// OK when unknown.
    pub fn delete_snapshot(&self, id: &str) -> Result<()> {
        let _ = id;
        todo!()
    }
    pub fn snapshot(&self, id: &str) -> Result<Snapshot> {
        let _ = id;
        todo!()
    }
    pub fn snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<&str>,
        max: usize,
    ) -> Result<Page<Snapshot>> {
        let _ = (filter, after, max);
        todo!()
    }
    pub fn create_group(&self, name: &str, volume_ids: &[String]) -> Result<GroupSnapshot> {
        let _ = (name, volume_ids);
        todo!()
    }
    /// OK when unknown; `Invalid` when `snapshot_ids` are not its members.
    pub fn delete_group(&self, id: &str, snapshot_ids: &[String]) -> Result<()> {
        let _ = (id, snapshot_ids);
        todo!()
    }
    pub fn group(&self, id: &str, snapshot_ids: &[String]) -> Result<GroupSnapshot> {
        let _ = (id, snapshot_ids);
        todo!()
    }
    pub fn allocated(&self, snapshot_id: &str) -> Result<BlockMap> {
        let _ = snapshot_id;
        todo!()
    }
    pub fn delta(&self, base_id: &str, target_id: &str) -> Result<BlockMap> {
        let _ = (base_id, target_id);
        todo!()
    }
    pub fn stage(&self, volume_id: &str, path: &Path, capability: &Capability) -> Result<()> {
        let _ = (volume_id, path, capability);
        todo!()
    }
    /// OK when unknown or not staged.
    pub fn unstage(&self, volume_id: &str, path: &Path) -> Result<()> {
        let _ = (volume_id, path);
        todo!()
    }
    pub fn publish(
        &self,
        volume_id: &str,
        staging: &Path,
        target: &Path,
        capability: &Capability,
        readonly: bool,
    ) -> Result<()> {
        let _ = (volume_id, staging, target, capability, readonly);
        todo!()
    }
    /// OK when unknown or not published; removes the target.
    pub fn unpublish(&self, volume_id: &str, target: &Path) -> Result<()> {
        let _ = (volume_id, target);
        todo!()
    }
    /// `path`: a staging or target path of the volume.
    pub fn usage(&self, volume_id: &str, path: &Path) -> Result<Usage> {
        let _ = (volume_id, path);
        todo!()
    }
    /// Grows device and filesystem to the volume's capacity; returns it in bytes.
    pub fn expand_on_node(&self, volume_id: &str, path: &Path) -> Result<u64> {
        let _ = (volume_id, path);
        todo!()
    }
}
