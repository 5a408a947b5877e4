//! The unix socket of a role. It never exists with the wrong owner or mode, never replaces the
//! socket of a running process, and is removed at the end only if it is still this process's
//! socket.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::Group;
use tokio::net::{UnixListener, UnixSocket};

use common::fail_point::hit;

/// Maximum connections that wait to be accepted.
const BACKLOG: u32 = 128;
/// Attempts to lock the directory, and the pause between them, while another process creates a
/// socket.
const LOCK_ATTEMPTS: usize = 50;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Removes the socket when dropped, unless another process has replaced it.
pub struct Guard {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|found| (found.dev(), found.ino()) == (self.device, self.inode));
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "failed to remove the socket");
        }
    }
}

/// A bound socket that does not have its final name yet.
struct Bound {
    socket: UnixSocket,
    gid: Option<u32>,
    temporary: PathBuf,
    _lock: Option<Flock<File>>,
}

/// Binds a socket with a temporary name in the directory of `path`, if `path` is free.
fn bind(path: &Path, group: Option<&str>) -> anyhow::Result<Bound> {
    let directory = path.parent().context("the path of the socket has no directory")?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(directory)
        .with_context(|| format!("failed to create the directory {}", directory.display()))?;
    let gid = group.map(group_id).transpose()?;
    // One process at a time: two containers that share the directory may have the same process id,
    // and each would mistake the other's temporary socket for its own.
    let lock = lock(directory)?;
    check_not_in_use(path)?;

    // Bind under a temporary name: no client can connect before `listen`, and until then mode and
    // group are set. The rename then replaces a stale socket atomically. The temporary name is only
    // the process id, because the path of a socket is short.
    remove_stale(directory);
    let temporary = directory.join(format!(".{}", std::process::id()));
    let socket = UnixSocket::new_stream()?;
    socket
        .bind(&temporary)
        .with_context(|| format!("failed to bind a socket in {}", directory.display()))?;
    Ok(Bound { socket, gid, temporary, _lock: lock })
}

/// Checks whether [`listen`] would succeed, and leaves no socket. Must be called inside a tokio
/// runtime.
pub fn try_listen(path: &Path, group: Option<&str>) -> anyhow::Result<()> {
    let bound = bind(path, group)?;
    let temporary = bound.temporary.display();
    fs::remove_file(&bound.temporary).with_context(|| format!("failed to remove {temporary}"))
}

/// Listens on `path` with this mode and group. Replaces a socket without a listener; a socket that
/// accepts connections is an error. Must be called inside a tokio runtime.
pub fn listen(
    path: &Path,
    mode: u32,
    group: Option<&str>,
) -> anyhow::Result<(UnixListener, Guard)> {
    let shown = path.display();
    let Bound { socket, gid, temporary, _lock } = bind(path, group)?;
    let result = (|| {
        hit("socket.bound")?;
        chown(&temporary, None, gid).context("failed to set the group")?;
        fs::set_permissions(&temporary, Permissions::from_mode(mode))?;
        let metadata = fs::symlink_metadata(&temporary)?;
        let listener = socket.listen(BACKLOG)?;
        fs::rename(&temporary, path)?;
        let guard = Guard { path: path.to_owned(), device: metadata.dev(), inode: metadata.ino() };
        hit("socket.named")?;
        anyhow::Ok((listener, guard))
    })();
    result
        .inspect_err(|_| drop(fs::remove_file(&temporary)))
        .with_context(|| format!("failed to create the socket {shown}"))
}

/// Locks the directory against other processes of this program that create a socket, until the lock
/// is dropped. Creation takes a moment: a lock that lasts longer has another purpose and is
/// ignored.
fn lock(directory: &Path) -> anyhow::Result<Option<Flock<File>>> {
    for _ in 0..LOCK_ATTEMPTS {
        let opened = File::open(directory);
        let opened = opened.with_context(|| format!("failed to open {}", directory.display()))?;
        match Flock::lock(opened, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => return Ok(Some(locked)),
            Err(_) => sleep(LOCK_PAUSE),
        }
    }
    Ok(None)
}

/// Removes temporary sockets of killed processes: those named after a process that does not exist,
/// or after this one.
fn remove_stale(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix('.')?.parse::<u32>().ok());
        let is_gone = process.is_some_and(|process| {
            process == std::process::id() || !Path::new(&format!("/proc/{process}")).exists()
        });
        if is_gone && entry.file_type().is_ok_and(|found| found.is_socket()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn check_not_in_use(path: &Path) -> anyhow::Result<()> {
    let shown = path.display();
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("failed to inspect {shown}")),
        Ok(found) if !found.file_type().is_socket() => {
            bail!("{shown} exists and is not a socket; remove it or choose another path")
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => {
            bail!("{shown} is in use by another process; stop it or choose another path")
        }
        Err(error)
            if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) =>
        {
            Ok(())
        }
        Err(error) => {
            Err(error).with_context(|| format!("failed to check whether {shown} is in use"))
        }
    }
}

/// Parses an access mode.
pub fn octal_mode(text: &str) -> Result<u32, String> {
    let digits = text.strip_prefix("0o").unwrap_or(text);
    let octal = digits.bytes().all(|byte| byte.is_ascii_digit());
    match u32::from_str_radix(digits, 8) {
        Ok(mode) if octal && mode <= 0o777 => Ok(mode),
        _ => Err(format!("{text:?} is not an octal access mode such as 0660")),
    }
}

/// The id of a group, from its name or number.
fn group_id(group: &str) -> anyhow::Result<u32> {
    if let Ok(id) = group.parse() {
        return Ok(id);
    }
    let found = Group::from_name(group)
        .with_context(|| format!("failed to look up the group {group:?}"))?;
    Ok(found
        .with_context(|| {
            format!("unknown group {group:?} of --socket-group or --metadata-socket-group")
        })?
        .gid
        .as_raw())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode_of(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn an_access_mode_is_octal() {
        assert_eq!(octal_mode("0660"), Ok(0o660));
        assert_eq!(octal_mode("600"), Ok(0o600));
        assert!(["", "8", "1777", "+600", "rw"].iter().all(|text| octal_mode(text).is_err()));
    }

    #[tokio::test]
    async fn the_socket_has_its_mode_and_is_removed_at_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("made/csi.sock");
        let (_listener, guard) = listen(&path, 0o640, None).unwrap();
        assert_eq!(mode_of(&path), 0o640);
        assert!(UnixStream::connect(&path).is_ok());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        drop(guard);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("csi.sock");
        let (listener, stale) = listen(&path, 0o600, None).unwrap();
        drop(listener);
        let (_listener, _guard) = listen(&path, 0o600, None).unwrap();
        drop(stale);
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[tokio::test]
    async fn temporary_sockets_of_killed_processes_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        // Greater than any process id (proc(5), pid_max).
        let killed = UnixListener::bind(at(".4194305")).unwrap();
        let running = UnixListener::bind(at(".1")).unwrap();
        fs::write(at(".4194306"), "no socket").unwrap();
        let (_listener, _guard) = listen(&at("csi.sock"), 0o600, None).unwrap();
        drop((killed, running));
        let exists = [".4194305", ".1", ".4194306", "csi.sock"].map(|name| at(name).exists());
        assert_eq!(exists, [false, true, true, true]);
    }

    /// Like two containers that share a directory and in which the first process has id 1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 8)]
    async fn concurrent_starts_keep_their_own_sockets() {
        let directory = tempfile::tempdir().unwrap();
        for _ in 0..50 {
            let each = ["csi.sock", "proxy.sock"].map(|name| {
                let path = directory.path().join(name);
                tokio::spawn(async move { listen(&path, 0o600, None).unwrap() })
            });
            let [first, second] = each;
            let (first, second) = (first.await.unwrap(), second.await.unwrap());
            for ((listener, _), name) in [(&first, "csi.sock"), (&second, "proxy.sock")] {
                let _client = UnixStream::connect(directory.path().join(name)).unwrap();
                let accepted = tokio::time::timeout(Duration::from_secs(10), listener.accept());
                accepted.await.unwrap().unwrap();
            }
        }
    }

    #[tokio::test]
    async fn a_directory_locked_for_another_purpose_is_usable() {
        let directory = tempfile::tempdir().unwrap();
        let opened = File::open(directory.path()).unwrap();
        let _locked = Flock::lock(opened, FlockArg::LockExclusive).unwrap();
        let path = directory.path().join("csi.sock");
        let _listening = listen(&path, 0o600, None).unwrap();
        assert!(UnixStream::connect(&path).is_ok());
    }
}
