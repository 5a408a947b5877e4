//! The data model: values that the backend returns and, as JSON, the rows of the catalog
//! (docs/design/on-disk-format.md).

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

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
    /// snapshot, or with none since an earlier version.
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
    #[serde(rename = "cutting")]
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

/// The access modes that one node can satisfy (CSI VolumeCapability.AccessMode), including
/// read-only use by many nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccessMode {
    SingleNodeWriter,
    SingleNodeReaderOnly,
    SingleNodeSingleWriter,
    SingleNodeMultiWriter,
    MultiNodeReaderOnly,
}

impl AccessMode {
    /// Whether the volume may be published at several target paths at the same time (CSI
    /// NodePublishVolume, tables on the second call).
    pub const fn shares(self) -> bool {
        matches!(self, Self::SingleNodeMultiWriter | Self::MultiNodeReaderOnly)
    }

    pub const fn read_only(self) -> bool {
        matches!(self, Self::SingleNodeReaderOnly | Self::MultiNodeReaderOnly)
    }
}

/// The access type of a volume (CSI VolumeCapability).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    Block,
    Mount {
        /// `None`: the existing filesystem, or ext4.
        fs_type: Option<FsType>,
        /// Mount options. They may contain secrets and are never logged.
        flags: Vec<String>,
        /// The group that owns the mounted tree (CSI volume_mount_group).
        group: Option<u32>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capability {
    pub access: Access,
    pub mode: AccessMode,
}

impl Capability {
    /// Whether the volume is read-only, by access mode or mount option.
    pub fn is_read_only(&self) -> bool {
        let option = match &self.access {
            Access::Block => false,
            Access::Mount { flags, .. } => {
                flags.iter().flat_map(|flags| flags.split(',')).any(|flag| flag == "ro")
            }
        };
        option || self.mode.read_only()
    }

    /// Whether two capabilities are compatible. The group is ignored: each pod has its own, and it
    /// applies to files, not to the mount.
    pub fn is_like(&self, other: &Self) -> bool {
        let same_access = match (&self.access, &other.access) {
            (
                Access::Mount { fs_type, flags, group: _ },
                Access::Mount { fs_type: other_type, flags: other_flags, group: _ },
            ) => fs_type == other_type && flags == other_flags,
            (access, other) => access == other,
        };
        same_access && self.mode == other.mode
    }
}

/// A volume in use on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    pub volume_id: String,
    pub staging_path: PathBuf,
    pub capability: Capability,
    /// By target path.
    pub published: BTreeMap<PathBuf, Publication>,
    /// Where the filesystem is mounted. Rows without this field are mounted at the staging path.
    #[serde(default)]
    pub mounted: Mounted,
}

/// Where this host mounts the filesystem of a staged volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mounted {
    /// At the staging path, which is bind-mounted at each target.
    #[default]
    AtStaging,
    /// At each target, unless a container runtime mounts it (KEP-2857).
    AtTargets,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Publication {
    pub capability: Capability,
    pub readonly: bool,
    /// A container runtime mounts it, and this host never does.
    #[serde(default)]
    pub deferred: Option<Deferral>,
}

/// Instructions for the container runtime that mounts a deferred volume (KEP-2857).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Deferral {
    /// The group that must own the files.
    pub group: Option<u32>,
    /// When to change the group of the files; `None` if not specified.
    pub policy: Option<GroupPolicy>,
}

/// PodSecurityContext.fsGroupChangePolicy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupPolicy {
    Always,
    OnRootMismatch,
}

impl Publication {
    /// On this host.
    pub fn on_host(capability: Capability, readonly: bool) -> Self {
        Self { capability, readonly, deferred: None }
    }

    pub fn is_read_only(&self) -> bool {
        self.readonly || self.capability.is_read_only()
    }
}

impl Attachment {
    /// The target at which a container runtime mounts the volume. Such a volume has no other
    /// target.
    pub fn deferred_at(&self) -> Option<(&Path, &Deferral)> {
        let mut published = self.published.iter();
        published.find_map(|(target, one)| Some((target.as_path(), one.deferred.as_ref()?)))
    }
}

/// A volume that belongs to one pod, from NodePublishVolume to NodeUnpublishVolume (KEP-596).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inline {
    /// The id from kubelet. It is never part of a path.
    pub handle: String,
    /// The name of its backing file. Unique forever.
    pub id: String,
    /// `Ready` when the pod may have used it.
    pub phase: Phase,
    pub target: PathBuf,
    pub capacity_bytes: u64,
    /// `None` until the filesystem is created.
    pub format: Option<Format>,
    pub request: InlineRequest,
}

/// The fields of the request for an inline volume that a repeated call must match. Content may
/// change, and is not stored here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InlineRequest {
    /// `None`: the driver chooses.
    pub size_bytes: Option<u64>,
    pub capability: Capability,
    pub readonly: bool,
    /// A tmpfs at the target instead of a file in the pool.
    pub in_memory: bool,
    /// Only the driver writes to it and updates its content.
    pub read_only_content: bool,
    #[serde(default, skip_serializing_if = "SectorSize::is_default")]
    pub sector_size: SectorSize,
    /// A container runtime mounts it, and this host never does.
    #[serde(default)]
    pub deferred: Option<Deferral>,
}

impl InlineRequest {
    /// Whether nothing, not even content, is written through its mount.
    pub fn is_read_only(&self) -> bool {
        !self.read_only_content && (self.readonly || self.capability.is_read_only())
    }
}

/// The condition of a volume or of the pool (CSI VolumeCondition, VolumeHealth).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// The problem, if any.
    pub problem: Option<HealthProblem>,
    pub message: String,
}

impl Condition {
    pub fn healthy(message: impl Into<String>) -> Self {
        Self { problem: None, message: message.into() }
    }

    pub fn abnormal(problem: HealthProblem, message: impl Into<String>) -> Self {
        Self { problem: Some(problem), message: message.into() }
    }

    pub fn is_abnormal(&self) -> bool {
        self.problem.is_some()
    }
}

/// The kinds of problems of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthProblem {
    /// The pool's filesystem has shut down.
    PoolShutDown,
    /// The pool, or the filesystem below a sparse pool image, is nearly full.
    PoolNearlyFull,
    BackingFileMissing,
    BackingFileShort,
    WritesLost,
    /// Another program has attached the backing file and may write to it.
    ForeignLoopDevice,
    LoopDeviceMissing,
    LoopDeviceSize,
    NotMounted,
    /// The filesystem could not grow to the capacity of the volume.
    NotGrown,
    /// A deferred volume is mounted on this host.
    MountedOnHost,
    /// The container runtime reports a problem, or has not claimed the volume.
    Runtime,
    /// An inline volume is being created or removed.
    NotReady,
    /// The condition could not be determined.
    Unknown,
}

/// Usage and condition of a volume in use on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    /// `None` if unknown: `condition` has the reason.
    pub usage: Option<Usage>,
    pub condition: Condition,
}

/// The usage of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    /// A raw block volume: its size in bytes.
    Block { total_bytes: u64 },
    Mount {
        total_bytes: u64,
        used_bytes: u64,
        available_bytes: u64,
        total_inodes: u64,
        used_inodes: u64,
        free_inodes: u64,
    },
}

/// Capacity of the pool, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// The space that can be written before the pool is full.
    pub available: u64,
    /// The largest volume that CreateVolume accepts now, including overcommit.
    pub maximum_volume: u64,
    pub minimum_volume: u64,
    /// The capacities of all volumes together, inline volumes in the pool included.
    pub provisioned: u64,
}
