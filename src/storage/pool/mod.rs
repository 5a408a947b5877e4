//! The pool: the storage of backing files and their copies. The trait [`Pool`] (clone, compare,
//! space) separates the kinds of pools from the rest of the backend. The files of a pool are named
//! by id:
//!
//! ```text
//! catalog.redb   volumes/<volume>[.growing]   snapshots/<snapshot>[.next]
//! records/<snapshot>.<generation>
//! ```

mod copy;
mod exact;
mod files;
mod host_filesystem;
mod image;
mod reflink;

use std::fmt;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::error::{Context, Error, Result};
use super::extents::Finding;
use super::fail_point::reach;
use super::model::{Capacity, Condition, Precision};
use super::units::BLOCK_SIZE;

pub use copy::CopyPool;
pub use files::{
    check_length, has_users, is_immutable, largest_file, new_file, open as open_file, remove,
    remove_and_free, set_immutable, sync_directory,
};
use image::Purpose;
pub use image::{Image, MAX_BLOCK_SIZE};
pub use reflink::ReflinkPool;

/// The end of the names of clones made ahead.
pub const CLONE_AHEAD_SUFFIX: &str = ".next";

/// The end of the names of copies in which a filesystem grows.
pub const GROWING_SUFFIX: &str = ".growing";

const MARKER: &str = "pool.json";
const MARKER_VERSION: u32 = 1;

/// The value of `--pool`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolChoice {
    /// The kind of the existing pool, or else the first of reflink and image that works here. A
    /// copy pool is never chosen: its snapshots cost time and space for all data.
    Auto,
    Kind(PoolKind),
}

/// The kinds of pools, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PoolKind {
    /// The data directory is on an XFS with reflink.
    Reflink,
    /// An XFS with reflink in an image file in the data directory, mounted detached.
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
                    format!("{name:?} is not supported; use auto, reflink, image or copy"),
                ));
            }
        })
    }
}

/// The requested parameters of a pool image.
#[derive(Debug, Clone, Copy, Default)]
pub struct ImageChoice {
    /// Size in bytes. The default depends on the space of the data directory. A smaller image
    /// grows; a larger one is refused.
    pub size: Option<u64>,
    /// Whether a new image is sparse.
    pub sparse: bool,
    /// Block size of a new image's filesystem, in bytes.
    pub block_size: Option<u64>,
}

/// Total and available space of a pool, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub total: u64,
    pub available: u64,
}

/// The status of an open pool.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolStatus {
    pub kind: PoolKind,
    /// The reason for the kind of the pool.
    pub reason: String,
    pub room: Room,
    /// Block size of its filesystem, in bytes.
    pub block_size: u64,
    /// `None` except for an image pool.
    pub image: Option<ImageStatus>,
    pub capacity: Capacity,
    /// The factor by which volumes together may exceed the pool.
    pub overcommit: f64,
    /// What is wrong with all volumes of the pool, if anything.
    pub condition: Condition,
}

/// The status of a pool image. Sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageStatus {
    pub size: u64,
    /// Whether every block of it is allocated on its filesystem, and its own.
    pub allocated: bool,
    /// What of it is in blocks that another file shares, if it should be allocated.
    pub shared: u64,
    /// Space available on the filesystem that contains the image.
    pub available_below: u64,
}

/// The interface of a pool.
pub trait Pool: fmt::Debug + Send + Sync {
    fn kind(&self) -> PoolKind;

    /// The directory of the files.
    fn root(&self) -> &Path;

    fn room(&self) -> Result<Room>;

    /// The image of an image pool.
    fn image(&self) -> Option<&Image> {
        None
    }

    /// Marks a new file so that no tool moves its blocks.
    fn adopt(&self, file: &File) -> Result<()>;

    /// The part of a clone that is done while `source` is written to. It makes [`Pool::clone`]
    /// shorter. `target` is at least as large as `source`. After each step, `after_step` decides
    /// whether to continue.
    fn pre_clone(
        &self,
        source: &File,
        target: &File,
        after_step: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        self.clone(source, target, after_step)
    }

    /// Makes `target` equal to `source`. The caller has stopped the writers of `source`, unless the
    /// clone is atomic ([`Pool::clones_atomically`]). If it is not, `after_step` decides after each
    /// step whether to continue.
    fn clone(
        &self,
        source: &File,
        target: &File,
        after_step: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()>;

    /// Whether [`Pool::clone`] is a point-in-time copy even with concurrent writes.
    fn clones_atomically(&self) -> bool;

    /// Reports each range of `new` that is allocated or differs from `old` (from zeros if `None`),
    /// in ascending order. Both files are immutable; sizes are in bytes.
    fn compare(
        &self,
        old: Option<(&File, u64)>,
        new: (&File, u64),
        precision: Precision,
        report: &mut dyn FnMut(Finding) -> Result<()>,
    ) -> Result<()>;
}

/// The files of a pool.
impl dyn Pool + '_ {
    pub fn volume_path(&self, id: &str) -> PathBuf {
        Directory::Volumes.path(self.root()).join(id)
    }

    /// The copy of a volume in which its filesystem grows.
    pub fn growing_path(&self, id: &str) -> PathBuf {
        self.volume_path(&format!("{id}{GROWING_SUFFIX}"))
    }

    pub fn snapshot_path(&self, id: &str) -> PathBuf {
        Directory::Snapshots.path(self.root()).join(id)
    }

    /// The clone made ahead from a snapshot for the next one.
    pub fn clone_ahead_path(&self, snapshot_id: &str) -> PathBuf {
        self.snapshot_path(&format!("{snapshot_id}{CLONE_AHEAD_SUFFIX}"))
    }

    /// Copies an immutable file of `bytes` bytes to a new one, in steps. After each step,
    /// `after_step` decides whether to continue.
    pub fn copy(
        &self,
        source: &File,
        target: &File,
        bytes: u64,
        after_step: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        target.set_len(bytes).context(|| "sizing the target of a copy".to_owned())?;
        reach("copy.sized")?;
        if self.clones_atomically() {
            self.pre_clone(source, target, after_step)?;
        }
        self.clone(source, target, after_step)?;
        // A clone of a truncated file succeeds.
        check_length(source, "the source of a copy", bytes)
    }

    /// Prepares the target of a clone of `bytes` bytes.
    pub fn prepare_target(&self, target: &File, bytes: u64) -> Result<()> {
        self.adopt(target)?;
        target.set_len(bytes).context(|| "sizing the target of a clone".to_owned())?;
        reach("snapshot.sized")
    }

    pub fn record_path(&self, id: &str, generation: u64) -> PathBuf {
        Directory::Records.path(self.root()).join(format!("{id}.{generation}"))
    }
}

/// An open pool and the reason for its kind.
#[derive(Debug)]
pub struct OpenPool {
    pub pool: Box<dyn Pool>,
    pub reason: String,
}

/// Whether a directory is the data directory of a driver.
pub fn is_marked(data_dir: &Path) -> bool {
    data_dir.join(MARKER).exists()
}

/// The contents of `pool.json`. Unused fields are omitted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Marker {
    version: u32,
    kind: PoolKind,
    /// Whether the image of an image pool should be allocated. Images from before this field are
    /// sparse.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    allocated: bool,
    /// The value of `--pool-size` when [`grow`] made the image larger than it. A start with that
    /// value changes nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    outgrown: Option<u64>,
}

/// Opens or creates the pool of a data directory.
pub fn open(data_dir: &Path, choice: PoolChoice, image: &ImageChoice) -> Result<OpenPool> {
    let opened = match (read_marker(data_dir)?, choice) {
        (Some(Marker { kind, .. }), PoolChoice::Kind(requested)) if kind != requested => {
            return Err(Error::Precondition(format!(
                "--pool {requested}: {} already contains a pool of kind {kind}; use that kind or \
                 another --data-dir",
                data_dir.display()
            )));
        }
        (Some(marker), _) => {
            check_image(data_dir, marker.kind)?;
            let pool = open_kind(data_dir, &marker, Purpose::Serve)?;
            if let Some(opened) = pool.image() {
                apply(image, opened, &marker)?;
            }
            OpenPool { pool, reason: "the data directory already contains it".to_owned() }
        }
        (None, choice) => open_new(data_dir, choice, image)?,
    };
    for directory in [Directory::Volumes, Directory::Snapshots, Directory::Records] {
        let path = directory.path(opened.pool.root());
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&path);
        made.context(|| format!("creating {}", path.display()))?;
        reach("pool.directory_made")?;
    }
    sync_directory(opened.pool.root())?;
    Ok(opened)
}

/// Opens an existing pool.
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

/// Applies the requested parameters to an existing image.
fn apply(requested: &ImageChoice, image: &Image, marker: &Marker) -> Result<()> {
    if requested.sparse && marker.allocated {
        warn!("--pool-sparse has no effect: the image of this pool is allocated");
    }
    if let Some(requested) = requested.block_size
        && let actual = filesystem_block_size(&image.root())?
        && requested != actual
    {
        warn!("--pool-block-size has no effect: this pool has blocks of {actual} bytes");
    }
    let (Some(size), old) = (requested.size, image.size()?) else { return Ok(()) };
    if size >= old {
        return image.grow(size);
    }
    if marker.outgrown == Some(size) || size.next_multiple_of(BLOCK_SIZE) == old {
        return Ok(());
    }
    Err(Error::Precondition(format!(
        "--pool-size: the image of this pool has {old} bytes and cannot shrink to {size}; request at \
         least {old}, or omit the flag"
    )))
}

/// Grows the image of an image pool to `size` bytes. `flag` is the current `--pool-size`.
pub fn grow(data_dir: &Path, pool: &dyn Pool, flag: Option<u64>, size: u64) -> Result<()> {
    let Some(image) = pool.image() else {
        return Err(Error::Precondition(format!(
            "a {} pool uses the space of the filesystem of {}: grow that filesystem",
            pool.kind(),
            data_dir.display()
        )));
    };
    if flag.is_some_and(|flag| flag < size)
        && let Some(marker) = read_marker(data_dir)?
    {
        // Before the growth: otherwise a start after a crash would refuse the flag.
        write_marker(data_dir, &Marker { outgrown: flag, ..marker })?;
    }
    image.grow(size)
}

/// A pool without its image is damaged, not new.
fn check_image(data_dir: &Path, kind: PoolKind) -> Result<()> {
    let image = image::path(data_dir);
    if kind != PoolKind::Image || image.exists() {
        return Ok(());
    }
    Err(Error::Damaged(format!(
        "{} is missing; restore it, or remove {MARKER} to create an empty pool",
        image.display()
    )))
}

/// Creates a pool. A pool without its marker is damaged, not new, and its kind is not guessed: the
/// comparison of snapshots depends on it. (An image without a marker may be from an interrupted
/// first start.)
fn open_new(data_dir: &Path, choice: PoolChoice, image: &ImageChoice) -> Result<OpenPool> {
    let missing_marker = || {
        Error::Damaged(format!(
            "{MARKER} is missing but {} contains a pool; restore it with the previous kind (see \
             docs/design/on-disk-format.md)",
            data_dir.display()
        ))
    };
    if super::catalog_path(data_dir).exists() {
        return Err(missing_marker());
    }
    let opened = match choice {
        PoolChoice::Kind(kind) => {
            let pool = open_new_kind(data_dir, kind, image)?;
            OpenPool { pool, reason: "requested by --pool".to_owned() }
        }
        PoolChoice::Auto => open_first_supported(data_dir, image)?,
    };
    let kind = opened.pool.kind();
    if kind != PoolKind::Image && image::path(data_dir).exists() {
        return Err(missing_marker());
    }
    write_marker(data_dir, &Marker::new(kind, image))?;
    Ok(opened)
}

impl Marker {
    /// The marker of a new pool.
    fn new(kind: PoolKind, image: &ImageChoice) -> Self {
        let allocated = kind == PoolKind::Image && !image.sparse;
        Self { version: MARKER_VERSION, kind, allocated, outgrown: None }
    }
}

/// Opens a pool without a marker, and creates its image if needed.
fn open_new_kind(data_dir: &Path, kind: PoolKind, image: &ImageChoice) -> Result<Box<dyn Pool>> {
    if kind == PoolKind::Image && !image::path(data_dir).exists() {
        image::make(data_dir, image)?;
    }
    open_kind(data_dir, &Marker::new(kind, image), Purpose::Serve)
}

fn open_kind(data_dir: &Path, marker: &Marker, purpose: Purpose) -> Result<Box<dyn Pool>> {
    Ok(match marker.kind {
        PoolKind::Reflink => Box::new(ReflinkPool::open(data_dir.to_owned(), None)?),
        PoolKind::Image => {
            let image = Image::open(data_dir, marker.allocated, purpose)?;
            Box::new(ReflinkPool::open(image.root(), Some(image))?)
        }
        PoolKind::Copy => Box::new(CopyPool::open(data_dir)),
    })
}

fn open_first_supported(data_dir: &Path, image: &ImageChoice) -> Result<OpenPool> {
    let mut reasons = Vec::new();
    for kind in [PoolKind::Reflink, PoolKind::Image] {
        match open_new_kind(data_dir, kind, image) {
            Ok(pool) => {
                reasons.push(format!("{kind} works here"));
                return Ok(OpenPool { pool, reason: reasons.join("; ") });
            }
            // Another kind cannot satisfy an explicit size.
            Err(error @ (Error::Invalid { .. } | Error::Exhausted(_)))
                if kind == PoolKind::Image && image.size.is_some() =>
            {
                return Err(error);
            }
            Err(error) => {
                info!(pool = %kind, %error, "this kind of pool is not supported here");
                reasons.push(format!("{kind}: {error}"));
            }
        }
    }
    Err(Error::Precondition(format!(
        "--pool auto: no kind of pool that clones works in {} ({}); make one of them work, or choose \
         --pool copy, where each snapshot copies the whole volume",
        data_dir.display(),
        reasons.join("; ")
    )))
}

fn read_marker(data_dir: &Path) -> Result<Option<Marker>> {
    let path = data_dir.join(MARKER);
    let json = match fs::read(&path) {
        Ok(json) => json,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(format!("reading {}", path.display()), e)),
    };
    let marker: Marker = serde_json::from_slice(&json)
        .map_err(|e| Error::Damaged(format!("failed to parse {}: {e}", path.display())))?;
    if marker.version != MARKER_VERSION {
        return Err(Error::Damaged(format!(
            "{} has version {}, but this version of csi-loopback supports only {MARKER_VERSION}",
            path.display(),
            marker.version
        )));
    }
    Ok(Some(marker))
}

/// Writes the marker atomically, if it differs.
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

/// The block size of the filesystem of `path`, in bytes.
pub fn filesystem_block_size(path: &Path) -> Result<u64> {
    let stat = nix::sys::statvfs::statvfs(path)
        .context(|| format!("reading the block size of {}", path.display()))?;
    Ok(stat.fragment_size())
}

/// The space of the filesystem of `path`.
fn filesystem_room(path: &Path) -> Result<Room> {
    let stat = nix::sys::statvfs::statvfs(path)
        .context(|| format!("reading the free space of {}", path.display()))?;
    let unit = stat.fragment_size();
    Ok(Room {
        total: unit.saturating_mul(stat.blocks()),
        available: unit.saturating_mul(stat.blocks_available()),
    })
}
