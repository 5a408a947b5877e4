//! The filesystem on a volume, inline or not: making it where there is none, never over data, and growing it
//! after its volume.

use std::fs::File;
use std::io;

use nix::unistd::{Whence, lseek};

use super::catalog::Row;
use super::error::{Error, Result};
use super::fail_point::reach;
use super::filesystem;
use super::loop_device::LoopDevice;
use super::model::{Format, FsType, Inline, Volume};
use super::store::Store;

/// A row whose blocks may carry a filesystem.
pub trait Formatted: Row {
    fn capacity_bytes(&self) -> u64;
    fn format(&mut self) -> &mut Option<Format>;
}

impl Formatted for Volume {
    fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    fn format(&mut self) -> &mut Option<Format> {
        &mut self.format
    }
}

impl Formatted for Inline {
    fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    fn format(&mut self) -> &mut Option<Format> {
        &mut self.format
    }
}

/// Makes sure that a volume to be mounted holds the filesystem that is `wanted` (or any), and says
/// which it is.
pub fn ensure(
    store: &Store,
    volume: &mut Volume,
    backing: &File,
    device: &LoopDevice,
    wanted: Option<FsType>,
) -> Result<FsType> {
    let present = match volume.format {
        Some(Format { unfinished: true, .. }) => None,
        Some(format) => Some(format.fs_type),
        None => recognise(store, volume, backing, device)?,
    };
    let fs_type = wanted.or(present).or(volume.request.fs_type).unwrap_or(FsType::Ext4);
    match present {
        Some(present) if present == fs_type => Ok(fs_type),
        Some(present) => Err(Error::Precondition(format!(
            "fs_type: {:?} holds {present}, not {fs_type}",
            volume.id
        ))),
        None => make(store, volume, device, fs_type).map(|()| fs_type),
    }
}

/// What is on a volume that was not formatted here: by its source, or through the raw device.
fn recognise(
    store: &Store,
    volume: &mut Volume,
    backing: &File,
    device: &LoopDevice,
) -> Result<Option<FsType>> {
    let found = filesystem::recognise(&device.open(false)?)?;
    match found {
        // How far it has grown is not known.
        Some(fs_type) => note(store, volume, Format { fs_type, size_bytes: 0, unfinished: false })?,
        None if holds_data(backing)? => {
            return Err(Error::Precondition(format!(
                "volume_capability: {:?} holds data that is no filesystem known here; use it as a \
                 block volume",
                volume.id
            )));
        }
        None => {}
    }
    Ok(found)
}

/// Makes a filesystem of this type. What is on the blocks is nobody's data.
pub fn make<R: Formatted>(
    store: &Store,
    row: &mut R,
    device: &LoopDevice,
    fs_type: FsType,
) -> Result<()> {
    let size_bytes = row.capacity_bytes();
    note(store, row, Format { fs_type, size_bytes, unfinished: true })?;
    filesystem::make(fs_type, device.path())?;
    reach("format.made")?;
    device.flush()?;
    reach("format.flushed")?;
    note(store, row, Format { fs_type, size_bytes, unfinished: false })
}

/// Writes down what is on the blocks.
pub fn note<R: Formatted>(store: &Store, row: &mut R, format: Format) -> Result<()> {
    *row.format() = Some(format);
    store.catalog.write(|tx| tx.put(&*row))
}

fn holds_data(backing: &File) -> Result<bool> {
    match lseek(backing, 0, Whence::SeekData) {
        Ok(_) => Ok(true),
        Err(nix::Error::ENXIO) => Ok(false),
        Err(e) => Err(Error::io("looking for data", io::Error::from(e))),
    }
}

/// Forgets what is known of a volume's content: whoever has the raw device may write anything.
pub fn forget(store: &Store, volume: &mut Volume) -> Result<()> {
    if volume.format.is_none() {
        return Ok(());
    }
    volume.format = None;
    store.catalog.write(|tx| tx.put(&*volume))
}

/// The filesystem of a volume that is smaller than the volume, and need not be.
fn to_grow<R: Formatted>(row: &mut R) -> Option<Format> {
    let capacity_bytes = row.capacity_bytes();
    row.format().filter(|format| {
        format.size_bytes < capacity_bytes && filesystem::grows_to(format.fs_type, capacity_bytes)
    })
}

/// Before the mount: grows what this process may not grow once it is mounted.
pub fn grow_unmounted<R: Formatted>(store: &Store, row: &mut R, device: &LoopDevice) -> Result<()> {
    let Some(format) = to_grow(row).filter(|format| !filesystem::grows_online(format.fs_type))
    else {
        return Ok(());
    };
    filesystem::grow_unmounted(format.fs_type, device.path())?;
    grown(store, row, format)
}

/// Grows a filesystem that nobody has mounted to the volume's capacity, where it has not been done, with nobody seeing it.
pub fn grow_unseen<R: Formatted>(store: &Store, row: &mut R, device: &LoopDevice) -> Result<()> {
    let Some(format) = to_grow(row) else { return Ok(()) };
    match format.fs_type {
        FsType::Ext4 => filesystem::grow_unmounted(FsType::Ext4, device.path())?,
        fs_type => {
            let root = filesystem::mount_unseen(device, fs_type)?;
            filesystem::grow_unseen(&root, fs_type, device.size()?)?;
        }
    }
    grown(store, row, format)
}

/// Has somebody else, who has the filesystem mounted, grow it to the volume's capacity, where it has not been done.
pub fn grow_by<R: Formatted>(
    store: &Store,
    row: &mut R,
    grow: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let Some(format) = to_grow(row) else { return Ok(()) };
    grow()?;
    grown(store, row, format)
}

/// Grows the mounted filesystem to the volume's capacity, where it has not been done.
pub fn grow<R: Formatted>(
    store: &Store,
    row: &mut R,
    device: &LoopDevice,
    mounted_at: &std::path::Path,
) -> Result<()> {
    let Some(format) = to_grow(row) else { return Ok(()) };
    let fs_type = format.fs_type;
    if !filesystem::grows_online(fs_type) {
        return Err(Error::Precondition(format!(
            "volume_path: growing a mounted {fs_type} needs CAP_SYS_RESOURCE, which this process \
             lacks; grant it, or unstage and stage the volume, which grows it too"
        )));
    }
    filesystem::grow(fs_type, device.path(), mounted_at)?;
    grown(store, row, format)
}

fn grown<R: Formatted>(store: &Store, row: &mut R, format: Format) -> Result<()> {
    reach("format.grown")?;
    let size_bytes = row.capacity_bytes();
    note(store, row, Format { size_bytes, ..format })
}
