//! The mirror of the files of a mounted volume. Flushed or not, all earlier writes are in a
//! snapshot, because the filesystem is frozen.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{FallocateFlags, fallocate};

use super::operation::{Erase, How, Pick, Place, Shape, Write};
use support::{path, run, write_direct};

/// Maximum number of files of a volume, and maximum size of each in bytes.
const FILES: usize = 6;
const LARGEST: u64 = 384 << 10;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Files(BTreeMap<usize, Vec<u8>>);

fn at(mounted: &Path, file: usize) -> PathBuf {
    mounted.join(format!("file-{file}"))
}

fn open(mounted: &Path, file: usize) -> File {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).open(at(mounted, file)).unwrap()
}

impl Files {
    /// The files on a filesystem.
    pub fn read(mounted: &Path) -> Self {
        let read = |file| fs::read(at(mounted, file)).ok().map(|bytes| (file, bytes));
        Self((0..FILES).filter_map(read).collect())
    }

    /// `number` identifies this write.
    pub fn write(&mut self, mounted: &Path, file: Pick, write: Write, number: u64) {
        let file = file.of(FILES);
        let range = write.within(LARGEST);
        let inside = range.start as usize..range.end as usize;
        let mirror = self.0.entry(file).or_default();
        if mirror.len() < inside.end {
            mirror.resize(inside.end, 0);
        }
        let bytes = write.bytes(&mirror[inside.clone()], number);
        mirror[inside].copy_from_slice(&bytes);
        let opened = open(mounted, file);
        match write.how {
            How::Direct => write_direct(&at(mounted, file), range.start, &bytes),
            How::Buffered => opened.write_all_at(&bytes, range.start).unwrap(),
            How::Mapped => write_mapped(&opened, range.start, &bytes),
        }
        if write.sync {
            opened.sync_all().unwrap();
        }
    }

    pub fn erase(&mut self, mounted: &Path, file: Pick, place: Place, how: Erase) {
        let file = file.of(FILES);
        let mode = match how {
            // Discards unused space: no file changes.
            Erase::Discard => return run("fstrim", &[path(mounted)]),
            Erase::Punch => FallocateFlags::FALLOC_FL_PUNCH_HOLE,
            Erase::Zero => FallocateFlags::FALLOC_FL_ZERO_RANGE,
        };
        let Some(mirror) = self.0.get_mut(&file) else { return };
        let range = place.within(mirror.len() as u64, 1);
        if range.is_empty() {
            return;
        }
        let mode = mode | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let (start, length) = (range.start as i64, (range.end - range.start) as i64);
        fallocate(open(mounted, file), mode, start, length).unwrap();
        mirror[range.start as usize..range.end as usize].fill(0);
    }

    pub fn reshape(&mut self, mounted: &Path, file: Pick, place: Place, shape: Shape) {
        let file = file.of(FILES);
        let range = place.within(LARGEST, 1);
        match shape {
            Shape::Allocate => {
                let mode = FallocateFlags::empty();
                let (start, length) = (range.start as i64, (range.end - range.start) as i64);
                fallocate(open(mounted, file), mode, start, length).unwrap();
                let mirror = self.0.entry(file).or_default();
                let size = mirror.len().max(range.end as usize);
                mirror.resize(size, 0);
            }
            Shape::Truncate => {
                open(mounted, file).set_len(range.start).unwrap();
                self.0.entry(file).or_default().resize(range.start as usize, 0);
            }
            Shape::Rename(to) => {
                let to = to.of(FILES);
                if let Some(bytes) = self.0.remove(&file) {
                    fs::rename(at(mounted, file), at(mounted, to)).unwrap();
                    self.0.insert(to, bytes);
                }
            }
            Shape::Remove => {
                if self.0.remove(&file).is_some() {
                    fs::remove_file(at(mounted, file)).unwrap();
                }
            }
        }
    }
}

/// Writes through a mapping of the file, after extending it.
fn write_mapped(file: &File, offset: u64, bytes: &[u8]) {
    use std::os::fd::AsRawFd;

    let end = offset + bytes.len() as u64;
    if file.metadata().unwrap().len() < end {
        file.set_len(end).unwrap();
    }
    let (protection, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a new mapping at an address that the kernel chooses, as long as the file, and used
    // only in this function. No other process has the file open or truncates it.
    unsafe {
        let length = end as usize;
        let mapped =
            libc::mmap(std::ptr::null_mut(), length, protection, shared, file.as_raw_fd(), 0);
        assert_ne!(mapped, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        let to = mapped.cast::<u8>().add(offset as usize);
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        assert_eq!(libc::munmap(mapped, length), 0, "{}", std::io::Error::last_os_error());
    }
}
