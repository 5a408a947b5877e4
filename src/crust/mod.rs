//! The files by which crust_ops and a container runtime hand a volume over (KEP-2857, "Overview of Interactions between CSI
//! Plugin, crust_ops and Container Runtime"): one directory, and in it one entry for each target path. [`crate::runtime_ops`]
//! writes entries, [`crate::oci_runtime`] reads them and adds what is its own.
//!
//! What is read here may be anybody's: names are hashes, sizes are bounded, links are not followed, and values are checked
//! before they are believed.

pub mod check;
mod entry;
mod mount_info;
mod target;
pub mod trust;

pub use entry::{Directory, Entry, Served};
pub use mount_info::{GroupChangePolicy, MountInfo, group_id};
pub use target::Target;

/// Where the entries are, unless a flag or a configuration says otherwise (the proposal's example).
pub const DEFAULT_DIRECTORY: &str = "/var/run/crust";

/// What is wrong with an entry.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// A value that cannot be one.
    #[error("{field}: {reason}")]
    Invalid { field: &'static str, reason: String },
    /// A file that is not what it should be: not root's, writable by others, a link, too large.
    #[error("{0}")]
    Unsafe(String),
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
}

pub type Result<T, E = Problem> = std::result::Result<T, E>;

impl Problem {
    pub fn invalid(field: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { field, reason: reason.into() }
    }

    pub fn io(what: impl Into<String>, source: std::io::Error) -> Self {
        Self::Io { what: what.into(), source }
    }
}
