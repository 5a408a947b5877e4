//! What the backend knows about volumes, snapshots, groups and attachments: the values that it
//! returns and, as JSON, the rows of its catalog (docs/design/on-disk-format.md).

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::error::Error;

/// A filesystem that a volume can carry.
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

    /// The smallest volume, in bytes, that mkfs makes this filesystem on.
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

    /// The empty name means ext4, the default.
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

/// The filesystem that was made on a volume's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Format {
    pub fs_type: FsType,
    /// The device size in bytes that the filesystem was last grown to.
    pub size_bytes: u64,
    /// mkfs has begun and not yet ended: what is on the blocks is nobody's data.
    #[serde(default)]
    pub unfinished: bool,
}

/// What a volume was made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Snapshot(String),
    Volume(String),
}

/// Where an object is in its life. What is not `Ready` is an intent: after a crash, start-up undoes
/// a `Creating` and finishes a `Deleting`.
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
    pub format: Option<Format>,
    pub source: Option<Source>,
    /// What CreateVolume was asked for, to tell a repeated call from another one with the name.
    pub request: VolumeRequest,
    /// The sequence number of the next snapshot, ascending within the volume.
    pub next_sequence: u64,
    /// The snapshot that the next cut compares with. Its data is on disk, though its snapshot may
    /// have been deleted through the API.
    pub baseline: Option<String>,
    /// Why there is no baseline, when there is none.
    pub chain_break: ChainBreak,
    /// Writes that the kernel accepted and then lost. While this is set, the volume has no new snapshots and no clones.
    #[serde(default)]
    pub lost_writes: Option<LostWrites>,
}

/// A failure to write data of a volume back to the pool. The next stage after an unstage clears it: its user then starts
/// from what is on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostWrites {
    /// When the driver received the first error, in seconds since the epoch.
    pub since: u64,
    /// The call that failed, and its error.
    pub cause: String,
    /// The volume was unstaged since.
    #[serde(default)]
    pub unstaged: bool,
}

/// The parts of a CreateVolume request that a repeated call must agree with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRequest {
    pub required_bytes: u64,
    /// 0: no limit.
    pub limit_bytes: u64,
    /// The filesystem asked for; `None` for a raw block volume.
    pub fs_type: Option<FsType>,
    pub change_tracking: bool,
    #[serde(default)]
    pub change_precision: Precision,
    pub source: Option<Source>,
}

/// How finely a change record says what has changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// In units of 4 KiB. Where the blocks of the pool are larger, contents are compared.
    #[default]
    Exact,
    /// In blocks of the pool's filesystem: what a write copied counts as changed.
    Block,
}

/// Why a chain of change records starts anew at a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChainBreak {
    /// The volume had no snapshot before.
    First,
    /// Change tracking was off for a while.
    TrackingOff,
    /// The data that the next cut compares with was dropped because the pool was nearly full.
    BaselineDropped,
    /// The data that the next cut compares with was not found.
    BaselineLost,
    /// The records before this point were kept as long as asked for, and no longer.
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
            Self::BaselineLost => "the data of the snapshot before was not found",
            Self::Retention => "the change records before were past their retention",
        })
    }
}

/// How a snapshot hangs together with the one before it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Predecessor {
    /// The change record holds what changed since this snapshot.
    Snapshot(String),
    /// The chain starts here, for this reason: no delta crosses this point.
    None(ChainBreak),
}

/// What is left of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotPhase {
    /// Being cut. After a crash it is undone.
    Cutting,
    /// Exists for the API.
    Ready,
    /// Deleted through the API at this time (seconds since the epoch); its record stays, so that it
    /// can still be the base of a delta.
    Deleted { at: u64 },
    /// Its record is gone too, since this time (seconds since the epoch). The id is kept for another retention period, so
    /// that a delta from it can say why it fails.
    Forgotten { at: u64 },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    pub id: String,
    pub name: String,
    pub volume_id: String,
    pub phase: SnapshotPhase,
    /// Capacity of the volume when the snapshot was cut, in bytes.
    pub capacity_bytes: u64,
    /// Seconds and nanoseconds since the epoch.
    pub created_at: (u64, u32),
    /// Ascending within the volume: the order of base and target.
    pub sequence: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_id: Option<String>,
    pub predecessor: Predecessor,
    /// Which file holds the change record: `records/<id>.<generation>`; folding writes a new one.
    pub record_generation: u64,
    /// The copy of the backing file is on disk.
    pub has_data: bool,
    /// The filesystem of the volume at that moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// A container runtime had the filesystem, maybe mounted in a virtual machine, and it could not be frozen: what was
    /// being written is as a power cut would have left it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub crash_consistent: bool,
    /// When it ceased to be the baseline (seconds since the epoch), if it was deleted before: until then it was kept whatever
    /// its age.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub baseline_until: Option<u64>,
    /// How long its record is kept, where that is not for the driver to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<Retention>,
}

/// How long the record of a deleted snapshot is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Retention {
    /// For so many seconds from the beginning of the retention on.
    For(u64),
    /// Until this time (seconds since the epoch).
    Until(u64),
}

/// Most rows are of deleted snapshots, and what they do not have takes no room.
fn is_false(value: &bool) -> bool {
    !value
}

impl Snapshot {
    /// When the retention begins of what is kept of a deleted snapshot, its record or its id, in seconds since the epoch.
    pub fn retained_since(&self) -> Option<u64> {
        match self.phase {
            SnapshotPhase::Deleted { at } => Some(at.max(self.baseline_until.unwrap_or(0))),
            SnapshotPhase::Forgotten { at } => Some(at),
            SnapshotPhase::Cutting | SnapshotPhase::Ready => None,
        }
    }

    /// When its own retention ends, if it has one and was deleted, in seconds since the epoch.
    pub fn own_end(&self) -> Option<u64> {
        let since = self.retained_since()?;
        Some(match self.retention? {
            Retention::For(seconds) => since.saturating_add(seconds),
            Retention::Until(time) => time.max(since),
        })
    }

    /// When the retention ends of what is kept of a deleted snapshot, which is `default` seconds long unless it has its own.
    pub fn retained_until(&self, default: u64) -> Option<u64> {
        let by_default = || Some(self.retained_since()?.saturating_add(default));
        self.own_end().or_else(by_default)
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
    /// In the order of the volumes asked for.
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

/// CSI's access modes that one node can satisfy (CSI VolumeCapability.AccessMode): many nodes that only read may be one.
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
    /// Whether the volume may be published at more than one target path at a time (CSI
    /// NodePublishVolume, tables on the second call).
    pub const fn shares(self) -> bool {
        matches!(self, Self::SingleNodeMultiWriter | Self::MultiNodeReaderOnly)
    }

    pub const fn read_only(self) -> bool {
        matches!(self, Self::SingleNodeReaderOnly | Self::MultiNodeReaderOnly)
    }
}

/// How a volume is presented (CSI VolumeCapability).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    Block,
    Mount {
        /// `None`: the one that the volume has, else ext4.
        fs_type: Option<FsType>,
        /// Mount options; may carry secrets, never logged.
        flags: Vec<String>,
        /// Group that owns the mounted tree (CSI volume_mount_group).
        group: Option<u32>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capability {
    pub access: Access,
    pub mode: AccessMode,
}

impl Capability {
    /// Whether nothing may be written, by access mode or by mount option.
    pub fn is_read_only(&self) -> bool {
        let option = match &self.access {
            Access::Block => false,
            Access::Mount { flags, .. } => {
                flags.iter().flat_map(|flags| flags.split(',')).any(|flag| flag == "ro")
            }
        };
        option || self.mode.read_only()
    }

    /// The same use of the volume. The group does not count: each pod brings its own, and it is
    /// applied to the files and not to the mount.
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
    /// Where the filesystem is mounted. What was staged before there was a choice is mounted at its staging path.
    #[serde(default)]
    pub mounted: Mounted,
}

/// Where the filesystem of a staged volume is mounted on this host, if it is at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mounted {
    /// At the staging path, which is bound to each target.
    #[default]
    AtStaging,
    /// At each target, unless a runtime mounts it instead (KEP-2857).
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

/// What a container runtime is to do after it has mounted a volume in the place of this host (KEP-2857).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Deferral {
    /// The group that is to own the files.
    pub group: Option<u32>,
    /// How they are given to it; `None` where nothing is said.
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
    /// The target at which a container runtime mounts it in the place of this host, if that is so: there is no other then.
    pub fn deferred_at(&self) -> Option<(&Path, &Deferral)> {
        let mut published = self.published.iter();
        published.find_map(|(target, one)| Some((target.as_path(), one.deferred.as_ref()?)))
    }
}

/// A volume that belongs to one pod, from NodePublishVolume to NodeUnpublishVolume (KEP-596).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inline {
    /// kubelet's name for it. It is never part of a path.
    pub handle: String,
    /// Names its backing file; unique for ever.
    pub id: String,
    /// `Ready` once the pod may have seen it.
    pub phase: Phase,
    pub target: PathBuf,
    pub capacity_bytes: u64,
    /// `None` while there is no filesystem that anybody may have written to.
    pub format: Option<Format>,
    pub request: InlineRequest,
}

/// The parts of the request for an inline volume that a repeated call must agree with. Content is none of them: it
/// may change, and is not written down here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InlineRequest {
    /// `None`: the driver chooses.
    pub size_bytes: Option<u64>,
    pub capability: Capability,
    pub readonly: bool,
    /// A tmpfs at the target instead of a file in the pool.
    pub in_memory: bool,
    /// Only the driver writes to it, and keeps its content as it should be.
    pub read_only_content: bool,
    /// A container runtime mounts it, and this host never does.
    #[serde(default)]
    pub deferred: Option<Deferral>,
}

impl InlineRequest {
    /// Whether nothing at all is written through its mount.
    pub fn is_read_only(&self) -> bool {
        !self.read_only_content && (self.readonly || self.capability.is_read_only())
    }
}

/// How a volume is, or the pool (CSI VolumeCondition, VolumeHealth).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// What is wrong with it, if anything.
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

/// What can be wrong with a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthProblem {
    /// The pool's filesystem has shut down.
    PoolShutDown,
    /// The pool, or the filesystem below a sparse pool image, is nearly full.
    PoolNearlyFull,
    BackingFileMissing,
    BackingFileShort,
    WritesLost,
    /// Somebody else has attached the backing file, and may write to it.
    ForeignLoopDevice,
    LoopDeviceMissing,
    LoopDeviceSize,
    NotMounted,
    /// It is left to a container runtime, and mounted on this host as well.
    MountedOnHost,
    /// The container runtime that it is left to says so, or does not have it.
    Runtime,
    /// An inline volume that is being made or removed.
    NotReady,
    /// How it is could not be found out.
    Unknown,
}

/// How a volume in use on this node is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    /// None where it cannot be told: `condition` says why.
    pub usage: Option<Usage>,
    pub condition: Condition,
}

/// How much a volume holds.
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

/// Room in the pool, all in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// What can be written before the pool is full.
    pub available: u64,
    /// The largest volume that CreateVolume accepts now (thin: overcommit included).
    pub maximum_volume: u64,
    pub minimum_volume: u64,
    /// The capacities of all volumes together, inline volumes in the pool included.
    pub provisioned: u64,
}
