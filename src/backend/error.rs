//! The errors of the backend: one variant per decision that a caller can take, each with a message
//! that names the object and the next step. The driver translates them to gRPC codes in one place.

use std::fmt;
use std::io;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What helps where a pool is full, whatever its kind.
pub const MORE_ROOM: &str = "delete volumes or snapshots, or give the pool more room (docs/reference/driver.md, \"Room in the pool\")";

/// What an id names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Volume,
    Snapshot,
    GroupSnapshot,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Volume => "volume",
            Self::Snapshot => "snapshot",
            Self::GroupSnapshot => "group snapshot",
        })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request is wrong and stays wrong: `field` is the name of the field at fault.
    #[error("{field}: {reason}")]
    Invalid { field: &'static str, reason: String },

    #[error("{kind} {id:?} does not exist")]
    NotFound { kind: Kind, id: String },

    /// A path or another thing that the caller named is not there.
    #[error("{0}")]
    Missing(String),

    /// The name is taken by something made with other parameters.
    #[error("{0}")]
    AlreadyExists(String),

    /// Another operation on the same object is under way: try again.
    #[error("{0}")]
    Busy(String),

    /// What the operation needs of another process does not answer now, or cannot do it yet: try again. Whether it was
    /// done is not known.
    #[error("{0}")]
    Unavailable(String),

    /// The state of the object forbids the operation; the message says what would allow it.
    #[error("{0}")]
    Precondition(String),

    #[error("{0}")]
    OutOfRange(String),

    /// No room in the pool, or a limit is reached.
    #[error("{0}")]
    Exhausted(String),

    /// Something on disk is not what was written there. Nothing is guessed from it.
    #[error("{0}")]
    Damaged(String),

    #[error("{doing}: {source}")]
    Io { doing: String, source: io::Error },

    /// A tool (mkfs, resize2fs, …) or the catalog failed.
    #[error("{0}")]
    Failed(String),
}

impl Error {
    pub fn invalid(field: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { field, reason: reason.into() }
    }

    pub fn not_found(kind: Kind, id: &str) -> Self {
        Self::NotFound { kind, id: id.to_owned() }
    }

    /// An I/O error with what was being done. A full disk becomes [`Error::Exhausted`], wherever it
    /// is met.
    pub fn io(doing: impl Into<String>, source: io::Error) -> Self {
        let doing = doing.into();
        match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => {
                Self::Exhausted(format!("{doing}: no room left in the pool; {MORE_ROOM}"))
            }
            Some(libc::EFBIG) => Self::OutOfRange(format!(
                "{doing}: the pool's filesystem does not hold files of this size"
            )),
            _ => Self::Io { doing, source },
        }
    }
}

/// Adds what was being done to an I/O error.
pub trait Context<T> {
    fn context(self, doing: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn context(self, doing: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::io(doing(), source))
    }
}

impl<T> Context<T> for nix::Result<T> {
    fn context(self, doing: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|errno| Error::io(doing(), io::Error::from(errno)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_for_a_full_pool_names_a_section_of_the_documentation() {
        let page = include_str!("../../docs/reference/driver.md");
        let section = MORE_ROOM.split('"').nth(1).unwrap();
        assert!(
            page.lines()
                .any(|line| line.trim_start_matches('#').trim() == section
                    && line.starts_with("## ")),
            "{section}"
        );
    }
}
