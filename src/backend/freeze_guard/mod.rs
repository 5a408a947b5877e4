//! The freeze guard: a process that thaws what a driver froze for a snapshot and cannot thaw any more, since it was killed.
//!
//! Before the driver freezes a filesystem it sends the guard a descriptor of it over a unix socket (SCM_RIGHTS), and it has
//! the guard forget it once the filesystem is thawed. A connection that ends, and a hold that outlives its deadline, make the
//! guard thaw what it still holds. So it needs neither the driver's mount namespace nor its catalog; only CAP_SYS_ADMIN.
//!
//! A message has 16 bytes, numbers little-endian, and is answered by one byte before the next one is sent:
//!
//! | message | bytes | answer |
//! |---|---|---|
//! | hold | `H`, three zeros, seconds until the guard thaws (u32), number of the cut (u64); with one descriptor | `K`, or `R` if the guard cannot hold it |
//! | forget | `F`, seven zeros, number of the cut (u64) | `K`, once all descriptors of the cut are closed: a filesystem can be unmounted then |

mod client;
mod server;

use std::ffi::OsString;
use std::path::PathBuf;

pub use client::{Guard, Hold};
pub use server::{Connections, attend, listen};

/// Which process guards the freezes of a backend.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum FreezeGuard {
    /// None: what a killed process had frozen stays so until the next start. For tests of other things.
    #[default]
    None,
    /// A child with this command line, which serves its standard input ([`attend`]). It is started at the first cut, and again
    /// whenever it has died.
    Own { program: PathBuf, arguments: Vec<OsString> },
    /// One that listens on this socket ([`listen`]).
    At(PathBuf),
}

const MESSAGE_BYTES: usize = 16;
const HELD: u8 = b'K';
const REFUSED: u8 = b'R';

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Message {
    Hold { cut: u64, seconds: u32 },
    Forget { cut: u64 },
}

impl Message {
    fn encode(self) -> [u8; MESSAGE_BYTES] {
        let (kind, seconds, cut) = match self {
            Self::Hold { cut, seconds } => (b'H', seconds, cut),
            Self::Forget { cut } => (b'F', 0, cut),
        };
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&seconds.to_le_bytes());
        bytes[8..].copy_from_slice(&cut.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; MESSAGE_BYTES] = bytes.try_into().ok()?;
        let seconds = u32::from_le_bytes(bytes[4..8].try_into().ok()?);
        let cut = u64::from_le_bytes(bytes[8..].try_into().ok()?);
        match (bytes[0], &bytes[1..4], seconds) {
            (b'H', [0, 0, 0], seconds) => Some(Self::Hold { cut, seconds }),
            (b'F', [0, 0, 0], 0) => Some(Self::Forget { cut }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
