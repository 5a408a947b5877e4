//! How a volume is handed over, and how its runtime is asked: one interface, a layout of files each.

mod crust;
mod kata;

use std::fmt::Debug;

pub use self::crust::Crust;
pub use self::kata::Kata;
use super::refusal::{Refusal, Result};
use super::request::Range;
use crate::crust::{Directory, Entry, MountInfo, Problem, Target};
use crate::proto::crust as api;

/// A layout. Calls for one target exclude each other: whoever calls sees to that.
pub trait Layout: Debug + Send + Sync {
    /// Where the entries are.
    fn directory(&self) -> &Directory;

    /// The entry of a target, whether it is there or not.
    fn entry(&self, target: &Target) -> Result<Entry>;

    fn stage(&self, entry: &Entry, target: &Target, info: &MountInfo) -> Result<(), Problem>;

    fn stats(&self, entry: &Entry, target: &Target) -> Result<api::RuntimeGetVolumeStatsResponse>;

    /// Has the filesystem grown; how large it is then, in bytes, 0 where nobody says.
    fn expand(&self, entry: &Entry, target: &Target, range: Range) -> Result<i64>;

    /// All directories that may be entries, by their names.
    fn entries(&self) -> Result<Vec<Entry>, Problem>;

    /// The target that an entry is of. None: it does not say.
    fn target_of(&self, entry: &Entry) -> Result<Option<Target>, Problem>;

    /// Whether a container has the volume, or may have it for all that can be found out.
    fn is_in_use(&self, entry: &Entry, target: Option<&Target>) -> bool;
}

/// What is handed over for a target.
fn whole(entry: &Entry, target: &Target) -> Result<MountInfo> {
    let info = entry.mount_info().map_err(Refusal::of_files)?;
    info.ok_or_else(|| Refusal::NoEntry(target.clone()))
}
