//! The unix socket of a role: made with no moment at which it has the wrong owner or mode, never taken
//! from a process that still answers, and removed at the end only if it is still ours.

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

use crate::fail_point::meet;

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 128;
/// How often, and after how long, it is looked whether another process has made its socket.
const TURNS: usize = 50;
const TURN: Duration = Duration::from_millis(10);

/// Removes its socket when dropped, unless another process has put its own there.
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
            tracing::warn!(path = %self.path.display(), %error, "the socket could not be removed");
        }
    }
}

/// A socket that has no name yet that clients know.
struct Bound {
    socket: UnixSocket,
    gid: Option<u32>,
    temporary: PathBuf,
    _turn: Option<Flock<File>>,
}

/// Binds a socket beside `path`, where that is free.
fn bind(path: &Path, group: Option<&str>) -> anyhow::Result<Bound> {
    let directory = path.parent().context("the socket needs a directory")?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(directory)
        .with_context(|| format!("making the directory {}", directory.display()))?;
    let gid = group.map(group_id).transpose()?;
    // One at a time: two containers that share the directory may have the same process number, and each would take the other's
    // socket for its own.
    let turn = turn(directory)?;
    refuse_if_taken(path)?;

    // Bound under a name of its own first: nobody can connect before `listen`, and by then mode and
    // group are set. The rename then takes the place of a stale socket in one step.
    // Its name is no longer than a process number: a socket's path has little room.
    remove_left_over(directory);
    let temporary = directory.join(format!(".{}", std::process::id()));
    let socket = UnixSocket::new_stream()?;
    socket
        .bind(&temporary)
        .with_context(|| format!("binding a socket in {}", directory.display()))?;
    Ok(Bound { socket, gid, temporary, _turn: turn })
}

/// Finds out whether [`listen`] would succeed, and leaves no socket. To be called inside a runtime.
pub fn try_listen(path: &Path, group: Option<&str>) -> anyhow::Result<()> {
    let bound = bind(path, group)?;
    let temporary = bound.temporary.display();
    fs::remove_file(&bound.temporary).with_context(|| format!("removing {temporary}"))
}

/// Listens on `path` with this mode and group. A socket that nobody listens on is replaced; one that
/// answers is an error. To be called inside a runtime.
pub fn listen(
    path: &Path,
    mode: u32,
    group: Option<&str>,
) -> anyhow::Result<(UnixListener, Guard)> {
    let shown = path.display();
    let Bound { socket, gid, temporary, _turn } = bind(path, group)?;
    let placed = (|| {
        meet("socket.bound")?;
        chown(&temporary, None, gid).context("setting the group of the socket")?;
        fs::set_permissions(&temporary, Permissions::from_mode(mode))?;
        let made = fs::symlink_metadata(&temporary)?;
        let listener = socket.listen(BACKLOG)?;
        fs::rename(&temporary, path)?;
        let guard = Guard { path: path.to_owned(), device: made.dev(), inode: made.ino() };
        meet("socket.named")?;
        anyhow::Ok((listener, guard))
    })();
    placed
        .inspect_err(|_| drop(fs::remove_file(&temporary)))
        .with_context(|| format!("making the socket {shown}"))
}

/// Keeps other processes of this program from making a socket in the directory, until it is dropped. It takes a moment to make one: a
/// lock that lasts is for something else.
fn turn(directory: &Path) -> anyhow::Result<Option<Flock<File>>> {
    for _ in 0..TURNS {
        let opened = File::open(directory);
        let opened = opened.with_context(|| format!("opening {}", directory.display()))?;
        match Flock::lock(opened, FlockArg::LockExclusiveNonblock) {
            Ok(locked) => return Ok(Some(locked)),
            Err(_) => sleep(TURN),
        }
    }
    Ok(None)
}

/// Removes what processes that were killed had bound and not yet named: sockets called after a process
/// that is gone, or after this one.
fn remove_left_over(directory: &Path) {
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

fn refuse_if_taken(path: &Path) -> anyhow::Result<()> {
    let shown = path.display();
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("looking at {shown}")),
        Ok(found) if !found.file_type().is_socket() => {
            bail!("{shown} exists and is not a socket; remove it or choose another --endpoint")
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => bail!(
            "{shown} is in use: another process answers on it; stop it or choose another --endpoint"
        ),
        Err(error)
            if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) =>
        {
            Ok(())
        }
        Err(error) => Err(error).with_context(|| format!("finding out whether {shown} is in use")),
    }
}

/// An access mode, as a flag gives it.
pub fn octal_mode(text: &str) -> Result<u32, String> {
    let digits = text.strip_prefix("0o").unwrap_or(text);
    let octal = digits.bytes().all(|byte| byte.is_ascii_digit());
    match u32::from_str_radix(digits, 8) {
        Ok(mode) if octal && mode <= 0o777 => Ok(mode),
        _ => Err(format!("{text:?} is not an access mode in octal, such as 0660")),
    }
}

/// The id of a group that is given by name or number.
fn group_id(group: &str) -> anyhow::Result<u32> {
    if let Ok(id) = group.parse() {
        return Ok(id);
    }
    let found =
        Group::from_name(group).with_context(|| format!("looking up the group {group:?}"))?;
    Ok(found.with_context(|| format!("--socket-group: there is no group {group:?}"))?.gid.as_raw())
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
    async fn the_socket_has_its_mode_and_goes_with_its_guard() {
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
    async fn a_socket_that_answers_is_not_taken() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("csi.sock");
        let _first = listen(&path, 0o600, None).unwrap();
        let error = listen(&path, 0o600, None).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("in use"), "{error}");
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_its_old_guard_leaves_the_new_one_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("csi.sock");
        let (listener, stale) = listen(&path, 0o600, None).unwrap();
        drop(listener);
        let (_listener, _guard) = listen(&path, 0o600, None).unwrap();
        drop(stale);
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[tokio::test]
    async fn what_a_killed_process_had_bound_and_not_named_goes_with_the_next_start() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        // More than any process number (proc(5), pid_max).
        let of_the_dead = UnixListener::bind(at(".4194305")).unwrap();
        let of_the_living = UnixListener::bind(at(".1")).unwrap();
        fs::write(at(".4194306"), "no socket").unwrap();
        let (_listener, _guard) = listen(&at("csi.sock"), 0o600, None).unwrap();
        drop((of_the_dead, of_the_living));
        let there = [".4194305", ".1", ".4194306", "csi.sock"].map(|name| at(name).exists());
        assert_eq!(there, [false, true, true, true]);
    }

    /// As two containers that share a directory, in each of which the first process is number 1.
    #[tokio::test(flavor = "multi_thread", worker_threads = 8)]
    async fn two_that_begin_at_once_do_not_take_each_others_socket() {
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
    async fn a_directory_that_is_locked_for_something_else_holds_up_nobody() {
        let directory = tempfile::tempdir().unwrap();
        let opened = File::open(directory.path()).unwrap();
        let _locked = Flock::lock(opened, FlockArg::LockExclusive).unwrap();
        let path = directory.path().join("csi.sock");
        let _listening = listen(&path, 0o600, None).unwrap();
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[tokio::test]
    async fn a_file_that_is_no_socket_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("csi.sock");
        fs::write(&path, "precious").unwrap();
        assert!(listen(&path, 0o600, None).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
        let other = directory.path().join("other.sock");
        assert!(listen(&other, 0o600, Some("no such group")).is_err());
        assert!(!other.exists());
    }
}
