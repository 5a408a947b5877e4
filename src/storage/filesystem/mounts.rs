//! Reads the mount table (proc(5), mountinfo).

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::super::error::{Context, Error, Result};
use super::super::loop_device::LoopDevice;
use super::super::sys;
use super::detached;

/// One mount of this mount namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    pub id: u64,
    /// The id of the mount that contains the mount point.
    pub parent: u64,
    /// `major:minor` of the filesystem.
    pub device: String,
    /// The directory of the filesystem that is mounted. For a device node, its path in its own
    /// filesystem.
    pub root: PathBuf,
    pub target: PathBuf,
    /// The mounted source: a device path for a filesystem on a device.
    pub source: PathBuf,
}

impl Mount {
    /// Whether this is a mount of the filesystem on `device`. (btrfs has its own device numbers, so
    /// the source is compared too.)
    pub fn is_filesystem_of(&self, device: &LoopDevice) -> bool {
        self.device == device.device_number() || self.source == device.path()
    }

    /// Whether this is a bind mount of the node of any loop device.
    pub fn is_loop_node(&self) -> bool {
        let name = self.root.file_name().and_then(|name| name.to_str());
        name.and_then(|name| name.strip_prefix("loop")).is_some_and(|n| n.parse::<u32>().is_ok())
    }

    /// Whether this is a bind mount of the node of `device`.
    pub fn is_node_of(&self, device: &LoopDevice) -> bool {
        device.path().file_name().is_some_and(|name| self.root == Path::new("/").join(name))
    }
}

/// `path` as in mountinfo, with the symbolic links of its directory resolved. `None` if the
/// directory is missing.
fn resolved(path: &Path) -> Result<Option<PathBuf>> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(Some(path.to_owned()));
    };
    match parent.canonicalize() {
        Ok(parent) => Ok(Some(parent.join(name))),
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(None),
        Err(e) => Err(Error::io(format!("resolving {}", path.display()), e)),
    }
}

/// The topmost mount at `target`.
pub fn mount_at(target: &Path) -> Result<Option<Mount>> {
    Ok(mount_among(&all_mounts()?, target)?.cloned())
}

/// The topmost mount at `target` among `mounts`, which are in mount order.
pub fn mount_among<'a>(mounts: &'a [Mount], target: &Path) -> Result<Option<&'a Mount>> {
    let Some(target) = resolved(target)? else { return Ok(None) };
    Ok(mounts.iter().rfind(|mount| mount.target == target))
}

/// The mounts of the filesystem on a loop device in this mount namespace.
pub fn mounts_of(device: &LoopDevice) -> Result<Vec<Mount>> {
    let mut mounts = all_mounts()?;
    mounts.retain(|mount| mount.is_filesystem_of(device));
    Ok(mounts)
}

/// Whether this mount namespace has the filesystem on a loop device mounted at no other path than
/// these.
pub fn is_mounted_only_at<'a>(
    device: &LoopDevice,
    paths: impl IntoIterator<Item = &'a Path>,
) -> Result<bool> {
    let mut mounts = mounts_of(device)?;
    for path in paths {
        if let Some(path) = resolved(path)? {
            mounts.retain(|mount| mount.target != path);
        }
    }
    Ok(mounts.is_empty())
}

/// Opens the root of the mounted filesystem on a loop device. `None` if this kernel has it mounted
/// in no mount namespace. The mount id is checked, because another mount may cover the path.
pub fn open_mounted(device: &LoopDevice) -> Result<Option<File>> {
    let mounts = mounts_of(device)?;
    for mount in &mounts {
        match File::open(&mount.target) {
            Ok(file) if sys::mount_id(&file).is_ok_and(|id| id == mount.id) => {
                return Ok(Some(file));
            }
            Err(e) if e.raw_os_error() == Some(libc::EIO) => {
                return Err(Error::Precondition(format!(
                    "the filesystem mounted at {} has shut down after an error (see the kernel log); delete the pods that \
                     use it, so that the volume is unstaged and staged again",
                    mount.target.display()
                )));
            }
            Ok(_) | Err(_) => {}
        }
    }
    match mounts.first() {
        // A container may have mounted it in another mount namespace.
        None => Ok(detached::join(device, false)?.map(detached::Root::into_file)),
        Some(mount) => Err(Error::Precondition(format!(
            "the filesystem mounted at {} is covered by another mount; unmount that mount",
            mount.target.display()
        ))),
    }
}

/// The mounts of this process's mount namespace, in mount order.
pub fn all_mounts() -> Result<Vec<Mount>> {
    read(Path::new("/proc/self/mountinfo"))
}

/// The mounts of another process's mount namespace, below its root.
pub fn mounts_of_process(pid: u32) -> Result<Vec<Mount>> {
    read(&PathBuf::from(format!("/proc/{pid}/mountinfo")))
}

fn read(path: &Path) -> Result<Vec<Mount>> {
    let text = fs::read(path).context(|| format!("reading {}", path.display()))?;
    Ok(parse_mounts(&text))
}

/// The mounts in the text of a mountinfo file.
pub fn parse_mounts(text: &[u8]) -> Vec<Mount> {
    text.split(|byte| *byte == b'\n').filter_map(parse).collect()
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime …`
fn parse(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let parent = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let device = String::from_utf8(fields.next()?.to_vec()).ok()?;
    let root = unescape(fields.next()?);
    let target = unescape(fields.next()?);
    // Optional fields end with a dash; then come type and source.
    let source = unescape(fields.skip_while(|field| *field != b"-").nth(2)?);
    Some(Mount { id, parent, device, root, target, source })
}

/// Decodes the kernel's octal escapes for blanks, line ends and backslashes.
fn unescape(field: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let code = tail
            .get(..3)
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        match (byte, code) {
            (b'\\', Some(code)) => {
                out.push(code);
                rest = &tail[3..];
            }
            _ => {
                out.push(byte);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_point_with_blanks_is_decoded() {
        let line = br"36 35 7:3 / /mnt/a\040b\134c rw shared:1 - ext4 /dev/loop3 rw";
        let mount = parse(line).unwrap();
        assert_eq!((mount.id, mount.parent, mount.device.as_str()), (36, 35, "7:3"));
        assert_eq!(mount.source, Path::new("/dev/loop3"));
        assert_eq!(mount.target, Path::new(r"/mnt/a b\c"));
    }

    #[test]
    fn a_truncated_line_is_ignored() {
        assert_eq!(parse(b"36 35 7:3 /"), None);
        assert_eq!(parse(b""), None);
    }
}
