//! Inline ephemeral volumes (KEP-596): created by NodePublishVolume and deleted by
//! NodeUnpublishVolume. The catalog's row holds the desired state; the actual state is read from
//! the kernel. The rest of the backend does not see these volumes: they have no name, no staging
//! and no snapshots, and kubelet chooses their handles.
//!
//! Every step can be repeated. A row that is not `Ready` was never used by a pod, or is being
//! deleted: the next call, start or collection removes it.

mod blocks;
mod content;
mod garbage;
mod limits;
mod memory;

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use super::attachment::{stats_or_condition, thaw_unpublished};
use super::deferral;
use super::error::{Context, Error, Result};
use super::fail_point::reach;
use super::filesystem;
use super::health;
use super::ids::{self, INLINE_PREFIX};
use super::locks::Lock;
use super::loop_device::LoopDevice;
use super::lost_pool;
use super::maintenance;
use super::model::{
    Access, Condition, Deferral, FsType, HealthProblem, Inline, InlineRequest, Phase, Stats, Usage,
};
use super::runtime::DeferredMount;
use super::store::Store;
use super::target::{check_directory, remove_target};

pub use content::Content;
pub use garbage::collect;
pub use limits::{InlineLimits, provisioned_bytes, totals};

/// A pod does not need to execute files or open devices of a content volume.
const CONTENT_FLAGS: &str = "nosuid,nodev,noexec";
/// Mode of the root of a writable volume, as in emptyDir: any user may write.
const SCRATCH_MODE: u32 = 0o777;
/// A directory that mkfs.ext4 creates. Like an emptyDir, a volume must begin empty: some programs
/// require that.
const LOST_AND_FOUND: &str = "lost+found";
/// How long a call waits until a device is detached.
const DETACH_TIMEOUT: Duration = Duration::from_secs(10);

/// The arguments of NodePublishVolume for an inline volume.
pub struct PublishInline<'a> {
    pub handle: &'a str,
    pub target: &'a Path,
    pub request: &'a InlineRequest,
    /// The files to write. Empty content only clears a content volume.
    pub content: &'a Content,
}

/// Creates and mounts the volume, or updates an existing one.
pub fn publish(store: &Store, publish: &PublishInline<'_>) -> Result<()> {
    check_handle(publish.handle)?;
    if publish.request.deferred.is_some() {
        deferral::runtime(store)?;
    }
    let _lock = lock(store, publish.handle, publish.target)?;
    let found = store.catalog.read()?.get::<Inline>(publish.handle)?;
    match found {
        Some(row) if row.phase == Phase::Ready => republish(store, row, publish),
        Some(row) => delete(store, row, DETACH_TIMEOUT).and_then(|()| make(store, publish)),
        None => make(store, publish),
    }
    .map_err(|error| maintenance::or_exhausted(store, error))
}

/// Locks the handle and the target: two volumes must not use one target at the same time.
fn lock(store: &Store, handle: &str, target: &Path) -> Result<Lock> {
    let volume = format!("inline volume {handle}");
    let place = format!("target {}", target.display());
    store.locks.try_lock([volume.as_str(), place.as_str()])
}

/// Validates a handle. kubelet chooses it. The id format of this driver is rejected.
fn check_handle(handle: &str) -> Result<()> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let begins = handle.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if !begins || !handle.bytes().all(fits) || ids::name_of(handle).is_some() {
        return Err(Error::invalid(
            "volume_id",
            "must be the handle of an inline volume: letters, digits, '-', '_' and '.', and not the id of another volume",
        ));
    }
    Ok(())
}

/// Publishes an existing volume again. On an error the pod keeps its current volume.
fn republish(store: &Store, mut row: Inline, publish: &PublishInline<'_>) -> Result<()> {
    let PublishInline { handle, target, request, content } = publish;
    if row.target != *target {
        return Err(Error::Precondition(format!(
            "target_path: {handle:?} is published at {}; an inline volume has one target",
            row.target.display()
        )));
    }
    if row.request != **request {
        return Err(Error::AlreadyExists(format!(
            "volume_id: {handle:?} is published at {} with other arguments",
            target.display()
        )));
    }
    // The content is lost with the mount, as after a reboot. Create the volume again.
    if request.in_memory && !memory::is_mounted(&row)? {
        return delete(store, row, DETACH_TIMEOUT).and_then(|()| make(store, publish));
    }
    bring_up(store, &mut row, content)
}

/// Creates a new volume. A failed creation is undone.
fn make(store: &Store, publish: &PublishInline<'_>) -> Result<()> {
    let PublishInline { handle, target, request, content } = publish;
    check_directory("target_path", target)?;
    let mut row = Inline {
        handle: (*handle).to_owned(),
        id: ids::new_id(store.catalog.pool()?, INLINE_PREFIX, handle)?,
        phase: Phase::Creating,
        target: target.to_path_buf(),
        capacity_bytes: blocks::capacity(store, request)?,
        format: None,
        request: (*request).clone(),
    };
    limits::admit(store, &row)?;
    let made = bring_up(store, &mut row, content).and_then(|()| {
        row.phase = Phase::Ready;
        store.catalog.write(|tx| tx.put(&row))
    });
    if made.is_err()
        && let Err(error) = delete(store, row, DETACH_TIMEOUT)
    {
        // The row remains as an intent: the next call, collection or start tries again.
        tracing::error!(%error, "failed to undo the creation of an inline volume; the next collection tries again");
    }
    made
}

/// Creates, in this order and where missing: backing file, filesystem, mount, content, owner. In
/// memory the mount is first.
fn bring_up(store: &Store, row: &mut Inline, content: &Content) -> Result<()> {
    if row.request.in_memory {
        memory::mount_at_target(row)?;
        return match row.request.read_only_content {
            true => fill_read_only(row, content),
            false => fill(row, &row.target, content),
        };
    }
    let device = blocks::attach(store, row)?;
    let fs_type = blocks::filesystem(store, row, &device)?;
    if let Some(deferral) = row.request.deferred {
        return defer(store, row, &device, fs_type, &deferral, content);
    }
    let read_only = row.request.is_read_only();
    if !read_only {
        mount_at_target(row, &device, fs_type, false)?;
        return fill(row, &row.target, content);
    }
    if row.phase == Phase::Creating {
        // The content of a read-only volume is written before the pod can see it. Mount again
        // instead of remounting: other mount namespaces receive a new mount, but not a change to
        // read-only.
        mount_at_target(row, &device, fs_type, false)?;
        fill(row, &row.target, content)?;
        filesystem::unmount(&row.target, |mount| mount.is_filesystem_of(&device))?;
    }
    mount_at_target(row, &device, fs_type, true)
}

/// Hands the volume to a container runtime. A new volume is filled first, through a detached mount.
/// An existing one is not accessed, because a pod may have mounted it.
fn defer(
    store: &Store,
    row: &mut Inline,
    device: &LoopDevice,
    fs_type: FsType,
    deferral: &Deferral,
    content: &Content,
) -> Result<()> {
    if row.phase == Phase::Creating {
        let root = filesystem::mount_detached(device, fs_type)?;
        fill(row, &root.path(), content)?;
    }
    if let Some(found) = deferral::defect(device, &filesystem::all_mounts()?) {
        return Err(Error::Precondition(format!("volume_id: {:?}: {}", row.handle, found.message)));
    }
    let read_only = row.request.is_read_only();
    let flags = deferral::mount_flags(&mount_flags(row, read_only), fs_type, read_only);
    let target = &row.target;
    let device = device.path();
    deferral::hand_over(store, &DeferredMount { target, device, fs_type, flags: &flags, deferral })
}

/// Mounts the filesystem at the target, unless it is mounted.
fn mount_at_target(
    row: &Inline,
    device: &LoopDevice,
    fs_type: FsType,
    read_only: bool,
) -> Result<()> {
    let target = &row.target;
    fs::create_dir_all(target).context(|| format!("creating {}", target.display()))?;
    reach("inline.directory_made")?;
    if is_mounted(row, device)? {
        return Ok(());
    }
    check_directory("target_path", target)?;
    let flags = mount_flags(row, read_only);
    filesystem::mount_device(device.path(), target, fs_type, &flags, read_only)
}

fn mount_flags(row: &Inline, read_only: bool) -> Vec<String> {
    let Access::Mount { flags, .. } = &row.request.capability.access else { return Vec::new() };
    let flags = flags.iter().flat_map(|flags| flags.split(','));
    flags.filter(|flag| read_only || *flag != "ro").map(str::to_owned).collect()
}

/// Fills a content volume, which is in memory and mounted at its target. The pod's mount is
/// read-only, on the host too, and only the driver writes, through a mount that has no path.
fn fill_read_only(row: &Inline, content: &Content) -> Result<()> {
    let target = &row.target;
    fill(row, &filesystem::writable_clone(target)?.path(), content)?;
    if filesystem::is_read_only(target)? {
        return Ok(());
    }
    match row.phase {
        Phase::Creating => {
            filesystem::replace_by_read_only(target, |mount| memory::is_of(row, mount))
        }
        // Published by an earlier version, which left it writable.
        Phase::Ready | Phase::Deleting => filesystem::bind_read_only(target, target),
    }
}

/// Sets content and owner of the volume mounted at `root`.
fn fill(row: &Inline, root: &Path, content: &Content) -> Result<()> {
    let is_new = row.phase == Phase::Creating;
    if is_new {
        empty(root)?;
    }
    if row.request.read_only_content {
        content::refresh(root, content)?;
    } else if is_new {
        let mode = fs::Permissions::from_mode(SCRATCH_MODE);
        fs::set_permissions(root, mode)
            .context(|| format!("setting the mode of {}", root.display()))?;
        reach("inline.mode_set")?;
        content::seed(root, content)?;
    }
    match row.request.capability.access {
        Access::Mount { group: Some(group), .. } => filesystem::give_to_group(root, group),
        Access::Mount { group: None, .. } | Access::Block => Ok(()),
    }
}

fn empty(root: &Path) -> Result<()> {
    match fs::remove_dir(root.join(LOST_AND_FOUND)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => {
            removed.context(|| format!("removing {LOST_AND_FOUND} from {}", root.display()))?;
            reach("inline.emptied")
        }
    }
}

fn is_mounted(row: &Inline, device: &LoopDevice) -> Result<bool> {
    Ok(filesystem::mount_at(&row.target)?.is_some_and(|mount| mount.is_filesystem_of(device)))
}

/// Whether a volume of any kind is mounted at its target.
fn is_mounted_any(store: &Store, row: &Inline) -> Result<bool> {
    match blocks::device(store, row)? {
        Some(device) => is_mounted(row, &device),
        None => Ok(row.request.in_memory && memory::is_mounted(row)?),
    }
}

/// Deletes a volume. Succeeds if it does not exist or has another target.
pub fn unpublish(store: &Store, handle: &str, target: &Path) -> Result<()> {
    let _lock = lock(store, handle, target)?;
    match store.catalog.read()?.get::<Inline>(handle)? {
        Some(row) if row.target == target => delete(store, row, DETACH_TIMEOUT),
        Some(_) | None => Ok(()),
    }
}

/// Deletes a volume: intent, mount or runtime's file, device and backing file, target, row. Skips
/// what no longer exists. `Busy` if the filesystem is still in use after `timeout`.
fn delete(store: &Store, row: Inline, timeout: Duration) -> Result<()> {
    let row = Inline { phase: Phase::Deleting, ..row };
    store.catalog.write(|tx| tx.put(&row))?;
    let device = blocks::device(store, &row)?;
    if row.request.in_memory {
        memory::unmount(&row)?;
    }
    if row.request.deferred.is_some() {
        deferral::take_back(store, &row.target, device.as_ref(), timeout)?;
    }
    if let Some(device) = device {
        thaw_unpublished(&row.handle, &device, [row.target.as_path()]);
        filesystem::unmount(&row.target, |mount| mount.is_filesystem_of(&device))?;
        device.release_within(timeout)?;
    }
    blocks::remove(store, &row)?;
    remove_target(&row.target)?;
    store.catalog.write(|tx| tx.remove::<Inline>(&row.handle))
}

/// The inline volume with this handle, in any phase.
pub fn find(store: &Store, handle: &str) -> Result<Option<Inline>> {
    store.catalog.read()?.get::<Inline>(handle)
}

/// Usage and condition. `path` is the target.
pub fn stats(store: &Store, row: &Inline, path: &Path) -> Result<Stats> {
    if row.request.deferred.is_some() && row.target == path {
        return deferral::stats(store, path, || defect(store, row));
    }
    stats_or_condition(usage(store, row, path), condition(store, row)?)
}

/// The usage. `path` is the target.
pub fn usage(store: &Store, row: &Inline, path: &Path) -> Result<Usage> {
    let missing = || {
        Error::Missing(format!("volume_path: {:?} is not in use at {}", row.handle, path.display()))
    };
    if row.target != path {
        return Err(missing());
    }
    if is_mounted_any(store, row)? { filesystem::usage(path) } else { Err(missing()) }
}

/// The condition of the volume.
pub fn condition(store: &Store, row: &Inline) -> Result<Condition> {
    defect(store, row).map(health::or_healthy)
}

fn defect(store: &Store, row: &Inline) -> Result<Option<Condition>> {
    let abnormal = |problem, message: &str| Ok(Some(Condition::abnormal(problem, message)));
    if row.phase != Phase::Ready {
        return abnormal(HealthProblem::NotReady, "the volume is being created or removed");
    }
    if let Some(found) = lost_pool::defect(store)? {
        return Ok(Some(found));
    }
    let not_mounted = || {
        let target = row.target.display();
        let message = format!("the volume is not mounted at {target}; restart the pod");
        abnormal(HealthProblem::NotMounted, &message)
    };
    if row.request.in_memory {
        return if memory::is_mounted(row)? { Ok(None) } else { not_mounted() };
    }
    if let Some(found) = blocks::defect(store, row)? {
        return Ok(Some(found));
    }
    let Some(device) = blocks::device(store, row)? else {
        let message = "the volume has no loop device; restart the pod";
        return abnormal(HealthProblem::LoopDeviceMissing, message);
    };
    if row.request.deferred.is_some() {
        if let Some(found) = deferral::defect(&device, &filesystem::all_mounts()?) {
            return Ok(Some(found));
        }
    } else if !is_mounted(row, &device)? {
        return not_mounted();
    }
    maintenance::shortage(store)
}
