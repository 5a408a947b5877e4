//! Who mounts a volume where this host does not (KEP-2857): a container runtime, reached by whoever implements [`Runtime`].
//! The backend says what there is to mount and asks how it is; how the runtime is reached is not its business.

use std::fmt;
use std::path::Path;

use super::error::Result;
use super::model::{Deferral, FsType, Stats};

/// A volume for a runtime to mount.
#[derive(Debug)]
pub struct DeferredMount<'a> {
    /// Where it would be mounted on this host. It names the volume to the runtime.
    pub target: &'a Path,
    /// The device, which has the filesystem on it.
    pub device: &'a Path,
    pub fs_type: FsType,
    /// As in mount(8), `ro` among them where nothing may be written, and `nouuid` for xfs.
    pub flags: &'a [String],
    pub deferral: &'a Deferral,
}

/// What a runtime says of a volume. Where none has claimed it: no usage, and an abnormal condition that says so. Where
/// one has and no container runs now: no usage, and a normal condition.
pub type RuntimeStats = Stats;

/// The way to the runtimes. Calls block, for a bounded time, and can be repeated; the volume's lock is held, but not by
/// `stats`.
pub trait Runtime: fmt::Debug + Send + Sync {
    /// Leaves word for the runtime. Nothing is mounted yet when this returns.
    fn stage(&self, mount: &DeferredMount<'_>) -> Result<()>;

    /// Takes it back. OK when there is none.
    fn unstage(&self, target: &Path) -> Result<()>;

    fn stats(&self, target: &Path) -> Result<RuntimeStats>;

    /// Has the filesystem grown to its device, which has so many bytes.
    fn expand(&self, target: &Path, bytes: u64) -> Result<()>;
}
