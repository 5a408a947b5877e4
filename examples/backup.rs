//! A full and an incremental backup of a volume to an image file, with the library and without a
//! repository:
//!
//!     cargo run --example backup -- SOCKET DEVICE IMAGE SNAPSHOT [BASE]
//!
//! SOCKET is the driver's, DEVICE a volume that was made from SNAPSHOT and published as a raw block
//! device. Without BASE the image gets all data of the snapshot; with BASE, the id of the snapshot
//! that the image holds, what changed since. Run again after an interruption, it continues.

use std::fs::{self, File};
use std::io::{ErrorKind, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use csi_loopback::backup::listing::{BaseUnusable, Listing, Query};
use csi_loopback::backup::target::Target;

/// Copies this many bytes between two notes of the progress.
const STEP: u64 = 64 << 20;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let outcome = runtime.context("start the runtime").and_then(|runtime| {
        let [socket, device, image, snapshot, base @ ..] = arguments.as_slice() else {
            bail!("usage: backup SOCKET DEVICE IMAGE SNAPSHOT [BASE]");
        };
        let query = match base {
            [] => Query::Allocated { snapshot: snapshot.clone() },
            [base, ..] => Query::Delta { base: base.clone(), target: snapshot.clone() },
        };
        runtime.block_on(backup(socket, Path::new(device), Path::new(image), query))
    });
    match outcome {
        Ok(copied) => {
            println!("copied {copied} bytes");
            ExitCode::SUCCESS
        }
        Err(error) if error.is::<BaseUnusable>() => {
            eprintln!("backup: {error:#}; run again without BASE, with a new image");
            ExitCode::from(2)
        }
        Err(error) => {
            eprintln!("backup: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Brings the image to the state of the snapshot. Returns how many bytes were copied.
async fn backup(socket: &str, device: &Path, image: &Path, query: Query) -> Result<u64> {
    let endpoint = socket.parse().map_err(|error| anyhow::anyhow!("SOCKET: {error}"))?;
    let journal = Journal::of(image);
    let begin = journal.read()?;
    let source = File::open(device).with_context(|| format!("open {}", device.display()))?;

    // The listing survives interruptions of the stream; after one of this process it starts at
    // `begin`.
    let mut listing = Listing::connect(&endpoint, query, begin).await?;
    let mut target = None;
    let (mut copied, mut noted) = (0, begin);
    while let Some(extents) = listing.next().await? {
        if target.is_none() {
            let capacity = listing.capacity().context("the driver reports no capacity")?;
            target = Some(Target::open(image, capacity)?);
        }
        let Some(target) = &target else { continue };
        for extent in extents {
            target.copy_from(&source, extent)?;
            copied += extent.length;
            if extent.end() >= noted + STEP {
                // First the data, then the note: what is noted must be there.
                target.sync()?;
                journal.write(extent.end())?;
                noted = extent.end();
            }
        }
    }
    // Only here is the listing complete: an earlier end is an error. A listing without messages is
    // empty, and the device has the size of an image that does not exist yet.
    if target.is_none() && !image.exists() {
        let size = (&source).seek(SeekFrom::End(0));
        target = Some(Target::open(image, size.with_context(|| format!("{}", device.display()))?)?);
    }
    if let Some(target) = target {
        target.sync()?;
    }
    journal.remove()?;
    Ok(copied)
}

/// Up to which byte of the volume the image was written.
struct Journal(PathBuf);

impl Journal {
    fn of(image: &Path) -> Self {
        Self(image.with_extension("progress"))
    }

    fn read(&self) -> Result<u64> {
        match fs::read_to_string(&self.0) {
            Ok(text) => text.trim().parse().with_context(|| format!("{}", self.0.display())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error).with_context(|| format!("read {}", self.0.display())),
        }
    }

    fn write(&self, end: u64) -> Result<()> {
        let new = self.0.with_extension("progress-new");
        fs::write(&new, end.to_string())?;
        fs::rename(&new, &self.0).with_context(|| format!("write {}", self.0.display()))
    }

    fn remove(&self) -> Result<()> {
        match fs::remove_file(&self.0) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }
}
