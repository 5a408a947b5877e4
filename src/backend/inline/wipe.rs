//! Overwriting what nobody may find on the disk afterwards. It reaches what the pool's filesystem overwrites in place, as
//! XFS and ext4 do; one that writes elsewhere (btrfs, ZFS), and a device that remaps its blocks, keep old copies.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use linux_raw_sys::ioctl::FIEMAP_EXTENT_SHARED;
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};

use super::super::error::{Context, Error, Result};
use super::super::fail_point::reach;
use super::super::store::length;
use super::super::sys;

static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

/// Overwrites what the file at `path` alone holds; what a snapshot has too is the snapshot's. OK when it is gone, and when
/// it was done before.
pub fn wipe(path: &Path) -> Result<()> {
    let doing = || format!("wiping {}", path.display());
    let file = match File::options().read(true).write(true).open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::io(doing(), e)),
    };
    let end = length(&file)?;
    let mut position = 0;
    while position < end {
        // Asked anew for each part: to overwrite changes the map.
        let parts = parts(&file, position, end).context(doing)?;
        position = parts.last().map_or(end, |(part, _)| part.end.max(position + 1));
        let own = parts.into_iter().filter(|(_, is_shared)| !is_shared);
        own.map(|(part, _)| part).try_for_each(|part| overwrite(&file, part)).context(doing)?;
    }
    reach("wipe.overwritten")?;
    file.sync_all().context(doing)?;
    reach("wipe.flushed")
}

/// The next parts from `start` on that have blocks, in bytes, and whether these are another file's too. Those that read
/// as zeros are among them: what their blocks held before may be there still.
fn parts(file: &File, start: u64, end: u64) -> io::Result<Vec<(Range<u64>, bool)>> {
    match sys::fiemap(file, start, end) {
        Ok(extents) => Ok(extents
            .iter()
            .map(|extent| {
                let past = extent.logical.saturating_add(extent.length);
                let part = extent.logical.max(start)..past.min(end);
                (part, extent.flags & FIEMAP_EXTENT_SHARED != 0)
            })
            .collect()),
        // A filesystem without extent maps shares nothing.
        Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOTTY)) => {
            match lseek(file, start as i64, Whence::SeekData) {
                Ok(data) => {
                    let hole = lseek(file, data, Whence::SeekHole)?;
                    Ok(vec![(data as u64..hole as u64, false)])
                }
                Err(Errno::ENXIO) => Ok(Vec::new()),
                Err(e) => Err(e.into()),
            }
        }
        Err(e) => Err(e),
    }
}

/// Some bytes at a time.
fn overwrite(file: &File, part: Range<u64>) -> io::Result<()> {
    let mut position = part.start;
    while position < part.end {
        let length = (part.end - position).min(ZEROS.len() as u64);
        file.write_all_at(&ZEROS[..length as usize], position)?;
        position += length;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_holds_is_overwritten_and_its_holes_stay_holes() {
        use std::os::unix::fs::MetadataExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let file = File::create(&path).unwrap();
        let bytes = 3 << 20;
        file.set_len(64 << 20).unwrap();
        for at in [0, 20 << 20] {
            file.write_all_at(&vec![b's'; bytes], at).unwrap();
        }
        file.sync_all().unwrap();
        let before = file.metadata().unwrap().blocks();
        for _ in 0..2 {
            wipe(&path).unwrap();
            let content = std::fs::read(&path).unwrap();
            assert!(content.len() == 64 << 20 && content.iter().all(|byte| *byte == 0));
            assert!(file.metadata().unwrap().blocks() <= before + 64);
        }
        std::fs::remove_file(&path).unwrap();
        wipe(&path).unwrap();
    }

    #[test]
    fn root_what_another_file_holds_too_is_left_to_it_and_the_rest_is_overwritten() {
        use crate::backend::pool::{self, ImageChoice, PoolChoice, PoolKind};
        let directory = tempfile::tempdir().unwrap();
        let choice = PoolChoice::Kind(PoolKind::Image);
        let image = ImageChoice { size: Some(1 << 30), sparse: true, block_size: None };
        let opened = pool::open(directory.path(), choice, &image).unwrap();
        let [path, other_path] = ["file", "other"].map(|name| opened.pool.root().join(name));
        let [file, other] = [&path, &other_path].map(|path| pool::new_file(path).unwrap());
        let content = |byte, bytes: usize| vec![byte; bytes];
        file.write_all_at(&content(b's', 6 << 20), 0).unwrap();
        file.sync_all().unwrap();
        sys::clone_file(&other, &file).unwrap();
        // Both ends are its own from here on, and what lies between is the other's, too.
        file.write_all_at(&content(b'o', 1 << 20), 0).unwrap();
        file.write_all_at(&content(b'o', 2 << 20), 5 << 20).unwrap();
        file.sync_all().unwrap();
        wipe(&path).unwrap();
        let zeros = |bytes| content(0, bytes);
        let left = [zeros(1 << 20), content(b's', 4 << 20), zeros(2 << 20)].concat();
        assert!(std::fs::read(&path).unwrap() == left);
        assert!(std::fs::read(&other_path).unwrap() == content(b's', 6 << 20));
        let extents = sys::fiemap(&file, 1 << 20, 5 << 20).unwrap();
        assert!(extents.iter().all(|extent| extent.flags & FIEMAP_EXTENT_SHARED != 0));
    }

    #[test]
    fn where_there_are_no_extent_maps_all_of_the_file_is_overwritten() {
        use nix::sys::memfd::{MFdFlags, memfd_create};
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::MetadataExt;
        // In memory, as tmpfs has it.
        let file: File = memfd_create("file", MFdFlags::MFD_CLOEXEC).unwrap().into();
        file.set_len(64 << 20).unwrap();
        for at in [0, 20 << 20] {
            file.write_all_at(&vec![b's'; 3 << 20], at).unwrap();
        }
        let refused = sys::fiemap(&file, 0, 64 << 20).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EOPNOTSUPP));
        let before = file.metadata().unwrap().blocks();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        wipe(Path::new(&path)).unwrap();
        assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 0));
        assert_eq!(file.metadata().unwrap().blocks(), before, "holes stay holes");
    }
}
