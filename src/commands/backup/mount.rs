//! `backup mount`: a backup as a read-only file, by FUSE. The mount lives as long as the command.
//! Every byte was verified; what cannot be read or is damaged is an I/O error for the reader, and a
//! line on stderr names the object. Memory does not grow with the volume: pages and chunks are in
//! caches with limits.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEntry, ReplyOpen,
    Request, Session,
};
use nix::libc::ENOTCONN;
use nix::mount::{MntFlags, umount2};
use serde::Serialize;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::manifest::Manifest;
use super::merge::{Merge, PageCache};
use super::repository::Repository;
use super::restore::{self, Reader};
use crate::client::stop::{Interrupted, Stop};
use crate::client::{Options, format, progress};
use common::quantity;

/// Of the file in the directory.
const NAME: &str = "image";
const FILE: INodeNo = INodeNo(2);
/// How long the kernel may cache what never changes.
const TTL: Duration = Duration::from_secs(3600);

/// Chunks of 1 MiB that are kept for the next reads.
const CHUNKS: usize = 32;

/// How often the same error is logged.
const PAUSE: Duration = Duration::from_secs(10);

#[derive(Debug, Serialize)]
struct Mounted {
    backup: String,
    image: String,
    capacity_bytes: u64,
}

/// Shows a backup in a directory until a signal, or until it is unmounted.
pub async fn run(
    options: &Options,
    stop: &Stop,
    repository: &Repository,
    reference: &str,
    directory: &Path,
) -> Result<ExitCode> {
    let directory = checked(directory)?;
    let inventory = stop.wait(repository.inventory()).await?;
    let backup = inventory.find(reference)?;
    let chain = inventory.chain(backup)?;
    if let Some(problem) = inventory.problem(backup) {
        progress::note(&format!("backup {}: {problem}; reads of that fail", backup.id));
    }
    let image = Image::new(repository, chain, stop)?;
    let (mut session, mounted) = (mount(image, &directory)?, Mounted::new(backup, &directory));
    let mut unmounter = session.unmount_callable();
    let (sender, ended) = oneshot::channel();
    std::thread::spawn(move || sender.send(session.run()));
    let shown = format::print_one(options.print.output, &mounted, Mounted::text);
    let served = match shown {
        Ok(()) => stop.whole(async { ended.await?.context("serve the mount") }).await,
        Err(error) => Err(error),
    };
    if unmounter.unmount().is_err() {
        progress::note(&format!("{} is in use: its users get errors", directory.display()));
        umount2(&directory, MntFlags::MNT_DETACH)
            .with_context(|| format!("unmount {}", directory.display()))?;
    }
    match served {
        Err(error) if !error.is::<Interrupted>() => Err(error),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// The directory, by its full path.
///
/// # Errors
/// Nothing can be mounted there, or something is.
fn checked(directory: &Path) -> Result<PathBuf> {
    let shown = directory.display();
    let is_empty = match fs::read_dir(directory) {
        Err(error) if error.raw_os_error() == Some(ENOTCONN) => bail!(
            "DIR {shown} has the mount of a command that was killed; run `umount {shown}` (without \
             root: `fusermount3 -u {shown}`) and repeat"
        ),
        entries => entries
            .with_context(|| format!("DIR {shown}: name an empty directory"))?
            .next()
            .is_none(),
    };
    ensure!(is_empty, "DIR {shown} is not empty; name an empty directory");
    directory.canonicalize().with_context(|| format!("DIR {shown}"))
}

fn mount(image: Image, directory: &Path) -> Result<Session<Files>> {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::RO,
        MountOption::NoExec,
        MountOption::FSName("csi-loopback".to_owned()),
        MountOption::Subtype("csi-loopback".to_owned()),
    ];
    let files = Files {
        bytes: image.chain.first().map_or(0, |newest| newest.subject.capacity_bytes),
        created: created(&image.chain),
        image: Arc::new(tokio::sync::Mutex::new(image)),
        last: Arc::default(),
        runtime: Handle::current(),
    };
    Session::new(files, directory, &config).with_context(|| {
        format!(
            "mount at {}: this needs /dev/fuse (`modprobe fuse`), and root or the program fusermount3",
            directory.display()
        )
    })
}

/// When the snapshot was taken, or else the backup.
fn created(chain: &[Manifest]) -> SystemTime {
    let newest = chain.first();
    let text = newest.map(|one| one.subject.snapshot_created.as_ref().unwrap_or(&one.created));
    text.and_then(|text| humantime::parse_rfc3339(text).ok()).unwrap_or(UNIX_EPOCH)
}

impl Mounted {
    fn new(backup: &Manifest, directory: &Path) -> Self {
        Self {
            backup: backup.id.to_string(),
            image: directory.join(NAME).display().to_string(),
            capacity_bytes: backup.subject.capacity_bytes,
        }
    }

    fn text(&self) -> String {
        let size = quantity::format(self.capacity_bytes);
        format::facts(&[
            ("mounted", self.backup.clone()),
            ("image", format!("{} ({size})", self.image)),
            ("end", "Ctrl-C, or umount of the directory".to_owned()),
        ])
    }
}

/// The bytes of a backup.
pub struct Image {
    repository: Repository,
    chain: Vec<Manifest>,
    pages: PageCache,
    reader: Reader,
    stop: Stop,
}

impl Image {
    /// `chain`: newest first.
    pub fn new(repository: &Repository, chain: Vec<Manifest>, stop: &Stop) -> Result<Self> {
        let reader = Reader::new(repository, &chain, CHUNKS)?;
        let (repository, pages) = (repository.clone(), PageCache::new());
        Ok(Self { repository, chain, pages, reader, stop: stop.clone() })
    }

    /// The bytes from `offset` on, up to the end of the volume.
    pub async fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>> {
        let capacity = self.chain.first().map_or(0, |newest| newest.subject.capacity_bytes);
        let end = capacity.min(offset.saturating_add(length.into()));
        let mut bytes = vec![0; usize::try_from(end.saturating_sub(offset))?];
        if bytes.is_empty() {
            return Ok(bytes);
        }
        let Self { repository, chain, pages, reader, stop } = self;
        let mut merge = stop.wait(Merge::part(repository, chain, pages, offset, end)).await?;
        loop {
            let window = stop.wait(restore::window(&mut merge)).await?;
            if window.is_empty() {
                return Ok(bytes);
            }
            stop.wait(reader.fetch(&window)).await?;
            for run in &window {
                if let Some(data) = restore::bytes_of(run, &reader.chunks)? {
                    let at = usize::try_from(run.extent.offset - offset)?;
                    bytes[at..at + data.len()].copy_from_slice(data);
                }
            }
        }
    }
}

/// The filesystem: a directory with one file.
struct Files {
    bytes: u64,
    created: SystemTime,
    /// One read at a time; a read gets its chunks in parallel.
    image: Arc<tokio::sync::Mutex<Image>>,
    last: Arc<Mutex<Option<(String, Instant)>>>,
    runtime: Handle,
}

impl Files {
    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let (kind, perm, nlink, size) = match inode {
            INodeNo::ROOT => (FileType::Directory, 0o500, 2, 0),
            FILE => (FileType::RegularFile, 0o400, 1, self.bytes),
            _ => return None,
        };
        let time = self.created;
        Some(FileAttr {
            ino: inode,
            size,
            blocks: size.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm,
            nlink,
            uid: nix::unistd::geteuid().as_raw(),
            gid: nix::unistd::getegid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

/// Logs why a read fails. A reader may repeat it at once, so the same reason is not repeated soon.
fn log(last: &Mutex<Option<(String, Instant)>>, error: &anyhow::Error) {
    let text = format!("{error:#}");
    let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
    let is_new = last.as_ref().is_none_or(|(before, at)| *before != text || at.elapsed() > PAUSE);
    if is_new {
        progress::suspend(|| eprintln!("csi-loopback: a read of the image fails: {text}"));
        *last = Some((text, Instant::now()));
    }
}

impl Filesystem for Files {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attributes(FILE).filter(|_| parent == INodeNo::ROOT && name == NAME) {
            Some(attributes) => reply.entry(&TTL, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode) {
            Some(attributes) => reply.attr(&TTL, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE);
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
        let (image, last) = (Arc::clone(&self.image), Arc::clone(&self.last));
        self.runtime.spawn(async move {
            match image.lock().await.read(offset, size).await {
                Ok(bytes) => reply.data(&bytes),
                Err(error) => {
                    log(&last, &error);
                    reply.error(Errno::EIO);
                }
            }
        });
    }

    fn readdir(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let entries = [
            (INodeNo::ROOT, FileType::Directory, "."),
            (INodeNo::ROOT, FileType::Directory, ".."),
            (FILE, FileType::RegularFile, NAME),
        ];
        for (number, (inode, kind, name)) in (1..).zip(entries) {
            // The offset of an entry is that of the next one.
            if number > offset && reply.add(inode, number, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}
