//! The guard's side: what each connection holds, and its thaw.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::stat;
use tracing::{error, warn};

use super::super::filesystem;
use super::super::sys;
use super::{HELD, MESSAGE_BYTES, Message, REFUSED};

/// Descriptors of one connection: a driver cuts no more filesystems at once.
const MAX_HELD: usize = 1024;
/// Connections at once: a driver has one.
const MAX_CONNECTIONS: usize = 64;
/// The longest that anything is held.
const LONGEST: Duration = Duration::from_secs(3600);
/// Time to the next attempt to accept a connection when the machine has no room for it.
const PAUSE: Duration = Duration::from_secs(1);

/// A directory of a filesystem that is frozen, or about to be.
#[derive(Debug)]
struct Held {
    cut: u64,
    directory: File,
    until: Instant,
}

impl Held {
    /// `major:minor` of the filesystem, as far as it is known.
    fn device(&self) -> Option<String> {
        let device = self.directory.metadata().ok()?.dev();
        Some(format!("{}:{}", stat::major(device), stat::minor(device)))
    }
}

/// What a connection holds. All of it is thawed when this is dropped.
#[derive(Debug, Default)]
struct Holding(Vec<Held>);

impl Holding {
    fn take(&mut self, message: Message, descriptors: Vec<OwnedFd>) -> u8 {
        match message {
            Message::Forget { cut } => {
                self.0.retain(|held| held.cut != cut);
                HELD
            }
            Message::Hold { cut, seconds } => {
                let longest = Duration::from_secs(seconds.into()).min(LONGEST);
                // None arrives where this process can have no more.
                match <[OwnedFd; 1]>::try_from(descriptors) {
                    Ok([descriptor]) if self.0.len() < MAX_HELD => {
                        let directory = File::from(descriptor);
                        self.0.push(Held { cut, directory, until: Instant::now() + longest });
                        HELD
                    }
                    Ok(_) | Err(_) => REFUSED,
                }
            }
        }
    }

    /// How long until something has to be thawed.
    fn patience(&self) -> Option<Duration> {
        let next = self.0.iter().map(|held| held.until).min()?;
        Some(next.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)))
    }

    fn thaw(&mut self, is_due: impl Fn(&Held) -> bool, why: &'static str) {
        let all = std::mem::take(&mut self.0);
        let (due, kept) = all.into_iter().partition::<Vec<_>, _>(is_due);
        self.0 = kept;
        let thawed: Vec<_> =
            due.iter().map(|held| filesystem::thaw_left_over(&held.directory)).collect();
        let devices: Vec<_> = due.iter().map(Held::device).collect();
        drop(due);
        // Not before: the log may be on a disk that does not answer.
        for (thawed, device) in thawed.into_iter().zip(devices) {
            match thawed {
                Ok(true) => {
                    warn!(device, why, "thawed a filesystem that was frozen for a snapshot")
                }
                Ok(false) => {}
                Err(error) => error!(device, why, %error, "a filesystem may still be frozen"),
            }
        }
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.thaw(|_| true, "the driver is gone");
    }
}

/// Serves one connection until it ends, and thaws what it then still holds.
///
/// # Errors
/// What it ended with, unless the driver has closed it.
pub fn attend(connection: &UnixStream) -> io::Result<()> {
    let mut holding = Holding::default();
    loop {
        connection.set_read_timeout(holding.patience())?;
        let mut bytes = [0; MESSAGE_BYTES];
        match sys::receive_with_descriptors(connection, &mut bytes) {
            Ok((0, _)) => return Ok(()),
            Ok((length, descriptors)) => {
                let message = Message::decode(&bytes[..length]).ok_or(ErrorKind::InvalidData)?;
                let answer = holding.take(message, descriptors);
                connection.set_write_timeout(Some(PAUSE))?;
                sys::send_with_descriptor(connection, &[answer], None)?;
            }
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) => {}
            Err(error) => return Err(error),
        }
        let now = Instant::now();
        holding.thaw(|held| held.until <= now, "the snapshot took too long");
    }
}

/// How many connections there are.
#[derive(Debug, Clone, Default)]
pub struct Connections(Arc<(Mutex<usize>, Condvar)>);

impl Connections {
    fn count(&self) -> MutexGuard<'_, usize> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is none.
    pub fn wait_until_none(&self) {
        let none = self.0.1.wait_while(self.count(), |count| *count > 0);
        drop(none.unwrap_or_else(PoisonError::into_inner));
    }
}

/// One connection, counted as long as this lives.
struct Counted(Connections);

impl Counted {
    /// `None` when there are too many.
    fn one(connections: &Connections) -> Option<Self> {
        let mut count = connections.count();
        if *count >= MAX_CONNECTIONS {
            return None;
        }
        *count += 1;
        drop(count);
        Some(Self(connections.clone()))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        *self.0.count() -= 1;
        self.0.0.1.notify_all();
    }
}

/// Serves each connection on a thread of its own, for as long as the process runs.
///
/// # Errors
/// The thread that accepts them cannot be started.
pub fn listen(listener: UnixListener) -> io::Result<Connections> {
    let connections = Connections::default();
    let counted = connections.clone();
    thread::Builder::new().name("accept".to_owned()).spawn(move || {
        for connection in listener.incoming() {
            let served = connection.and_then(|connection| serve(connection, &counted));
            if let Err(error) = served {
                warn!(%error, "a connection could not be served");
                thread::sleep(PAUSE);
            }
        }
    })?;
    Ok(connections)
}

/// One connection too many is closed: the driver's call then fails, with nothing frozen.
fn serve(connection: UnixStream, connections: &Connections) -> io::Result<()> {
    let counted = Counted::one(connections)
        .ok_or_else(|| io::Error::other(format!("there are {MAX_CONNECTIONS} already")))?;
    thread::Builder::new().name("connection".to_owned()).spawn(move || {
        let ended = attend(&connection);
        drop(counted);
        if let Err(error) = ended {
            warn!(%error, "a connection broke");
        }
    })?;
    Ok(())
}
