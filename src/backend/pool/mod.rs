//! The pool: where backing files and their copies live. A pool is one small interface (make, clone,
//! compare two immutable files, remove, room), so that a kind can be added without touching what
//! stands above it. The files of a pool are named by id in four places:
//!
//! ```text
//! catalog.redb   volumes/<volume>   snapshots/<snapshot>   records/<snapshot>.<generation>
//! ```

mod below;
mod copy;
mod exact;
mod image;
mod reflink;

use std::fmt;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::error::{Context, Error, Result};
use super::extents::Finding;
use super::fail_point::reach;
use super::model::{Capacity, Condition, Precision};
use super::sys;
use super::units::BLOCK_SIZE;

pub use copy::CopyPool;
use image::Purpose;
pub use image::{Image, MAX_BLOCK_SIZE};
pub use reflink::ReflinkPool;

const MARKER: &str = "pool.json";
const MARKER_VERSION: u32 = 1;

/// What `--pool` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolChoice {
    /// What the data directory already holds; else the first kind that works here, in the order
    /// of [`PoolKind`].
    Auto,
    Kind(PoolKind),
}

/// The kinds of pool, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PoolKind {
    /// The data directory is on an XFS that shares blocks between files.
    Reflink,
    /// Such an XFS in an image file in the data directory, mounted where nobody else sees it.
    Image,
    /// Any filesystem; a snapshot is a sparse copy.
    Copy,
}

impl fmt::Display for PoolKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reflink => "reflink",
            Self::Image => "image",
            Self::Copy => "copy",
        })
    }
}

impl FromStr for PoolChoice {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Ok(match name {
            "auto" => Self::Auto,
            "reflink" => Self::Kind(PoolKind::Reflink),
            "image" => Self::Kind(PoolKind::Image),
            "copy" => Self::Kind(PoolKind::Copy),
            _ => {
                return Err(Error::invalid(
                    "pool",
                    format!("{name:?} is not one of auto, reflink, image and copy"),
                ));
            }
        })
    }
}

/// What is asked of the image of an image pool.
#[derive(Debug, Clone, Copy, Default)]
pub struct ImageChoice {
    /// Bytes; by default chosen from the room in the data directory. An image that is smaller grows, one
    /// that is larger is refused.
    pub size: Option<u64>,
    /// Whether a new image is sparse.
    pub sparse: bool,
    /// Bytes in a block of a new image's filesystem.
    pub block_size: Option<u64>,
}

/// Room in a pool, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub total: u64,
    pub available: u64,
}

/// An open pool, as an administrator sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolStatus {
    pub kind: PoolKind,
    /// Why the pool is of this kind.
    pub reason: String,
    pub room: Room,
    /// Bytes in a block of its filesystem.
    pub block_size: u64,
    /// Of an image pool.
    pub image: Option<ImageStatus>,
    pub capacity: Capacity,
    /// The factor by which volumes together may exceed the pool.
    pub overcommit: f64,
    /// What is wrong with all volumes of the pool, if anything.
    pub condition: Condition,
}

/// The image of an image pool. All in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageStatus {
    pub size: u64,
    /// Whether every block of it has room of its own on the filesystem below.
    pub allocated: bool,
    /// Available on the filesystem below.
    pub available_below: u64,
}

/// What the backend needs of a pool.
pub trait Pool: fmt::Debug + Send + Sync {
    fn kind(&self) -> PoolKind;

    /// The directory that the files are in.
    fn root(&self) -> &Path;

    fn room(&self) -> Result<Room>;

    /// The image of an image pool.
    fn image(&self) -> Option<&Image> {
        None
    }

    /// Marks a new file so that no tool moves its blocks.
    fn adopt(&self, file: &File) -> Result<()>;

    /// The part of a clone that can be done while `source` is written to: afterwards
    /// [`Pool::clone`] has less to do. `target` is new and as large as `source`.
    fn pre_clone(&self, source: &File, target: &File) -> Result<()>;

    /// Makes `target` equal to `source`. The caller has stopped the writers of `source`, or the
    /// clone is atomic against them ([`Pool::clones_atomically`]).
    fn clone(&self, source: &File, target: &File) -> Result<()>;

    /// Whether [`Pool::clone`] is a point in time even under writers.
    fn clones_atomically(&self) -> bool;

    /// Reports each range of `new` that is allocated, or changed against `old` (nothing: against
    /// zeros), in ascending order. Both are immutable, sizes are in bytes.
    fn compare(
        &self,
        old: Option<(&File, u64)>,
        new: (&File, u64),
        precision: Precision,
        report: &mut dyn FnMut(Finding) -> Result<()>,
    ) -> Result<()>;
}

/// Where the files of a pool are, by id.
impl dyn Pool + '_ {
    pub fn volume_path(&self, id: &str) -> PathBuf {
        Directory::Volumes.path(self.root()).join(id)
    }

    pub fn snapshot_path(&self, id: &str) -> PathBuf {
        Directory::Snapshots.path(self.root()).join(id)
    }

    pub fn record_path(&self, id: &str, generation: u64) -> PathBuf {
        Directory::Records.path(self.root()).join(format!("{id}.{generation}"))
    }
}

/// An open pool and the reason why it is of its kind.
#[derive(Debug)]
pub struct Opened {
    pub pool: Box<dyn Pool>,
    pub reason: String,
}

/// What `pool.json` holds. Fields that a pool does not have are left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Marker {
    version: u32,
    kind: PoolKind,
    /// Whether the image of an image pool is meant to be allocated. Those from before this field are
    /// sparse.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    allocated: bool,
    /// The `--pool-size` that was in force when [`grow`] made the image larger than that. A start that
    /// still has it changes nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    outgrown: Option<u64>,
}

/// Opens the pool of a data directory, or makes it.
pub fn open(data_dir: &Path, choice: PoolChoice, image: &ImageChoice) -> Result<Opened> {
    let opened = match (read_marker(data_dir)?, choice) {
        (Some(Marker { kind, .. }), PoolChoice::Kind(asked)) if kind != asked => {
            return Err(Error::Precondition(format!(
                "--pool {asked}: {} already holds a pool of kind {kind}; use that or another \
                 --data-dir",
                data_dir.display()
            )));
        }
        (Some(marker), _) => {
            check_image(data_dir, marker.kind)?;
            let pool = open_kind(data_dir, &marker, Purpose::Serve)?;
            if let Some(opened) = pool.image() {
                apply(image, opened, &marker)?;
            }
            Opened { pool, reason: "the data directory already holds it".to_owned() }
        }
        (None, choice) => open_new(data_dir, choice, image)?,
    };
    for directory in [Directory::Volumes, Directory::Snapshots, Directory::Records] {
        let path = directory.path(opened.pool.root());
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&path);
        made.context(|| format!("making {}", path.display()))?;
        reach("pool.directory_made")?;
    }
    sync_directory(opened.pool.root())?;
    Ok(opened)
}

/// Opens what is there: never makes a pool.
pub fn open_existing(data_dir: &Path) -> Result<Box<dyn Pool>> {
    let Some(marker) = read_marker(data_dir)? else {
        return Err(Error::Missing(format!(
            "{}: no pool here ({MARKER} is missing)",
            data_dir.display()
        )));
    };
    check_image(data_dir, marker.kind)?;
    open_kind(data_dir, &marker, Purpose::Check)
}

/// Applies to an image that is there what is asked of it.
fn apply(asked: &ImageChoice, image: &Image, marker: &Marker) -> Result<()> {
    if asked.sparse && marker.allocated {
        warn!("--pool-sparse changes nothing: the image of this pool was made allocated");
    }
    if let Some(asked) = asked.block_size
        && let has = filesystem_block_size(&image.root())?
        && asked != has
    {
        warn!("--pool-block-size changes nothing: this pool has blocks of {has} bytes");
    }
    let (Some(size), old) = (asked.size, image.size()?) else { return Ok(()) };
    if size >= old {
        return image.grow(size);
    }
    if marker.outgrown == Some(size) || size.next_multiple_of(BLOCK_SIZE) == old {
        return Ok(());
    }
    Err(Error::Precondition(format!(
        "--pool-size: the image of this pool has {old} bytes and cannot shrink to {size}; ask for at \
         least {old}, or leave the flag out"
    )))
}

/// Grows the image of an image pool to `size` bytes. `flag`: the `--pool-size` in force.
pub fn grow(data_dir: &Path, pool: &dyn Pool, flag: Option<u64>, size: u64) -> Result<()> {
    let Some(image) = pool.image() else {
        return Err(Error::Precondition(format!(
            "a {} pool has the room of the filesystem of {}: grow that",
            pool.kind(),
            data_dir.display()
        )));
    };
    if flag.is_some_and(|flag| flag < size)
        && let Some(marker) = read_marker(data_dir)?
    {
        // Before the image is larger than that: a start in between would refuse the flag.
        write_marker(data_dir, &Marker { outgrown: flag, ..marker })?;
    }
    image.grow(size)
}

/// A pool that has lost its image is not a new one.
fn check_image(data_dir: &Path, kind: PoolKind) -> Result<()> {
    let image = image::path(data_dir);
    if kind != PoolKind::Image || image.exists() {
        return Ok(());
    }
    Err(Error::Damaged(format!(
        "{} is missing: bring it back, or remove {MARKER} to begin with an empty pool",
        image.display()
    )))
}

/// A pool that has lost its marker is not a new one, and its kind is not guessed: what a snapshot cut
/// compares depends on it. (An image without a marker may be of a first start that was cut off.)
fn open_new(data_dir: &Path, choice: PoolChoice, image: &ImageChoice) -> Result<Opened> {
    let lost = || {
        Error::Damaged(format!(
            "{MARKER} is missing though {} holds a pool; write it again as docs/design/on-disk-format.md \
             says, with the kind that it had",
            data_dir.display()
        ))
    };
    if super::catalog_path(data_dir).exists() {
        return Err(lost());
    }
    let opened = match choice {
        PoolChoice::Kind(kind) => {
            let pool = open_new_kind(data_dir, kind, image)?;
            Opened { pool, reason: "asked for".to_owned() }
        }
        PoolChoice::Auto => first_that_works(data_dir, image)?,
    };
    let kind = opened.pool.kind();
    if kind != PoolKind::Image && image::path(data_dir).exists() {
        return Err(lost());
    }
    write_marker(data_dir, &Marker::new(kind, image))?;
    Ok(opened)
}

impl Marker {
    /// Of a new pool.
    fn new(kind: PoolKind, image: &ImageChoice) -> Self {
        let allocated = kind == PoolKind::Image && !image.sparse;
        Self { version: MARKER_VERSION, kind, allocated, outgrown: None }
    }
}

/// Opens a pool that has no marker yet, with an image if it needs one.
fn open_new_kind(data_dir: &Path, kind: PoolKind, image: &ImageChoice) -> Result<Box<dyn Pool>> {
    if kind == PoolKind::Image && !image::path(data_dir).exists() {
        image::make(data_dir, image)?;
    }
    open_kind(data_dir, &Marker::new(kind, image), Purpose::Serve)
}

fn open_kind(data_dir: &Path, marker: &Marker, purpose: Purpose) -> Result<Box<dyn Pool>> {
    Ok(match marker.kind {
        PoolKind::Reflink => Box::new(ReflinkPool::open(data_dir)?),
        PoolKind::Image => {
            Box::new(ReflinkPool::on_image(Image::open(data_dir, marker.allocated, purpose)?)?)
        }
        PoolKind::Copy => Box::new(CopyPool::open(data_dir)),
    })
}

fn first_that_works(data_dir: &Path, image: &ImageChoice) -> Result<Opened> {
    let mut reasons = Vec::new();
    for kind in [PoolKind::Reflink, PoolKind::Image] {
        match open_new_kind(data_dir, kind, image) {
            Ok(pool) => {
                reasons.push(format!("{kind} works here"));
                return Ok(Opened { pool, reason: reasons.join("; ") });
            }
            // Another kind is no answer to a size that cannot be had.
            Err(error @ (Error::Invalid { .. } | Error::Exhausted(_)))
                if kind == PoolKind::Image && image.size.is_some() =>
            {
                return Err(error);
            }
            Err(error) => {
                info!(pool = %kind, %error, "this kind of pool does not work here");
                reasons.push(format!("{kind}: {error}"));
            }
        }
    }
    reasons.push("copy always works".to_owned());
    Ok(Opened { pool: Box::new(CopyPool::open(data_dir)), reason: reasons.join("; ") })
}

fn read_marker(data_dir: &Path) -> Result<Option<Marker>> {
    let path = data_dir.join(MARKER);
    let json = match fs::read(&path) {
        Ok(json) => json,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(format!("reading {}", path.display()), e)),
    };
    let marker: Marker = serde_json::from_slice(&json)
        .map_err(|e| Error::Damaged(format!("{} is not readable: {e}", path.display())))?;
    if marker.version != MARKER_VERSION {
        return Err(Error::Damaged(format!(
            "{} has version {}, this program knows {MARKER_VERSION}",
            path.display(),
            marker.version
        )));
    }
    Ok(Some(marker))
}

/// A pool never changes its kind.
fn write_marker(data_dir: &Path, marker: &Marker) -> Result<()> {
    if read_marker(data_dir)?.as_ref() == Some(marker) {
        return Ok(());
    }
    let path = data_dir.join(MARKER);
    let temporary = data_dir.join("pool.json.part");
    let json =
        serde_json::to_vec(marker).map_err(|e| Error::Failed(format!("encoding {MARKER}: {e}")))?;
    let mut file = new_file(&temporary)?;
    let writing = || format!("writing {}", path.display());
    file.write_all(&json).and_then(|()| file.sync_all()).context(writing)?;
    reach("pool.marker_written")?;
    fs::rename(&temporary, &path).context(writing)?;
    reach("pool.marker_named")?;
    sync_directory(data_dir)
}

/// The directories of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Directory {
    Volumes,
    Snapshots,
    Records,
}

impl Directory {
    pub fn path(self, root: &Path) -> PathBuf {
        root.join(match self {
            Self::Volumes => "volumes",
            Self::Snapshots => "snapshots",
            Self::Records => "records",
        })
    }
}

/// A new, empty file that only root reads; what was there under this name is lost.
pub fn new_file(path: &Path) -> Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .context(|| format!("making {}", path.display()))?;
    reach("file.made").map(|()| file)
}

/// Makes the names in a directory durable.
pub fn sync_directory(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|directory| directory.sync_all())
        .context(|| format!("flushing {}", path.display()))?;
    reach("directory.flushed")
}

const IMMUTABLE: u32 = linux_raw_sys::general::FS_IMMUTABLE_FL;

/// Sets or clears the immutable flag, which keeps even root from writing, defragmenting or
/// exchanging the extents of a file. Filesystems without it are accepted as they are.
pub fn set_immutable(file: &File, on: bool) -> Result<()> {
    let change = sys::inode_flags(file).and_then(|flags| {
        let wanted = if on { flags | IMMUTABLE } else { flags & !IMMUTABLE };
        if wanted == flags { Ok(()) } else { sys::set_inode_flags(file, wanted) }
    });
    match change.as_ref().map_err(std::io::Error::raw_os_error) {
        Err(Some(libc::ENOTTY | libc::EOPNOTSUPP)) => Ok(()),
        _ => change.context(|| "setting the immutable flag".to_owned()),
    }?;
    reach("file.flag_set")
}

pub fn is_immutable(file: &File) -> Result<bool> {
    let flags = sys::inode_flags(file).context(|| "reading inode flags".to_owned())?;
    Ok(flags & IMMUTABLE != 0)
}

/// Removes a file, immutable or not, and makes that durable before its blocks can be written again:
/// else a power cut could bring it back with another file's data in it. OK when it is gone. The
/// filesystem frees the blocks in its own time.
pub fn remove(path: &Path) -> Result<()> {
    unlink(path).map(drop)
}

/// Like [`remove`], with the blocks free when this returns, however long that takes.
pub fn remove_and_free(path: &Path) -> Result<()> {
    match unlink(path)? {
        Some(file) => {
            // The name is gone for good by now, so nobody can meet the empty file.
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let emptied = File::options().write(true).open(path).and_then(|file| file.set_len(0));
            emptied.context(|| "freeing a removed file".to_owned())?;
            reach("file.emptied")
        }
        None => Ok(()),
    }
}

/// The removed file, still open: as long as it is, its blocks are not free.
fn unlink(path: &Path) -> Result<Option<File>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(format!("opening {}", path.display()), e)),
    };
    set_immutable(&file, false)?;
    fs::remove_file(path).context(|| format!("removing {}", path.display()))?;
    reach("file.removed")?;
    path.parent().map_or(Ok(()), sync_directory)?;
    Ok(Some(file))
}

/// Bytes in a block of the filesystem that `path` is on.
pub fn filesystem_block_size(path: &Path) -> Result<u64> {
    let stat = nix::sys::statvfs::statvfs(path)
        .context(|| format!("reading the block size of {}", path.display()))?;
    Ok(stat.fragment_size())
}

/// Room of the filesystem that `path` is on.
fn filesystem_room(path: &Path) -> Result<Room> {
    let stat = nix::sys::statvfs::statvfs(path)
        .context(|| format!("reading the room of {}", path.display()))?;
    let unit = stat.fragment_size();
    Ok(Room {
        total: unit.saturating_mul(stat.blocks()),
        available: unit.saturating_mul(stat.blocks_available()),
    })
}
