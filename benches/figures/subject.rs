//! What writers are measured on: block devices of the same size on the same disk, of pools with
//! different blocks and of their peers.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Result;
use support::ops::Device;
use tempfile::TempDir;

use crate::harness::{Driver, Layout};
use crate::host_path::{self, HostPath};
use crate::load::plain_loop;
use crate::stats::bytes;

/// The block sizes of measured pools. The first is the default of a new pool.
pub const BLOCK_SIZES: [u64; 2] = [4 << 10, 64 << 10];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A raw block volume of a pool with blocks of this size on an allocated image.
    Pool(u64),
    /// A loop device on a file of the filesystem that contains the images. It has no snapshots.
    Plain,
    HostPath,
}

pub const KINDS: [Kind; 4] =
    [Kind::Pool(BLOCK_SIZES[0]), Kind::Pool(BLOCK_SIZES[1]), Kind::Plain, Kind::HostPath];

impl Kind {
    pub fn name(self) -> String {
        match self {
            Self::Pool(block_size) => format!("blocks of {}", bytes(block_size)),
            Self::Plain => "plain loop device".to_owned(),
            Self::HostPath => "host-path".to_owned(),
        }
    }

    /// A new device of `size` bytes; `pool`: bytes of its pool. `None`: the peer is not available.
    pub fn open(self, size: u64, pool: u64) -> Result<Option<Subject>> {
        println!("    -- {}, {}", bytes(size), self.name());
        let (owner, device) = match self {
            Self::Pool(block_size) => {
                let driver =
                    Driver::start_on(Layout { bytes: pool, block_size, is_allocated: true })?;
                let volume = driver.volume("writers", size)?;
                let device = driver.publish(&volume)?;
                (Owner::Pool(driver, volume), device)
            }
            Self::Plain => {
                let directory = TempDir::with_prefix("figures-")?;
                let file = directory.path().join("plain");
                File::create_new(&file)?.set_len(size)?;
                let device = plain_loop(&file);
                let path = device.path().into();
                (Owner::Plain { _device: device, _directory: directory }, path)
            }
            Self::HostPath => match HostPath::start(5 * size) {
                Ok(driver) => {
                    let volume = driver.volume("writers", size)?;
                    let device = driver.device(&volume)?;
                    (Owner::HostPath(driver, volume.id), device)
                }
                Err(reason) => {
                    println!("    {}", host_path::missing(&reason));
                    return Ok(None);
                }
            },
        };
        Ok(Some(Subject { owner, device }))
    }
}

pub struct Subject {
    owner: Owner,
    device: PathBuf,
}

/// Dropping it removes the device and its file.
enum Owner {
    Pool(Driver, String),
    Plain { _device: Device, _directory: TempDir },
    HostPath(HostPath, String),
}

impl Subject {
    pub fn device(&self) -> &Path {
        &self.device
    }

    /// The backing file of a volume of the driver.
    pub fn volume(&self) -> Option<PathBuf> {
        match &self.owner {
            Owner::Pool(driver, volume) => Some(driver.pool.volume(volume)),
            _ => None,
        }
    }

    pub fn has_snapshots(&self) -> bool {
        !matches!(self.owner, Owner::Plain { .. })
    }

    /// Does nothing if there are no snapshots.
    pub fn snapshot(&self, name: &str) -> Result<()> {
        match &self.owner {
            Owner::Pool(driver, volume) => driver.snapshot(name, volume).map(drop),
            Owner::Plain { .. } => Ok(()),
            Owner::HostPath(driver, volume) => driver.snapshot(name, volume).map(drop),
        }
    }
}
