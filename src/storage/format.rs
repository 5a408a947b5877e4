//! The filesystem on a volume, inline or not: creates it if the volume is empty, never over data.

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

/// A row of a volume that may have a filesystem.
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

/// Ensures that a volume has a filesystem of type `requested` (or any), and returns its type.
pub fn ensure(
    store: &Store,
    volume: &mut Volume,
    backing: &File,
    device: &LoopDevice,
    requested: Option<FsType>,
) -> Result<FsType> {
    let present = match volume.format {
        Some(Format { unfinished: true, .. }) => None,
        Some(format) => Some(format.fs_type),
        None => detect(store, volume, backing, device)?,
    };
    let fs_type = requested.or(present).or(volume.request.fs_type).unwrap_or(FsType::Ext4);
    match present {
        Some(present) if present == fs_type => Ok(fs_type),
        Some(present) => Err(Error::Precondition(format!(
            "fs_type: {:?} contains {present}, not {fs_type}",
            volume.id
        ))),
        None => make(store, volume, device, fs_type).map(|()| fs_type),
    }
}

/// Detects the filesystem of a volume that has no recorded format: it comes from its source, or was
/// written through the raw device.
fn detect(
    store: &Store,
    volume: &mut Volume,
    backing: &File,
    device: &LoopDevice,
) -> Result<Option<FsType>> {
    let found = filesystem::detect(&device.open(false)?)?;
    match found {
        // Its size is unknown.
        Some(fs_type) => {
            record(store, volume, Format { fs_type, size_bytes: 0, unfinished: false })?
        }
        None if holds_data(backing)? => {
            return Err(Error::Precondition(format!(
                "volume_capability: {:?} contains data but no supported filesystem; use it as a \
                 raw block volume",
                volume.id
            )));
        }
        None => {}
    }
    Ok(found)
}

/// Creates a filesystem of this type. The caller knows that the blocks contain no data.
pub fn make<R: Formatted>(
    store: &Store,
    row: &mut R,
    device: &LoopDevice,
    fs_type: FsType,
) -> Result<()> {
    let size_bytes = row.capacity_bytes();
    record(store, row, Format { fs_type, size_bytes, unfinished: true })?;
    filesystem::make(fs_type, device.path(), size_bytes)?;
    reach("format.made")?;
    device.flush()?;
    reach("format.flushed")?;
    record(store, row, Format { fs_type, size_bytes, unfinished: false })
}

/// Records the format in the row.
pub fn record<R: Formatted>(store: &Store, row: &mut R, format: Format) -> Result<()> {
    *row.format() = Some(format);
    store.catalog.write(|tx| tx.put(&*row))
}

fn holds_data(backing: &File) -> Result<bool> {
    match lseek(backing, 0, Whence::SeekData) {
        Ok(_) => Ok(true),
        Err(nix::Error::ENXIO) => Ok(false),
        Err(e) => Err(Error::io("searching for data", io::Error::from(e))),
    }
}

/// Clears the recorded format: a user of the raw device may write anything.
pub fn forget(store: &Store, volume: &mut Volume) -> Result<()> {
    if volume.format.is_none() {
        return Ok(());
    }
    volume.format = None;
    volume.growth_failure = None;
    store.catalog.write(|tx| tx.put(&*volume))
}
