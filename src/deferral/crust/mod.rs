//! The files that hand a volume from crust_ops to a container runtime (KEP-2857, "Overview of
//! Interactions between CSI Plugin, crust_ops and Container Runtime"): one directory with one entry
//! for each target path. [`crate::runtime_ops`] writes entries; [`crate::oci_runtime`] reads them
//! and adds its own files.
//!
//! Content is untrusted: names are hashes, sizes are bounded, links are not followed, and values
//! are validated on read.

pub mod check;
mod entry;
mod mount_info;
mod target;
pub mod trust;

pub use entry::{Directory, DirectoryLock, Entry};
pub use mount_info::{GroupChangePolicy, MountInfo, group_id};
pub use target::Target;

/// Default directory of the entries (the proposal's example).
pub const DEFAULT_DIRECTORY: &str = "/var/run/crust";

/// A problem with an entry.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// A value is invalid.
    #[error("{field}: {reason}")]
    Invalid { field: &'static str, reason: String },
    /// A file or directory is not safe to use: another owner, writable by others, a link, too
    /// large.
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
