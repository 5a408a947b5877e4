//! The guard's side: the descriptors of each connection, and the thaw.

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

/// Maximum number of descriptors of a connection: the filesystems of one group snapshot.
const MAX_HELD: usize = 1024;
/// Maximum number of connections. A driver has one.
const MAX_CONNECTIONS: usize = 64;
/// Maximum duration of a hold.
const MAX_DURATION: Duration = Duration::from_secs(3600);
/// Delay after a failed accept.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// A directory of a filesystem that is or will be frozen.
#[derive(Debug)]
struct Held {
    id: u64,
    directory: File,
    until: Instant,
}

impl Held {
    /// `major:minor` of the filesystem, if known.
    fn device(&self) -> Option<String> {
        let device = self.directory.metadata().ok()?.dev();
        Some(format!("{}:{}", stat::major(device), stat::minor(device)))
    }
}

/// The directories of a connection. Dropping this thaws their filesystems.
#[derive(Debug, Default)]
struct HeldDirectories(Vec<Held>);

impl HeldDirectories {
    fn handle(&mut self, message: Message, descriptors: Vec<OwnedFd>) -> u8 {
        match message {
            Message::Forget { id } => {
                self.0.retain(|held| held.id != id);
                HELD
            }
            Message::Hold { id, seconds } => {
                let duration = Duration::from_secs(seconds.into()).min(MAX_DURATION);
                // No descriptor arrives if this process has too many open.
                match <[OwnedFd; 1]>::try_from(descriptors) {
                    Ok([descriptor]) if self.0.len() < MAX_HELD => {
                        let directory = File::from(descriptor);
                        self.0.push(Held { id, directory, until: Instant::now() + duration });
                        HELD
                    }
                    Ok(_) | Err(_) => REFUSED,
                }
            }
        }
    }

    /// The time until the next deadline.
    fn next_deadline(&self) -> Option<Duration> {
        let next = self.0.iter().map(|held| held.until).min()?;
        Some(next.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)))
    }

    fn thaw(&mut self, is_due: impl Fn(&Held) -> bool, why: &'static str) {
        let all = std::mem::take(&mut self.0);
        let (due, kept) = all.into_iter().partition::<Vec<_>, _>(is_due);
        self.0 = kept;
        let thawed: Vec<_> =
            due.iter().map(|held| filesystem::thaw_leftover(&held.directory)).collect();
        let devices: Vec<_> = due.iter().map(Held::device).collect();
        drop(due);
        // Log after the thaw: the log may be on a frozen filesystem.
        for (thawed, device) in thawed.into_iter().zip(devices) {
            match thawed {
                Ok(true) => {
                    warn!(device, why, "thawed a filesystem that was frozen for a snapshot")
                }
                Ok(false) => {}
                Err(error) => {
                    error!(device, why, %error, "failed to thaw a filesystem; it may still be frozen")
                }
            }
        }
    }
}

impl Drop for HeldDirectories {
    fn drop(&mut self) {
        self.thaw(|_| true, "the driver's connection ended");
    }
}

/// Serves one connection until it ends, and then thaws the filesystems that it still holds.
///
/// # Errors
/// The error that ended the connection, unless the driver closed it.
pub fn serve_connection(connection: &UnixStream) -> io::Result<()> {
    let mut held = HeldDirectories::default();
    loop {
        connection.set_read_timeout(held.next_deadline())?;
        let mut bytes = [0; MESSAGE_BYTES];
        match sys::receive_with_descriptors(connection, &mut bytes) {
            Ok((0, _)) => return Ok(()),
            Ok((length, descriptors)) => {
                let message = Message::decode(&bytes[..length]).ok_or(ErrorKind::InvalidData)?;
                let response = held.handle(message, descriptors);
                connection.set_write_timeout(Some(RETRY_DELAY))?;
                sys::send_with_descriptor(connection, &[response], None)?;
            }
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) => {}
            Err(error) => return Err(error),
        }
        let now = Instant::now();
        held.thaw(|held| held.until <= now, "the deadline of the snapshot passed");
    }
}

/// The number of open connections.
#[derive(Debug, Clone, Default)]
pub struct Connections(Arc<(Mutex<usize>, Condvar)>);

impl Connections {
    fn count(&self) -> MutexGuard<'_, usize> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no connection is open.
    pub fn wait_until_none(&self) {
        let none = self.0.1.wait_while(self.count(), |count| *count > 0);
        drop(none.unwrap_or_else(PoisonError::into_inner));
    }
}

/// One connection, counted until this is dropped.
struct Counted(Connections);

impl Counted {
    /// `None` if the limit is reached.
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

/// Accepts connections for the life of the process, and serves each on its own thread.
///
/// # Errors
/// The accepting thread cannot be started.
pub fn listen(listener: UnixListener) -> io::Result<Connections> {
    let connections = Connections::default();
    let counted = connections.clone();
    thread::Builder::new().name("accept".to_owned()).spawn(move || {
        for connection in listener.incoming() {
            let served = connection.and_then(|connection| spawn(connection, &counted));
            if let Err(error) = served {
                warn!(%error, "failed to accept a connection");
                thread::sleep(RETRY_DELAY);
            }
        }
    })?;
    Ok(connections)
}

/// Starts a thread for a connection. Above the limit the connection is closed: the driver's call
/// then fails with nothing frozen.
fn spawn(connection: UnixStream, connections: &Connections) -> io::Result<()> {
    let counted = Counted::one(connections).ok_or_else(|| {
        io::Error::other(format!("too many connections (limit {MAX_CONNECTIONS})"))
    })?;
    thread::Builder::new().name("connection".to_owned()).spawn(move || {
        let ended = serve_connection(&connection);
        drop(counted);
        if let Err(error) = ended {
            warn!(%error, "a connection failed");
        }
    })?;
    Ok(())
}
