//! The data model: values that the backend returns and, as JSON, the rows of the catalog
//! (docs/design/on-disk-format.md).

mod attachment;
mod health;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use attachment::{
    Access, AccessMode, Attachment, Capability, Deferral, GroupPolicy, Inline, InlineRequest,
    Mounted, Publication,
};
pub use health::{Capacity, Condition, HealthProblem, Stats, Usage};

use super::error::Error;
use super::sector::SectorSize;

/// A supported filesystem type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FsType {
    Ext4,
    Xfs,
    Btrfs,
}

impl FsType {
    pub const ALL: [Self; 3] = [Self::Ext4, Self::Xfs, Self::Btrfs];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    /// The minimum volume size for this filesystem, in bytes.
    pub const fn min_bytes(self) -> u64 {
        match self {
            Self::Ext4 => 1 << 20,
            Self::Xfs => 300 << 20,
            Self::Btrfs => 128 << 20,
        }
    }
}

impl fmt::Display for FsType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for FsType {
    type Err = Error;

    /// An empty name is ext4, the default.
    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "" | "ext4" => Ok(Self::Ext4),
            "xfs" => Ok(Self::Xfs),
            "btrfs" => Ok(Self::Btrfs),
            other => Err(Error::invalid(
                "fs_type",
                format!("{other:?} is not supported; use ext4, xfs or btrfs"),
            )),
        }
    }
}

/// The filesystem on a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Format {
    pub fs_type: FsType,
    /// The device size to which the filesystem was last grown, in bytes.
    pub size_bytes: u64,
    /// mkfs started but did not complete: the blocks contain no user data.
    #[serde(default)]
    pub unfinished: bool,
}

/// The source of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Snapshot(String),
    Volume(String),
}

/// The life cycle of an object. A phase other than `Ready` is an intent: after a crash, the next
/// start undoes `Creating` and finishes `Deleting`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Creating,
    Ready,
    Deleting,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    pub id: String,
    pub name: String,
    pub capacity_bytes: u64,
    pub phase: Phase,
    /// Whether snapshots of this volume get a change record.
    pub change_tracking: bool,
    #[serde(default)]
    pub change_precision: Precision,
    #[serde(default, skip_serializing_if = "SectorSize::is_default")]
    pub sector_size: SectorSize,
    pub format: Option<Format>,
    pub source: Option<Source>,
    /// The CreateVolume request, for comparison with a repeated call.
    pub request: VolumeRequest,
    /// The sequence number of the next snapshot. Ascending within the volume.
    pub next_sequence: u64,
    /// Seconds and nanoseconds since the epoch. The next snapshot is later. `None` without a
    /// snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub newest_snapshot_at: Option<(u64, u32)>,
    /// The snapshot that the next one is compared with. Its data exists even if it was deleted
    /// through the API.
    pub baseline: Option<String>,
    /// The reason if there is no baseline.
    pub chain_break: ChainBreak,
    /// Accepted writes that the kernel lost. While this is set, the volume gets no snapshots and no
    /// clones.
    #[serde(default)]
    pub lost_writes: Option<LostWrites>,
    /// Why the filesystem is smaller than the volume, after a failed growth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub growth_failure: Option<String>,
}

/// A failed writeback of volume data to the pool. The next stage after an unstage clears it,
/// because the user then starts from the data on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostWrites {
    /// When the driver received the first error, in seconds since the epoch.
    pub since: u64,
    /// The failed call and its error.
    pub cause: String,
    /// Whether the volume was unstaged since then.
    #[serde(default)]
    pub unstaged: bool,
}

/// The fields of a CreateVolume request that a repeated call must match.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRequest {
    pub required_bytes: u64,
    /// 0: no limit.
    pub limit_bytes: u64,
    /// The requested filesystem; `None` for a raw block volume.
    pub fs_type: Option<FsType>,
    pub change_tracking: bool,
    #[serde(default)]
    pub change_precision: Precision,
    /// `None`: the source's, or the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sector_size: Option<SectorSize>,
    pub source: Option<Source>,
}

/// The granularity of change records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// Units of 4 KiB. If the pool's blocks are larger, contents are compared.
    #[default]
    Exact,
    /// Blocks of the pool's filesystem: a whole copied block is reported as changed.
    Block,
}

/// The reason why a chain of change records starts at a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChainBreak {
    /// The volume had no snapshot before.
    First,
    /// Change tracking was off for a while.
    TrackingOff,
    /// The baseline was dropped because the pool was nearly full.
    BaselineDropped,
    /// The data of the baseline was not found.
    BaselineLost,
    /// The retention of the earlier records ended.
    Retention,
}

impl fmt::Display for ChainBreak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::First => "the volume had no earlier snapshot",
            Self::TrackingOff => "change tracking was off",
            Self::BaselineDropped => {
                "the hidden baseline was dropped when the pool was nearly full"
            }
            Self::BaselineLost => "the data of the previous snapshot was not found",
            Self::Retention => "the earlier change records expired",
        })
    }
}

/// The start of the period that a change record covers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Predecessor {
    /// The change record lists the changes since this snapshot.
    Snapshot(String),
    /// The chain starts here for this reason. No delta crosses this point.
    None(ChainBreak),
}

/// The life cycle of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotPhase {
    /// Being taken. After a crash it is undone.
    Taking,
    /// Exists in the API.
    Ready,
    /// Deleted through the API at this time (seconds since the epoch). Its record is kept, so it
    /// can be the base of a delta.
    Deleted { at: u64 },
    /// Its record was dropped at this time (seconds since the epoch). The id is kept for another
    /// retention period, so that a delta from it can report the reason.
    Forgotten { at: u64 },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    pub id: String,
    pub name: String,
    pub volume_id: String,
    pub phase: SnapshotPhase,
    /// Capacity of the volume when the snapshot was taken, in bytes.
    pub capacity_bytes: u64,
    /// Seconds and nanoseconds since the epoch.
    pub created_at: (u64, u32),
    /// Ascending within the volume. Determines the order of base and target.
    pub sequence: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_id: Option<String>,
    pub predecessor: Predecessor,
    /// The file of the change record is `records/<id>.<generation>`. Merging another record into it
    /// writes a new generation.
    pub record_generation: u64,
    /// Whether the copy of the backing file exists.
    pub has_data: bool,
    /// The volume's.
    #[serde(default, skip_serializing_if = "SectorSize::is_default")]
    pub sector_size: SectorSize,
    /// The filesystem of the volume at that time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// The filesystem could not be frozen, because a container runtime may have mounted it in a
    /// virtual machine. The data is as after a power loss.
    #[serde(default, skip_serializing_if = "is_false")]
    pub crash_consistent: bool,
    /// When it was replaced as the baseline (seconds since the epoch), if it was deleted before.
    /// Its retention starts then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub baseline_until: Option<u64>,
    /// The retention of its record; `None` for the driver's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<Retention>,
}

/// The retention of a deleted snapshot's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Retention {
    /// For this number of seconds from the start of the retention.
    For(u64),
    /// Until this time (seconds since the epoch).
    Until(u64),
}

/// Omits fields to keep rows small: most rows are of deleted snapshots.
fn is_false(value: &bool) -> bool {
    !value
}

impl Snapshot {
    /// The start of the retention of a deleted snapshot's record or id, in seconds since the epoch.
    pub fn retained_since(&self) -> Option<u64> {
        match self.phase {
            SnapshotPhase::Deleted { at } => Some(at.max(self.baseline_until.unwrap_or(0))),
            SnapshotPhase::Forgotten { at } => Some(at),
            SnapshotPhase::Taking | SnapshotPhase::Ready => None,
        }
    }

    /// The end of its own retention, in seconds since the epoch. `None` if it was not deleted or
    /// has the default retention.
    pub fn own_expiry(&self) -> Option<u64> {
        let since = self.retained_since()?;
        Some(match self.retention? {
            Retention::For(seconds) => since.saturating_add(seconds),
            Retention::Until(time) => time.max(since),
        })
    }

    /// The end of the retention of a deleted snapshot's record or id. The default retention has
    /// `default` seconds.
    pub fn retained_until(&self, default: u64) -> Option<u64> {
        let by_default = || Some(self.retained_since()?.saturating_add(default));
        self.own_expiry().or_else(by_default)
    }

    /// Whether it can be the base of a delta.
    pub fn is_base(&self) -> bool {
        matches!(self.phase, SnapshotPhase::Ready | SnapshotPhase::Deleted { .. })
    }

    pub fn is_forgotten(&self) -> bool {
        matches!(self.phase, SnapshotPhase::Forgotten { .. })
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    pub id: String,
    pub name: String,
    pub phase: Phase,
    /// In the order of the requested volumes.
    pub snapshot_ids: Vec<String>,
    pub volume_ids: Vec<String>,
    pub created_at: (u64, u32),
}

/// A group snapshot with its members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSnapshot {
    pub group: Group,
    pub snapshots: Vec<Snapshot>,
}
