//! Inline ephemeral volumes (KEP-596): born when a pod's mount is made, gone when it is taken away. One row of the
//! catalog says what is wanted; what is there is asked of the kernel. No other part of the backend sees them: they have
//! no name, no staging, no snapshots, and their ids are kubelet's.
//!
//! Everything that is done for a volume can be done again. A row that is not `Ready` was never shown to a pod, or is
//! on its way out: whoever meets it, the next call, a start or a round, takes away what it names.

mod blocks;
mod content;
mod limits;
mod memory;
mod settle;

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use super::attachment::readable;
use super::deferral;
use super::error::{Context, Error, Result};
use super::fail_point::reach;
use super::filesystem;
use super::format;
use super::health;
use super::ids::{self, INLINE_PREFIX};
use super::locks::Lock;
use super::loop_device::LoopDevice;
use super::lost_pool;
use super::model::{
    Access, Condition, Deferral, FsType, HealthProblem, Inline, InlineRequest, Phase, Stats, Usage,
};
use super::runtime::DeferredMount;
use super::store::Store;
use super::target::{check_directory, remove_target};
use super::upkeep;

pub use content::Content;
pub use limits::{InlineLimits, in_all, promised};
pub use settle::collect;

/// Whoever may run what is in a content volume, or open a device there, has no need to.
const CONTENT_FLAGS: &str = "nosuid,nodev,noexec";
/// What a pod of any user may write to, as in emptyDir.
const SCRATCH_MODE: u32 = 0o777;
/// What ext4 is born with. An emptyDir begins empty, and some programs insist on that.
const LOST_AND_FOUND: &str = "lost+found";
/// How long a device may take to let go of its blocks, where a call waits for that.
const PATIENCE: Duration = Duration::from_secs(10);

/// What NodePublishVolume asks for.
pub struct PublishInline<'a> {
    pub handle: &'a str,
    pub target: &'a Path,
    pub request: &'a InlineRequest,
    /// Nothing is written where there is none, except that a content volume is emptied.
    pub content: &'a Content,
}

/// Makes the volume and shows it, or makes what is there agree with the request.
pub fn publish(store: &Store, publish: &PublishInline<'_>) -> Result<()> {
    check_handle(publish.handle)?;
    if publish.request.deferred.is_some() {
        deferral::runtime(store)?;
    }
    let _lock = lock(store, publish.handle, publish.target)?;
    let found = store.catalog.read()?.get::<Inline>(publish.handle)?;
    match found {
        Some(row) if row.phase == Phase::Ready => again(store, row, publish),
        Some(row) => take_away(store, row, PATIENCE).and_then(|()| make(store, publish)),
        None => make(store, publish),
    }
    .map_err(|error| upkeep::or_exhausted(store, error))
}

/// Two volumes at one target exclude each other as two calls for one volume do: what is there is looked at first.
fn lock(store: &Store, handle: &str, target: &Path) -> Result<Lock> {
    let volume = format!("inline volume {handle}");
    let place = format!("target {}", target.display());
    store.locks.take([volume.as_str(), place.as_str()])
}

/// A handle is kubelet's choice, and is only compared. What looks like an id of this driver is none.
fn check_handle(handle: &str) -> Result<()> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let begins = handle.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if !begins || !handle.bytes().all(fits) || ids::name_of(handle).is_some() {
        return Err(Error::invalid(
            "volume_id",
            "is not the handle of an inline volume: letters, digits, '-', '_' and '.', and not the id of another volume",
        ));
    }
    Ok(())
}

/// A volume that a pod has. Whatever fails now, the pod keeps what it has.
fn again(store: &Store, mut row: Inline, publish: &PublishInline<'_>) -> Result<()> {
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
    // What was in memory is lost with it, as after a reboot: then the volume begins anew, altogether.
    if request.in_memory && !memory::is_shown(&row)? {
        return take_away(store, row, PATIENCE).and_then(|()| make(store, publish));
    }
    bring_up(store, &mut row, content)
}

/// A new volume. If it cannot be made nothing is left of it.
fn make(store: &Store, publish: &PublishInline<'_>) -> Result<()> {
    let PublishInline { handle, target, request, content } = publish;
    check_directory("target_path", target)?;
    let mut row = Inline {
        handle: (*handle).to_owned(),
        id: ids::new_id(INLINE_PREFIX, handle)?,
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
        && let Err(error) = take_away(store, row, PATIENCE)
    {
        // The row stays as an intent: the next call, round or start goes on.
        tracing::error!(%error, "an inline volume that could not be made could not be undone yet");
    }
    made
}

/// Blocks, filesystem, mount, content, owner, in this order, each where it is not there yet; in memory the mount is the first.
fn bring_up(store: &Store, row: &mut Inline, content: &Content) -> Result<()> {
    if row.request.in_memory {
        memory::show(row)?;
        return fill(row, &row.target, content);
    }
    let device = blocks::attach(store, row)?;
    let fs_type = blocks::filesystem(store, row, &device)?;
    if let Some(deferral) = row.request.deferred {
        return leave(store, row, &device, fs_type, &deferral, content);
    }
    let read_only = row.request.is_read_only();
    if !read_only {
        show(row, &device, fs_type, false)?;
        return fill_shown(store, row, &device, content);
    }
    if row.phase == Phase::Creating {
        // What the pod may not change is written before it can look. To be mounted anew is what every other mount
        // namespace follows, and to be made read-only is not.
        show(row, &device, fs_type, false)?;
        fill_shown(store, row, &device, content)?;
        filesystem::unmount(&row.target, |mount| mount.shows(&device))?;
    }
    show(row, &device, fs_type, true)
}

/// Leaves the volume to a container runtime. A new one is filled before, where nobody sees it; one that a pod may have
/// is not looked into.
fn leave(
    store: &Store,
    row: &mut Inline,
    device: &LoopDevice,
    fs_type: FsType,
    deferral: &Deferral,
    content: &Content,
) -> Result<()> {
    if row.phase == Phase::Creating {
        format::grow_unseen(store, row, device)?;
        let root = filesystem::mount_unseen(device, fs_type)?;
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

/// Mounts the filesystem at the target, unless it is there.
fn show(row: &Inline, device: &LoopDevice, fs_type: FsType, read_only: bool) -> Result<()> {
    let target = &row.target;
    fs::create_dir_all(target).context(|| format!("making {}", target.display()))?;
    reach("inline.directory_made")?;
    if is_shown(row, device)? {
        return Ok(());
    }
    check_directory("target_path", target)?;
    let flags = mount_flags(row, read_only);
    filesystem::mount_device(device.path(), target, fs_type, &flags, read_only)
}

fn mount_flags(row: &Inline, read_only: bool) -> Vec<String> {
    let Access::Mount { flags, .. } = &row.request.capability.access else { return Vec::new() };
    let asked = flags.iter().flat_map(|flags| flags.split(','));
    asked.filter(|flag| read_only || *flag != "ro").map(str::to_owned).collect()
}

/// All of its size, and what is in it, for a volume that is mounted at its target.
fn fill_shown(
    store: &Store,
    row: &mut Inline,
    device: &LoopDevice,
    content: &Content,
) -> Result<()> {
    let target = row.target.clone();
    format::grow(store, row, device, &target)?;
    fill(row, &target, content)
}

/// What is in the volume mounted at `root`: content, and an owner.
fn fill(row: &Inline, root: &Path, content: &Content) -> Result<()> {
    let begins_empty = row.phase == Phase::Creating;
    if begins_empty {
        empty(root)?;
    }
    if row.request.read_only_content {
        content::refresh(root, content)?;
    } else if begins_empty {
        let mode = fs::Permissions::from_mode(SCRATCH_MODE);
        fs::set_permissions(root, mode).context(|| format!("opening {}", root.display()))?;
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

fn is_shown(row: &Inline, device: &LoopDevice) -> Result<bool> {
    Ok(filesystem::mount_at(&row.target)?.is_some_and(|mount| mount.shows(device)))
}

/// The same of a volume of any kind.
fn shown(store: &Store, row: &Inline) -> Result<bool> {
    match blocks::device(store, row)? {
        Some(device) => is_shown(row, &device),
        None => Ok(row.request.in_memory && memory::is_shown(row)?),
    }
}

/// Takes a volume away for good. OK when it is not there, or not at `target`.
pub fn unpublish(store: &Store, handle: &str, target: &Path) -> Result<()> {
    let _lock = lock(store, handle, target)?;
    match store.catalog.read()?.get::<Inline>(handle)? {
        Some(row) if row.target == target => take_away(store, row, PATIENCE),
        Some(_) | None => Ok(()),
    }
}

/// Intent, mount or word to a runtime, blocks, target, row. Whatever is gone already is passed over. `Busy` when
/// somebody still uses the filesystem, elsewhere or by an open file, after `patience`.
fn take_away(store: &Store, row: Inline, patience: Duration) -> Result<()> {
    let row = Inline { phase: Phase::Deleting, ..row };
    store.catalog.write(|tx| tx.put(&row))?;
    let device = blocks::device(store, &row)?;
    if row.request.in_memory {
        memory::unmount(&row)?;
    }
    if row.request.deferred.is_some() {
        deferral::take_back(store, &row.target, device.as_ref(), patience)?;
    }
    if let Some(device) = device {
        filesystem::unmount(&row.target, |mount| mount.shows(&device))?;
        device.release_within(patience)?;
    }
    blocks::remove(store, &row)?;
    remove_target(&row.target)?;
    store.catalog.write(|tx| tx.remove::<Inline>(&row.handle))
}

/// The inline volume of this handle, whatever phase it is in.
pub fn find(store: &Store, handle: &str) -> Result<Option<Inline>> {
    store.catalog.read()?.get::<Inline>(handle)
}

/// How it is; `path` is its target.
pub fn stats(store: &Store, row: &Inline, path: &Path) -> Result<Stats> {
    if row.request.deferred.is_some() && row.target == path {
        return deferral::stats(store, path, || defect(store, row));
    }
    readable(usage(store, row, path), condition(store, row)?)
}

/// How full it is; `path` is its target.
pub fn usage(store: &Store, row: &Inline, path: &Path) -> Result<Usage> {
    let missing = || {
        Error::Missing(format!("volume_path: {:?} is not in use at {}", row.handle, path.display()))
    };
    if row.target != path {
        return Err(missing());
    }
    if shown(store, row)? { filesystem::usage(path) } else { Err(missing()) }
}

/// What is wrong with it, if anything.
pub fn condition(store: &Store, row: &Inline) -> Result<Condition> {
    defect(store, row).map(health::of_defect)
}

fn defect(store: &Store, row: &Inline) -> Result<Option<Condition>> {
    let abnormal = |problem, message: &str| Ok(Some(Condition::abnormal(problem, message)));
    if row.phase != Phase::Ready {
        return abnormal(HealthProblem::NotReady, "the volume is being made or removed");
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
        return if memory::is_shown(row)? { Ok(None) } else { not_mounted() };
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
    } else if !is_shown(row, &device)? {
        return not_mounted();
    }
    upkeep::shortage(store)
}
