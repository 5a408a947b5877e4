//! A disk with a volatile cache: a file served through FUSE whose writes become durable at a flush.
//! A copy contains later writes at random, block by block, as if the disk had written them back in
//! any order or not yet. The disk can also fail ([`Fault`]).

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyWrite, Request, WriteFlags,
};

use super::disk;
use support::random::Random;
use support::{BLOCK, zero};

const NAME: &str = "image";
const FILE: INodeNo = INodeNo(2);
const TTL: Duration = Duration::from_secs(3600);

/// The minimum number of volatile blocks for a copy, and how long to wait for them.
const MOST_WANTED: u64 = 16;
const PATIENCE: Duration = Duration::from_millis(40);

/// A fault of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A flush fails, and the writes since the last flush are lost.
    Flush,
    /// Reads fail.
    Read,
    /// Reads of one in [`BLOCKS_APART`] blocks fail: those with this remainder.
    Blocks(u64),
    /// Writes fail.
    Write,
    /// Writes to unallocated blocks fail, as on a full thin disk.
    Full,
}

/// A prime, so that the failing blocks do not align with periodic structures.
pub const BLOCKS_APART: u64 = 61;

/// The content of a block; `None` is a hole.
type Content = Option<Vec<u8>>;

/// The disk: durable data in a file, volatile data in memory.
struct State {
    path: PathBuf,
    file: File,
    bytes: u64,
    /// All writes since the last flush, by block and in order.
    pending: BTreeMap<u64, Vec<Content>>,
    random: Random,
    fault: Option<Fault>,
}

impl State {
    /// Whether a block of this range is unallocated.
    fn lacks_room(&self, offset: u64, length: u64) -> bool {
        let end = offset + length;
        let mut blocks = offset / BLOCK..end.div_ceil(BLOCK);
        blocks.any(|block| {
            let place = (block * BLOCK) as i64;
            let data = nix::unistd::lseek(&self.file, place, nix::unistd::Whence::SeekData);
            !self.pending.contains_key(&block) && data != Ok(place)
        })
    }

    fn write(&mut self, offset: u64, length: u64, data: Option<&[u8]>) {
        assert_eq!((offset % BLOCK, length % BLOCK), (0, 0), "whole sectors");
        for number in 0..length / BLOCK {
            let at = (number * BLOCK) as usize;
            let content = data.map(|data| data[at..at + BLOCK as usize].to_vec());
            self.pending.entry(offset / BLOCK + number).or_default().push(content);
        }
    }

    fn read(&self, offset: u64, length: u64) -> Vec<u8> {
        let end = self.bytes.min(offset + length);
        let mut data = vec![0; end.saturating_sub(offset) as usize];
        self.file.read_exact_at(&mut data, offset).unwrap();
        for (block, versions) in self.pending.range(offset / BLOCK..end.div_ceil(BLOCK)) {
            let at = (block * BLOCK - offset) as usize;
            match versions.last().unwrap() {
                Some(content) => data[at..at + BLOCK as usize].copy_from_slice(content),
                None => data[at..at + BLOCK as usize].fill(0),
            }
        }
        data
    }

    fn flush(&mut self) {
        for (block, mut versions) in std::mem::take(&mut self.pending) {
            put(&self.file, &self.path, block, &versions.pop().unwrap());
        }
    }

    /// See [`Cache::copy`].
    fn copy(&mut self, to: &Path) -> u64 {
        disk::clone(&self.path, to);
        let copy = File::options().write(true).open(to).unwrap();
        let mut lost = 0;
        // A block that is lost, written back, or mixed.
        let manner = self.random.below(4);
        for (block, versions) in &self.pending {
            let kept = match manner {
                0 => 0,
                1 => versions.len() as u64,
                _ => self.random.below(versions.len() as u64 + 1),
            };
            lost += u64::from(kept < versions.len() as u64);
            if kept > 0 {
                put(&copy, to, *block, &versions[kept as usize - 1]);
            }
        }
        lost
    }
}

fn put(file: &File, path: &Path, block: u64, content: &Content) {
    match content {
        Some(content) => file.write_all_at(content, block * BLOCK).unwrap(),
        None => zero(path, block * BLOCK, BLOCK, true),
    }
}

/// A served disk.
pub struct Cache {
    state: Arc<Mutex<State>>,
    mounted_at: PathBuf,
    session: Option<BackgroundSession>,
}

impl Cache {
    /// Serves the image `below` in the new directory `at`.
    pub fn serve(below: &Path, at: &Path) -> Self {
        std::fs::create_dir_all(at).unwrap();
        let file = File::options().read(true).write(true).open(below).unwrap();
        let bytes = file.metadata().unwrap().len();
        let (pending, random) = (BTreeMap::new(), Random::new(Random::new_seed()));
        let state = State { path: below.to_owned(), file, bytes, pending, random, fault: None };
        let state = Arc::new(Mutex::new(state));
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("csi-loopback-test".to_owned())];
        let session = fuser::spawn_mount(Served(Arc::clone(&state)), at, &config).unwrap();
        Self { state, mounted_at: at.to_owned(), session: Some(session) }
    }

    pub fn image(&self) -> PathBuf {
        self.mounted_at.join(NAME)
    }

    /// Sets or clears the fault of the disk.
    pub fn fail(&self, fault: Option<Fault>) {
        lock(&self.state).fault = fault;
    }

    /// Copies the disk as after a power loss, when there are volatile blocks, or after a timeout.
    /// Returns how many blocks differ from the last write.
    pub fn copy(&self, to: &Path) -> u64 {
        let until = Instant::now() + PATIENCE;
        let wanted = 1 + lock(&self.state).random.below(MOST_WANTED) as usize;
        loop {
            let mut state = lock(&self.state);
            if state.pending.len() >= wanted || Instant::now() > until {
                return state.copy(to);
            }
            drop(state);
            thread::sleep(Duration::from_micros(50));
        }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // Unmounts the disk. Does not wait for its thread: a running container may have a copy of
        // the mount.
        drop(self.session.take());
        let _ = std::fs::remove_dir(&self.mounted_at);
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The filesystem: a directory with one file.
struct Served(Arc<Mutex<State>>);

impl Served {
    fn attributes(&self, inode: INodeNo) -> FileAttr {
        let (kind, size) = match inode {
            FILE => (FileType::RegularFile, lock(&self.0).bytes),
            _ => (FileType::Directory, 0),
        };
        FileAttr {
            ino: inode,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm: 0o700,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: BLOCK as u32,
            flags: 0,
        }
    }
}

impl Filesystem for Served {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some(NAME) => reply.entry(&TTL, &self.attributes(FILE), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attributes(inode));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // The kernel must not cache data: that would be a second cache.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let state = lock(&self.0);
        let mut blocks = offset / BLOCK..(offset + u64::from(size)).div_ceil(BLOCK);
        match state.fault {
            Some(Fault::Read) => reply.error(Errno::EIO),
            Some(Fault::Blocks(bad)) if blocks.any(|block| block % BLOCKS_APART == bad) => {
                reply.error(Errno::EIO);
            }
            _ => reply.data(&state.read(offset, u64::from(size))),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut state = lock(&self.0);
        let length = data.len() as u64;
        match state.fault {
            Some(Fault::Write) => return reply.error(Errno::EIO),
            Some(Fault::Full) if state.lacks_room(offset, length) => {
                return reply.error(Errno::ENOSPC);
            }
            _ => {}
        }
        state.write(offset, length, Some(data));
        reply.written(data.len() as u32);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let mut state = lock(&self.0);
        if state.fault == Some(Fault::Flush) {
            state.pending.clear();
            return reply.error(Errno::EIO);
        }
        state.flush();
        reply.ok();
    }

    /// All modes that a loop device uses produce zeros.
    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        _: i32,
        reply: ReplyEmpty,
    ) {
        lock(&self.0).write(offset, length, None);
        reply.ok();
    }
}
