//! The errors of the backend: one variant for each decision of a caller. Each message names the
//! object and the next step. `driver/status.rs` maps them to gRPC codes.

use std::fmt;
use std::io;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Advice for a full pool of any kind.
pub const FREE_SPACE_ADVICE: &str = "delete volumes or snapshots, or add space to the pool (docs/reference/driver.md, \"Room in the pool\")";

/// The kind of object that an id names.
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
    /// The request is invalid; a retry cannot succeed. `field` is the invalid field.
    #[error("{field}: {reason}")]
    Invalid { field: &'static str, reason: String },

    #[error("{kind} {id:?} does not exist")]
    NotFound { kind: Kind, id: String },

    /// A path or object that the request names is missing.
    #[error("{0}")]
    Missing(String),

    /// An object with this name exists with other parameters.
    #[error("{0}")]
    AlreadyExists(String),

    /// Another operation on the same object is in progress. Retry.
    #[error("{0}")]
    Busy(String),

    /// A page token is of another list, or of one that no longer exists. List from the beginning.
    #[error("{0}")]
    StaleToken(String),

    /// A required process or resource is not available. Retry. The operation may or may not have
    /// been done.
    #[error("{0}")]
    Unavailable(String),

    /// The state of the object does not allow the operation. The message says what to do first.
    #[error("{0}")]
    Precondition(String),

    #[error("{0}")]
    OutOfRange(String),

    /// The pool is full, or a limit is reached.
    #[error("{0}")]
    Exhausted(String),

    /// Data on disk differs from what was written. It is not used.
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

    /// `token` is not one of the list that the request reads.
    pub fn stale_token(token: &str) -> Self {
        Self::StaleToken(format!(
            "starting_token: {token:?} is not valid for this list; list again from the beginning"
        ))
    }

    pub fn not_found(kind: Kind, id: &str) -> Self {
        Self::NotFound { kind, id: id.to_owned() }
    }

    /// Adds the failed action to an I/O error. A full disk is always [`Error::Exhausted`].
    pub fn io(doing: impl Into<String>, source: io::Error) -> Self {
        let doing = doing.into();
        match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => {
                Self::Exhausted(format!("{doing}: no space left in the pool; {FREE_SPACE_ADVICE}"))
            }
            Some(libc::EFBIG) => Self::OutOfRange(format!(
                "{doing}: the pool's filesystem does not support files of this size"
            )),
            _ => Self::Io { doing, source },
        }
    }
}

/// Adds the failed action to an I/O error.
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
    fn the_advice_for_a_full_pool_names_a_docs_section() {
        let page = include_str!("../../docs/reference/driver.md");
        let section = FREE_SPACE_ADVICE.split('"').nth(1).unwrap();
        assert!(
            page.lines()
                .any(|line| line.trim_start_matches('#').trim() == section
                    && line.starts_with("## ")),
            "{section}"
        );
    }
}
