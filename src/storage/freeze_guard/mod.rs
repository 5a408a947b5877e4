//! The freeze guard: a process that thaws the filesystems that a driver froze for a snapshot, if
//! the driver is killed.
//!
//! Before the driver freezes a filesystem, it sends the guard a descriptor of it over a unix socket
//! (SCM_RIGHTS). After the thaw it sends a forget message. When the connection or the deadline of a
//! hold ends, the guard thaws the filesystems that it still holds. It needs CAP_SYS_ADMIN, but
//! neither the driver's mount namespace nor its catalog.
//!
//! A message has 16 bytes, with little-endian numbers. The response is one byte:
//!
//! | message | bytes | response |
//! |---|---|---|
//! | hold | `H`, three zeros, seconds until the guard thaws (u32), id of the freeze (u64); with one descriptor | `K`, or `R` if the guard cannot hold it |
//! | forget | `F`, seven zeros, id of the freeze (u64) | `K`, after all descriptors of the freeze are closed, so the filesystems can be unmounted |

mod client;
mod server;

use std::ffi::OsString;
use std::path::PathBuf;

pub use client::{Guard, Hold};
pub use server::{Connections, listen, serve_connection};

/// The freeze guard of a backend.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum FreezeGuard {
    /// None: filesystems remain frozen after a kill until the next start. For tests.
    #[default]
    None,
    /// A child process with this command line, which serves its standard input
    /// ([`serve_connection`]). It is started at the first freeze, and again after it died.
    Child { program: PathBuf, arguments: Vec<OsString> },
    /// A process that listens on this socket ([`listen`]).
    Socket(PathBuf),
}

const MESSAGE_BYTES: usize = 16;
const HELD: u8 = b'K';
const REFUSED: u8 = b'R';

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Message {
    Hold { id: u64, seconds: u32 },
    Forget { id: u64 },
}

impl Message {
    fn encode(self) -> [u8; MESSAGE_BYTES] {
        let (kind, seconds, id) = match self {
            Self::Hold { id, seconds } => (b'H', seconds, id),
            Self::Forget { id } => (b'F', 0, id),
        };
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&seconds.to_le_bytes());
        bytes[8..].copy_from_slice(&id.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; MESSAGE_BYTES] = bytes.try_into().ok()?;
        let seconds = u32::from_le_bytes(bytes[4..8].try_into().ok()?);
        let id = u64::from_le_bytes(bytes[8..].try_into().ok()?);
        match (bytes[0], &bytes[1..4], seconds) {
            (b'H', [0, 0, 0], seconds) => Some(Self::Hold { id, seconds }),
            (b'F', [0, 0, 0], 0) => Some(Self::Forget { id }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
