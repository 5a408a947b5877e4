//! The driver's side: one connection for all cuts, made when it is needed and made anew when it broke.

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

/// How long the guard may take to answer, its start included.
const PATIENCE: Duration = Duration::from_secs(10);
/// So much later than the driver's own deadline the guard thaws.
const MARGIN: Duration = Duration::from_secs(10);

/// The way to the guard.
#[derive(Debug)]
pub struct Guard {
    choice: FreezeGuard,
    link: Mutex<Option<Link>>,
    cuts: AtomicU64,
}

/// What the guard holds for one cut, until this is dropped.
#[derive(Debug)]
pub struct Hold {
    guard: Arc<Guard>,
    cut: u64,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.guard.forget(self.cut);
    }
}

impl Guard {
    pub fn new(choice: FreezeGuard) -> Arc<Self> {
        Arc::new(Self { choice, link: Mutex::default(), cuts: AtomicU64::new(0) })
    }

    fn link(&self) -> MutexGuard<'_, Option<Link>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands over the filesystems that these directories are on. From here on they are thawed whatever becomes of this
    /// process, at the latest some seconds after `deadline`. `Unavailable` when there is no guard to do that.
    pub fn hold(
        self: &Arc<Self>,
        directories: &[File],
        deadline: Duration,
    ) -> Result<Option<Hold>> {
        if directories.is_empty() || self.choice == FreezeGuard::None {
            return Ok(None);
        }
        // Before the lock is taken: it is dropped after it.
        let hold = Hold { guard: Arc::clone(self), cut: self.cuts.fetch_add(1, Ordering::Relaxed) };
        let seconds = u32::try_from((deadline + MARGIN).as_secs()).unwrap_or(u32::MAX);
        let message = Message::Hold { cut: hold.cut, seconds };
        let mut known = self.link();
        // A guard may have died since the last cut; a new one has one attempt.
        let old = known.take().map(|link| link.hold_all(message, directories));
        let held = match old {
            Some(Ok(held)) => held,
            None | Some(Err(_)) => {
                let link = self.connect().map_err(|error| self.unavailable(&error))?;
                link.hold_all(message, directories).map_err(|error| self.unavailable(&error))?
            }
        };
        let (link, all) = held;
        *known = Some(link);
        drop(known);
        if !all {
            let error = io::Error::other("it cannot hold any more filesystems");
            return Err(self.unavailable(&error));
        }
        reach("freeze.guarded")?;
        Ok(Some(hold))
    }

    /// Returns when the guard has closed the descriptors of a cut, or is gone and with it all of them.
    fn forget(&self, cut: u64) {
        let mut known = self.link();
        let Some(link) = known.as_mut() else { return };
        if let Err(error) = link.request(Message::Forget { cut }, None) {
            warn!(%error, "the freeze guard does not answer; the next snapshot gets a new one");
            *known = None;
        }
    }

    fn connect(&self) -> io::Result<Link> {
        let link = match &self.choice {
            FreezeGuard::None => return Err(io::ErrorKind::Unsupported.into()),
            FreezeGuard::At(path) => Link { stream: connect_to(path)?, child: None },
            FreezeGuard::Own { program, arguments } => {
                let (stream, its) = UnixStream::pair()?;
                let mut command = Command::new(program);
                command.arg0("csi-loopback").args(arguments).current_dir("/");
                let child = command.stdin(OwnedFd::from(its)).stdout(Stdio::null()).spawn()?;
                Link { stream, child: Some(child) }
            }
        };
        link.stream.set_read_timeout(Some(PATIENCE))?;
        link.stream.set_write_timeout(Some(PATIENCE))?;
        Ok(link)
    }

    fn unavailable(&self, error: &io::Error) -> Error {
        let (which, advice) = match &self.choice {
            FreezeGuard::At(path) => (
                format!(" at {}", path.display()),
                "start it (csi-loopback --mode freeze-guard --endpoint) and try again",
            ),
            FreezeGuard::None | FreezeGuard::Own { .. } => (String::new(), "try again"),
        };
        Error::Unavailable(format!(
            "the freeze guard{which}, which thaws filesystems if the driver is killed, is not available: {error}; nothing was \
             frozen: {advice}"
        ))
    }
}

/// Connects at once or not at all: a guard that accepts nothing any more has a full queue at some time.
fn connect_to(path: &Path) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    let stream = UnixStream::from(socket);
    connect(stream.as_raw_fd(), &UnixAddr::new(path)?)?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// A connection to a guard. Dropped, it ends, and with it a guard that is a child.
#[derive(Debug)]
struct Link {
    stream: UnixStream,
    child: Option<Child>,
}

impl Link {
    /// Hands over the directories; false when the guard holds some of them only. A connection that broke is gone.
    fn hold_all(self, message: Message, directories: &[File]) -> io::Result<(Self, bool)> {
        for directory in directories {
            if !self.request(message, Some(directory.as_fd()))? {
                return Ok((self, false));
            }
        }
        Ok((self, true))
    }

    /// Whether the guard follows the protocol.
    fn request(&self, message: Message, descriptor: Option<BorrowedFd<'_>>) -> io::Result<bool> {
        let sent = sys::send_with_descriptor(&self.stream, &message.encode(), descriptor)?;
        if sent != MESSAGE_BYTES {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let mut answer = [0];
        (&self.stream).read_exact(&mut answer)?;
        match answer {
            [HELD] => Ok(true),
            [REFUSED] => Ok(false),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        // One that does not answer keeps mounts busy. Nobody waits for it here, should it be held up in the kernel.
        let _ = child.kill();
        let waits = thread::Builder::new().name("freeze-guard-end".to_owned());
        let _ = waits.spawn(move || child.wait());
    }
}
