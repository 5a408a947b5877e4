//! The layouts: where the files of a volume are, and how its runtime's program is called.

mod crust;
mod kata;

use std::fmt::Debug;

pub use self::crust::Crust;
pub use self::kata::Kata;
use super::refusal::{Refusal, Result};
use super::request::Range;
use crate::crust::{Directory, Entry, MountInfo, Problem, Target};
use grpc::proto::crust as api;

/// A layout. The caller serializes calls for one target.
pub trait Layout: Debug + Send + Sync {
    /// The directory of the entries.
    fn directory(&self) -> &Directory;

    /// The entry of a target, whether or not it exists.
    fn entry(&self, target: &Target) -> Result<Entry>;

    fn stage(&self, entry: &Entry, target: &Target, info: &MountInfo) -> Result<(), Problem>;

    fn stats(&self, entry: &Entry, target: &Target) -> Result<api::RuntimeGetVolumeStatsResponse>;

    /// Expands the filesystem. Returns its size in bytes, or 0 if unknown.
    fn expand(&self, entry: &Entry, target: &Target, range: Range) -> Result<i64>;

    /// All directories whose names may be those of entries.
    fn entries(&self) -> Result<Vec<Entry>, Problem>;

    /// The target of an entry. `None`: the entry does not contain it.
    fn target_of(&self, entry: &Entry) -> Result<Option<Target>, Problem>;

    /// Whether a container uses the volume, or may use it as far as can be determined.
    fn is_in_use(&self, entry: &Entry, target: Option<&Target>) -> bool;
}

/// The mount data of an entry.
fn mount_info(entry: &Entry, target: &Target) -> Result<MountInfo> {
    let info = entry.mount_info().map_err(Refusal::of_files)?;
    info.ok_or_else(|| Refusal::NoEntry(target.clone()))
}
