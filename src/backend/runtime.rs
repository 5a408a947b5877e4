//! Who mounts a volume where this host does not (KEP-2857): a container runtime, reached by whoever implements [`Runtime`].
//! The backend says what there is to mount and asks how it is; how the runtime is reached is not its business.

use std::fmt;
use std::path::Path;

use super::error::Result;
use super::model::{Condition, Deferral, FsType, Usage};

/// A volume for a runtime to mount.
#[derive(Debug)]
pub struct DeferredMount<'a> {
    /// Where it would be mounted on this host. It names the volume to the runtime.
    pub target: &'a Path,
    /// The device, which has the filesystem on it.
    pub device: &'a Path,
    pub fs_type: FsType,
    /// As in mount(8), `ro` among them where nothing may be written.
    pub flags: &'a [String],
    pub deferral: &'a Deferral,
}

/// What a runtime says of a volume that it has claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeStats {
    /// None while no container has it mounted.
    pub usage: Option<Usage>,
    pub condition: Condition,
}

/// The way to the runtimes. Calls block, for a bounded time, and can be repeated; the volume's lock is held.
pub trait Runtime: fmt::Debug + Send + Sync {
    /// Leaves word for the runtime. Nothing is mounted yet when this returns.
    fn stage(&self, mount: &DeferredMount<'_>) -> Result<()>;

    /// Takes it back. OK when there is none.
    fn unstage(&self, target: &Path) -> Result<()>;

    fn stats(&self, target: &Path) -> Result<RuntimeStats>;

    /// Has the filesystem grown to its device, which has so many bytes.
    fn expand(&self, target: &Path, bytes: u64) -> Result<()>;
}
