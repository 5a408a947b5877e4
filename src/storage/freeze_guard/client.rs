//! The driver's side: one connection for all freezes, opened when needed and reopened after an
//! error.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use tracing::warn;

use super::super::error::{Error, Result};
use super::super::fail_point::reach;
use super::super::sys;
use super::{FreezeGuard, HELD, MESSAGE_BYTES, Message, REFUSED};

/// Timeout for a response of the guard, including its start.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The guard thaws this much later than the driver's own deadline.
const MARGIN: Duration = Duration::from_secs(10);

/// The client of the freeze guard.
#[derive(Debug)]
pub struct Guard {
    config: FreezeGuard,
    connection: Mutex<Option<Connection>>,
    next_id: AtomicU64,
}

/// The descriptors that the guard holds for one freeze. Dropping this releases them.
#[derive(Debug)]
pub struct Hold {
    guard: Arc<Guard>,
    id: u64,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.guard.forget(self.id);
    }
}

impl Guard {
    pub fn new(config: FreezeGuard) -> Arc<Self> {
        Arc::new(Self { config, connection: Mutex::default(), next_id: AtomicU64::new(0) })
    }

    fn connection(&self) -> MutexGuard<'_, Option<Connection>> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the directories to the guard. From here on their filesystems are thawed even if this
    /// process is killed, at the latest some seconds after `deadline`. `Unavailable` if the guard
    /// cannot be reached.
    pub fn hold(
        self: &Arc<Self>,
        directories: &[File],
        deadline: Duration,
    ) -> Result<Option<Hold>> {
        if directories.is_empty() || self.config == FreezeGuard::None {
            return Ok(None);
        }
        // Created before the lock is taken, so that it is dropped after the lock.
        let hold =
            Hold { guard: Arc::clone(self), id: self.next_id.fetch_add(1, Ordering::Relaxed) };
        let seconds = u32::try_from((deadline + MARGIN).as_secs()).unwrap_or(u32::MAX);
        let message = Message::Hold { id: hold.id, seconds };
        let mut known = self.connection();
        // The guard may have died since the last freeze. Reconnect once.
        let old = known.take().map(|connection| connection.hold_all(message, directories));
        let held = match old {
            Some(Ok(held)) => held,
            None | Some(Err(_)) => {
                let connection = self.connect().map_err(|error| self.unavailable(&error))?;
                connection
                    .hold_all(message, directories)
                    .map_err(|error| self.unavailable(&error))?
            }
        };
        let (connection, all) = held;
        *known = Some(connection);
        drop(known);
        if !all {
            let error = io::Error::other("it cannot hold more filesystems");
            return Err(self.unavailable(&error));
        }
        reach("freeze.guarded")?;
        Ok(Some(hold))
    }

    /// Returns when the guard has closed the descriptors of a freeze, or is gone.
    fn forget(&self, id: u64) {
        let mut known = self.connection();
        let Some(connection) = known.as_mut() else { return };
        if let Err(error) = connection.request(Message::Forget { id }, None) {
            warn!(%error, "the freeze guard does not respond; the next snapshot connects again");
            *known = None;
        }
    }

    fn connect(&self) -> io::Result<Connection> {
        let connection = match &self.config {
            FreezeGuard::None => return Err(io::ErrorKind::Unsupported.into()),
            FreezeGuard::Socket(path) => Connection { stream: connect_to(path)?, child: None },
            FreezeGuard::Child { program, arguments } => {
                let (stream, its) = UnixStream::pair()?;
                let mut command = Command::new(program);
                command.arg0("csi-loopback").args(arguments).current_dir("/");
                let child = command.stdin(OwnedFd::from(its)).stdout(Stdio::null()).spawn()?;
                Connection { stream, child: Some(child) }
            }
        };
        connection.stream.set_read_timeout(Some(TIMEOUT))?;
        connection.stream.set_write_timeout(Some(TIMEOUT))?;
        Ok(connection)
    }

    fn unavailable(&self, error: &io::Error) -> Error {
        let (which, advice) = match &self.config {
            FreezeGuard::Socket(path) => (
                format!(" at {}", path.display()),
                "start it (csi-loopback --mode freeze-guard --endpoint) and try again",
            ),
            FreezeGuard::None | FreezeGuard::Child { .. } => (String::new(), "try again"),
        };
        Error::Unavailable(format!(
            "the freeze guard{which}, which thaws filesystems if the driver is killed, is not available: {error}; nothing was \
             frozen; {advice}"
        ))
    }
}

/// Connects without blocking: the queue of a hanging guard may be full.
fn connect_to(path: &Path) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    let stream = UnixStream::from(socket);
    connect(stream.as_raw_fd(), &UnixAddr::new(path)?)?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// A connection to a guard. Dropping it closes it, and ends a child guard.
#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    child: Option<Child>,
}

impl Connection {
    /// Sends the directories. Returns false if the guard refused one. An error consumes the
    /// connection.
    fn hold_all(self, message: Message, directories: &[File]) -> io::Result<(Self, bool)> {
        for directory in directories {
            if !self.request(message, Some(directory.as_fd()))? {
                return Ok((self, false));
            }
        }
        Ok((self, true))
    }

    /// Sends a message. Returns whether the guard accepted it.
    fn request(&self, message: Message, descriptor: Option<BorrowedFd<'_>>) -> io::Result<bool> {
        let sent = sys::send_with_descriptor(&self.stream, &message.encode(), descriptor)?;
        if sent != MESSAGE_BYTES {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let mut response = [0];
        (&self.stream).read_exact(&mut response)?;
        match response {
            [HELD] => Ok(true),
            [REFUSED] => Ok(false),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        // A hanging guard keeps mounts busy, so kill it. A thread reaps it, because it may be
        // blocked in the kernel.
        let _ = child.kill();
        let waits = thread::Builder::new().name("freeze-guard-end".to_owned());
        let _ = waits.spawn(move || child.wait());
    }
}
