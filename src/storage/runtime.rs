//! The interface to container runtimes that mount deferred volumes (KEP-2857). Implementations of
//! [`Runtime`] define how a runtime is reached.

use std::fmt;
use std::path::Path;

use super::error::Result;
use super::model::{Deferral, FsType, Stats};

/// A mount for a container runtime.
#[derive(Debug)]
pub struct DeferredMount<'a> {
    /// The target path on this host. It identifies the volume to the runtime.
    pub target: &'a Path,
    /// The device with the filesystem.
    pub device: &'a Path,
    pub fs_type: FsType,
    /// Options as in mount(8). They include `ro` for a read-only volume, and `nouuid` for xfs.
    pub flags: &'a [String],
    pub deferral: &'a Deferral,
}

/// The statistics from a runtime. If no runtime has claimed the volume: no usage and an abnormal
/// condition. If no container runs now: no usage and a normal condition.
pub type RuntimeStats = Stats;

/// Access to container runtimes. Calls block for a limited time and can be repeated. The caller
/// holds the volume's lock, except for `stats`.
pub trait Runtime: fmt::Debug + Send + Sync {
    /// Requests a mount. The runtime mounts the volume later.
    fn stage(&self, mount: &DeferredMount<'_>) -> Result<()>;

    /// Withdraws the request. Succeeds if there is none.
    fn unstage(&self, target: &Path) -> Result<()>;

    fn stats(&self, target: &Path) -> Result<RuntimeStats>;

    /// Grows the filesystem to its device, which has `bytes` bytes.
    fn expand(&self, target: &Path, bytes: u64) -> Result<()>;
}
