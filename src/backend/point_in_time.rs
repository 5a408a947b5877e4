//! Copies of volumes as they were at one moment, while pods write to them.
//!
//! Volumes that nobody writes to are cloned first. Of the others as much as possible is cloned while
//! they run. Then mounted filesystems are frozen, what is in flight reaches the backing files, and the
//! rest is cloned; the freeze lasts as long as that and no longer. A raw block volume cannot be frozen:
//! one may take part, and it is cloned while the others stand still, so that there is one moment that
//! holds for all.

use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use tracing::warn;

use super::error::{Context, Error, Result};
use super::fail_point::reach;
use super::filesystem::{self, Frozen};
use super::loop_device::LoopDevice;
use super::model::{Access, Attachment, Mounted, Volume};
use super::store::{Store, now};
use super::writeback;

/// The longest freeze where a clone is one call.
const CLONE_DEADLINE: Duration = Duration::from_secs(30);

/// The longest freeze where data is copied.
const COPY_DEADLINE: Duration = Duration::from_secs(300);

/// How often a copy of a raw block volume is tried to fit between its writes.
const QUIET_ATTEMPTS: usize = 10;

/// A volume and the file that becomes its copy. The caller holds the volume's lock.
pub struct Copy<'a> {
    pub volume: &'a Volume,
    pub source: &'a File,
    pub target: &'a File,
}

/// Where the time of the copies went, each step for all volumes together.
#[derive(Debug, Default, Clone, Copy)]
pub struct Durations {
    /// What was cloned while the volumes ran.
    pub pre_clone: Duration,
    /// From the first filesystem that stood still to the last that ran again (with a raw volume
    /// that is written to and none that stands still: as long as the next two take; 0 where nobody writes).
    pub frozen: Duration,
    /// What was in flight reached the backing files.
    pub settle: Duration,
    /// The rest was cloned.
    pub clone: Duration,
}

/// Runs a step and adds what it took to `to`.
pub fn timed<T>(to: &mut Duration, step: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = step();
    *to += begun.elapsed();
    result
}

/// What was copied.
pub struct Copied {
    /// Seconds and nanoseconds since the epoch.
    pub moment: (u64, u32),
    pub took: Durations,
    /// Of each copy, in their order, whether its filesystem should have been frozen and could not be.
    pub crash_consistent: Vec<bool>,
}

/// What has to be stopped for a copy to be consistent.
enum Writers {
    /// Nobody writes, and nobody could.
    None,
    /// Nobody has the filesystem on this device, or writes to it raw, and nobody gets it now.
    Idle(LoopDevice),
    /// The filesystem on this device, opened where it is mounted.
    Filesystem(File, LoopDevice),
    /// Whoever has the raw device.
    Raw(LoopDevice),
    /// Whoever a container runtime has given the device to, if anybody: a virtual machine leaves no trace here. (That the
    /// filesystem looks clean, or unclaimed, proves nothing: it may be mounted while it is copied.)
    Unknown(LoopDevice),
}

/// Makes every target equal to its source at one moment. On an error the targets hold nothing of use.
pub fn copy_all(store: &Store, copies: &[Copy<'_>]) -> Result<Copied> {
    let mut took = Durations::default();
    let mut members = Vec::with_capacity(copies.len());
    for copy in copies {
        members.push((copy, writers(store, copy)?));
    }
    let crash_consistent = members.iter().map(|(copy, writers)| writers.is_unknown(copy)).collect();
    let raw = members.iter().filter(|(_, writers)| writers.is_running()).count();
    if raw > 1 {
        return Err(Error::Precondition(format!(
            "source_volume_ids: {raw} volumes cannot be frozen, being raw block volumes that are published writable or \
             filesystems that a container runtime may have in a virtual machine, so no moment would hold for more than \
             one: unpublish the others first"
        )));
    }
    // The one that runs on first: while it is cloned the others are frozen already.
    members.sort_by_key(|(_, writers)| !writers.is_running());
    let pool = store.pool.as_ref();
    let (written, still): (Vec<_>, Vec<_>) =
        members.into_iter().partition(|(_, writers)| writers.may_write());
    // Their locks keep them as they are. One clone of the whole, and nobody waits for it.
    for (copy, writers) in &still {
        clone_one(store, copy, writers, &mut took)?;
        reach("copy.made")?;
    }
    for (copy, _) in &written {
        timed(&mut took.pre_clone, || pool.pre_clone(copy.source, copy.target))?;
        reach("copy.begun")?;
    }
    // What there is to write is written before anybody stands still.
    for (copy, writers) in &written {
        if let Some(mounted) = writers.mounted() {
            writeback::sync_filesystem(store, &copy.volume.id, mounted)?;
            reach("copy.synced")?;
        }
    }
    let deadline = if pool.clones_atomically() { CLONE_DEADLINE } else { COPY_DEADLINE };
    let mounted: io::Result<Vec<File>> =
        written.iter().filter_map(|(_, w)| w.mounted()).map(File::try_clone).collect();
    let mounted = mounted.context(|| "opening filesystems to freeze".to_owned())?;
    let frozen = Frozen::freeze(&store.freeze_guard, mounted, deadline)?;
    let moment = now();
    for (copy, writers) in &written {
        clone_one(store, copy, writers, &mut took)?;
        reach("copy.made")?;
    }
    took.frozen = frozen.thaw()?;
    Ok(Copied { moment, took, crash_consistent })
}

impl Writers {
    fn mounted(&self) -> Option<&File> {
        match self {
            Self::Filesystem(mounted, _) => Some(mounted),
            Self::None | Self::Idle(_) | Self::Raw(_) | Self::Unknown(_) => None,
        }
    }

    fn device(&self) -> Option<&LoopDevice> {
        match self {
            Self::None => None,
            Self::Idle(device)
            | Self::Filesystem(_, device)
            | Self::Raw(device)
            | Self::Unknown(device) => Some(device),
        }
    }

    /// Whether somebody may write until a freeze.
    fn may_write(&self) -> bool {
        !matches!(self, Self::None | Self::Idle(_))
    }

    /// Whether somebody may go on writing during a freeze.
    fn is_running(&self) -> bool {
        matches!(self, Self::Raw(_) | Self::Unknown(_))
    }

    fn is_unknown(&self, copy: &Copy<'_>) -> bool {
        let is_unknown = matches!(self, Self::Unknown(_));
        if is_unknown {
            warn!(
                volume = copy.volume.id,
                "a container runtime has the filesystem, and this kernel has it not mounted, so it cannot be frozen: the \
                 copy is crash-consistent"
            );
        }
        is_unknown
    }
}

fn writers(store: &Store, copy: &Copy<'_>) -> Result<Writers> {
    let attachment = store.catalog.read()?.get::<Attachment>(&copy.volume.id)?;
    let device = LoopDevice::find(copy.source)?.into_iter().next();
    let (Some(attachment), Some(device)) = (attachment, device) else { return Ok(Writers::None) };
    Ok(match attachment.capability.access {
        Access::Block if attachment.published.values().any(|p| !p.is_read_only()) => {
            Writers::Raw(device)
        }
        Access::Block => Writers::Idle(device),
        Access::Mount { .. } => {
            // The kernel is asked where it is mounted: by the catalog's word another filesystem, the
            // host's own, might be frozen.
            match filesystem::open_mounted(&device)? {
                Some(mounted) => Writers::Filesystem(mounted, device),
                None if attachment.deferred_at().is_some() => Writers::Unknown(device),
                None if attachment.mounted == Mounted::AtTargets => Writers::Idle(device),
                None => Writers::Raw(device),
            }
        }
    })
}

fn clone_one(
    store: &Store,
    copy: &Copy<'_>,
    writers: &Writers,
    took: &mut Durations,
) -> Result<()> {
    let pool = store.pool.as_ref();
    let (Writers::Raw(device) | Writers::Unknown(device)) = writers else {
        timed(&mut took.settle, || settle(store, copy, writers))?;
        return timed(&mut took.clone, || pool.clone(copy.source, copy.target));
    };
    if pool.clones_atomically() {
        timed(&mut took.settle, || settle(store, copy, writers))?;
        return timed(&mut took.clone, || pool.clone(copy.source, copy.target));
    }
    for _ in 0..QUIET_ATTEMPTS {
        timed(&mut took.settle, || settle(store, copy, writers))?;
        let Some(before) = device.write_mark()? else { continue };
        timed(&mut took.clone, || pool.clone(copy.source, copy.target))?;
        if device.write_mark()? == Some(before) {
            return Ok(());
        }
    }
    Err(Error::Busy(format!(
        "volume {:?}, which cannot be frozen, was written to during each of {QUIET_ATTEMPTS} copies; a copy pool \
         needs a quiet moment: pause the writer, or use a pool that shares blocks",
        copy.volume.id
    )))
}

/// What was acknowledged to a writer reaches the backing file.
fn settle(store: &Store, copy: &Copy<'_>, writers: &Writers) -> Result<()> {
    let volume_id = &copy.volume.id;
    if let Some(mounted) = writers.mounted() {
        // The filesystem is frozen. The freeze wrote what was changed since the sync before it, and reports no error of that.
        writeback::sync_filesystem(store, volume_id, mounted)?;
    }
    if let Some(device) = writers.device() {
        writeback::flush_device(store, volume_id, device)?;
    }
    writeback::flush_file(store, volume_id, copy.source)?;
    reach("copy.settled")
}
