//! Condition, usage and capacity, as the health calls return them.

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
