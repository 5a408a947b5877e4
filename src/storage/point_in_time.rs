//! Copies volumes at one point in time while pods write to them.
//!
//! Volumes without writers are cloned first. Of the others, most data is cloned before the freeze.
//! Then the mounted filesystems are frozen, pending writes are flushed to the backing files, and
//! the rest is cloned; the freeze ends after that. A raw block volume cannot be frozen: a copy may
//! include one, which is cloned while the others are frozen, so that all copies have the same point
//! in time.

use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use tracing::warn;

use super::error::{Context, Error, Result};
use super::fail_point::reach;
use super::filesystem::{self, Frozen};
use super::loop_device::LoopDevice;
use super::maintenance;
use super::model::{Access, Attachment, Mounted, Volume};
use super::pool;
use super::store::{Store, now};
use super::writeback;

/// Maximum freeze if a clone is one call.
const CLONE_DEADLINE: Duration = Duration::from_secs(30);

/// Maximum freeze if data is copied.
const COPY_DEADLINE: Duration = Duration::from_secs(300);

/// Maximum number of attempts to copy a raw block volume without concurrent writes.
const COPY_ATTEMPTS: usize = 10;

/// A volume and the target file of its copy. The caller holds the volume's lock.
pub struct CopyJob<'a> {
    pub volume: &'a Volume,
    pub source: &'a File,
    pub target: &'a File,
}

/// Durations of the steps, each for all volumes.
#[derive(Debug, Default, Clone, Copy)]
pub struct Durations {
    /// Cloning before the freeze.
    pub pre_clone: Duration,
    /// From the first freeze to the last thaw. Without a filesystem to freeze, the duration of the
    /// next two steps for a written raw volume; 0 without writers.
    pub frozen: Duration,
    /// Flushing pending writes to the backing files.
    pub flush: Duration,
    /// Cloning the rest.
    pub clone: Duration,
}

/// Runs a step and adds its duration to `to`.
pub fn timed<T>(to: &mut Duration, step: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = step();
    *to += start.elapsed();
    result
}

/// The result of a copy.
pub struct Copied {
    /// Seconds and nanoseconds since the epoch.
    pub taken_at: (u64, u32),
    pub durations: Durations,
    /// For each copy, in order: whether its filesystem could not be frozen.
    pub crash_consistent: Vec<bool>,
}

/// The writers to stop for a consistent copy.
enum Writers {
    /// The volume is not attached.
    None,
    /// The device is attached but has no writer, and cannot get one while its volume is locked.
    Idle(LoopDevice),
    /// The mounted filesystem on this device.
    Filesystem(File, LoopDevice),
    /// The user of the raw device.
    Raw(LoopDevice),
    /// Unknown: a container runtime may have given the device to a virtual machine, which this
    /// kernel cannot see. (A filesystem that looks clean or unmounted proves nothing: it may be
    /// mounted during the copy.)
    Unknown(LoopDevice),
}

/// Copies all sources at one point in time. On an error the targets contain nothing usable.
pub fn copy_all(store: &Store, copies: &[CopyJob<'_>]) -> Result<Copied> {
    let mut durations = Durations::default();
    let mut members = Vec::with_capacity(copies.len());
    for copy in copies {
        members.push((copy, writers(store, copy)?));
    }
    let crash_consistent = members.iter().map(|(copy, writers)| writers.is_unknown(copy)).collect();
    let raw = members.iter().filter(|(_, writers)| writers.keeps_writing()).count();
    if raw > 1 {
        return Err(Error::Precondition(format!(
            "source_volume_ids: {raw} volumes cannot be frozen (raw block volumes that are published writable, or \
             filesystems that a container runtime may have mounted in a virtual machine), but a group can contain \
             only one such volume: unpublish the others first"
        )));
    }
    // Clone the volume that cannot be frozen first, while the others are frozen.
    members.sort_by_key(|(_, writers)| !writers.keeps_writing());
    let pool = store.pool.as_ref();
    // The locks on the volumes prevent that their baselines are dropped.
    let may_continue = || {
        let mut baselines = copies.iter().filter_map(|copy| copy.volume.baseline.as_ref());
        baselines.try_for_each(|id| maintenance::check_need(store, id))
    };
    let (written, idle): (Vec<_>, Vec<_>) =
        members.into_iter().partition(|(_, writers)| writers.may_write());
    // Their locks exclude writers, so one clone without a freeze is enough.
    for (copy, writers) in &idle {
        clone_one(store, copy, writers, &may_continue, &mut durations)?;
        reach("copy.made")?;
    }
    for (copy, _) in &written {
        timed(&mut durations.pre_clone, || {
            pool.pre_clone(copy.source, copy.target, &mut &may_continue)
        })?;
        reach("copy.begun")?;
    }
    // Sync before the freeze, to keep the freeze short.
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
    let taken_at = now();
    for (copy, writers) in &written {
        clone_one(store, copy, writers, &may_continue, &mut durations)?;
        reach("copy.made")?;
    }
    durations.frozen = frozen.thaw()?;
    for CopyJob { volume, source, .. } in copies {
        let what = format_args!("the backing file of volume {:?}", volume.id);
        pool::check_length(source, what, volume.capacity_bytes)?;
    }
    Ok(Copied { taken_at, durations, crash_consistent })
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

    /// Whether writes are possible before a freeze.
    fn may_write(&self) -> bool {
        !matches!(self, Self::None | Self::Idle(_))
    }

    /// Whether writes are possible during a freeze.
    fn keeps_writing(&self) -> bool {
        matches!(self, Self::Raw(_) | Self::Unknown(_))
    }

    fn is_unknown(&self, copy: &CopyJob<'_>) -> bool {
        let is_unknown = matches!(self, Self::Unknown(_));
        if is_unknown {
            warn!(
                volume = copy.volume.id,
                "a container runtime may have mounted the filesystem outside this kernel, so it cannot be frozen: the \
                 copy is crash consistent"
            );
        }
        is_unknown
    }
}

fn writers(store: &Store, copy: &CopyJob<'_>) -> Result<Writers> {
    let attachment = store.catalog.read()?.get::<Attachment>(&copy.volume.id)?;
    let device = LoopDevice::find(copy.source)?.into_iter().next();
    let (Some(attachment), Some(device)) = (attachment, device) else { return Ok(Writers::None) };
    Ok(match attachment.capability.access {
        Access::Block if attachment.published.values().any(|p| !p.is_read_only()) => {
            Writers::Raw(device)
        }
        Access::Block => Writers::Idle(device),
        Access::Mount { .. } => {
            // Read the mount from the kernel. With a path from the catalog, another filesystem (the
            // host's own) might be frozen.
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
    copy: &CopyJob<'_>,
    writers: &Writers,
    may_continue: &impl Fn() -> Result<()>,
    durations: &mut Durations,
) -> Result<()> {
    let pool = store.pool.as_ref();
    let clone = || pool.clone(copy.source, copy.target, &mut &*may_continue);
    let (Writers::Raw(device) | Writers::Unknown(device)) = writers else {
        timed(&mut durations.flush, || flush_writes(store, copy, writers))?;
        return timed(&mut durations.clone, clone);
    };
    if pool.clones_atomically() {
        timed(&mut durations.flush, || flush_writes(store, copy, writers))?;
        return timed(&mut durations.clone, clone);
    }
    for _ in 0..COPY_ATTEMPTS {
        timed(&mut durations.flush, || flush_writes(store, copy, writers))?;
        let Some(before) = device.write_counters()? else { continue };
        timed(&mut durations.clone, clone)?;
        if device.write_counters()? == Some(before) {
            return Ok(());
        }
    }
    Err(Error::Busy(format!(
        "volume {:?} cannot be frozen and was written to during each of {COPY_ATTEMPTS} copies; a copy pool \
         requires a copy without writes: pause the writer, or use a reflink or image pool",
        copy.volume.id
    )))
}

/// Flushes acknowledged writes to the backing file.
fn flush_writes(store: &Store, copy: &CopyJob<'_>, writers: &Writers) -> Result<()> {
    let volume_id = &copy.volume.id;
    if let Some(mounted) = writers.mounted() {
        // The filesystem is frozen. The freeze wrote recent changes without reporting errors; this
        // sync reports them.
        writeback::sync_filesystem(store, volume_id, mounted)?;
    }
    if let Some(device) = writers.device() {
        writeback::flush_device(store, volume_id, device)?;
    }
    writeback::flush_file(store, volume_id, copy.source)?;
    reach("copy.settled")
}
