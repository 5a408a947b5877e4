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
mod wipe;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::error::{Context, Error, Result};
use super::fail_point::reach;
use super::filesystem;
use super::ids::{self, INLINE_PREFIX};
use super::loop_device::LoopDevice;
use super::model::{Access, Condition, Inline, InlineRequest, Phase, Usage};
use super::store::Store;
use super::target::{check_directory, remove_target};
use super::upkeep;

pub use content::Content;
pub use limits::{InlineLimits, in_all, promised};
pub use settle::{collect, settle};

/// Whoever may run what is in a content volume, or open a device there, has no need to.
const CONTENT_FLAGS: &str = "nosuid,nodev,noexec";
/// What a pod of any user may write to, as in emptyDir.
const SCRATCH_MODE: u32 = 0o777;

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
    let _lock = store.locks.take([lock_key(publish.handle).as_str()])?;
    check_handle(publish.handle)?;
    let found = store.catalog.read()?.get::<Inline>(publish.handle)?;
    match found {
        Some(row) if row.phase == Phase::Ready => again(store, row, publish),
        Some(row) => take_away(store, row).and_then(|()| make(store, publish)),
        None => make(store, publish),
    }
    .map_err(|error| upkeep::or_exhausted(store, error))
}

fn lock_key(handle: &str) -> String {
    format!("inline volume {handle}")
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
    if content.has_secrets() && !row.carries_secret {
        row.carries_secret = true;
        store.catalog.write(|tx| tx.put(&row))?;
    }
    bring_up(store, &mut row, content)
}

/// A new volume. If it cannot be made nothing is left of it.
fn make(store: &Store, publish: &PublishInline<'_>) -> Result<()> {
    let PublishInline { handle, target, request, content } = publish;
    check_directory("target_path", target)?;
    let row = Inline {
        handle: (*handle).to_owned(),
        id: ids::new_id(INLINE_PREFIX, handle)?,
        phase: Phase::Creating,
        target: target.to_path_buf(),
        capacity_bytes: blocks::capacity(store, request)?,
        format: None,
        request: (*request).clone(),
        carries_secret: content.has_secrets(),
    };
    limits::admit(store, &row)?;
    let mut row = row;
    let made = bring_up(store, &mut row, content).and_then(|()| {
        row.phase = Phase::Ready;
        store.catalog.write(|tx| tx.put(&row))
    });
    if made.is_err()
        && let Err(error) = take_away(store, row)
    {
        // The row stays as an intent: the next call, round or start goes on.
        tracing::error!(%error, "an inline volume that could not be made could not be undone yet");
    }
    made
}

/// Blocks, filesystem, mount, content, owner, in this order, each where it is not there yet.
fn bring_up(store: &Store, row: &mut Inline, content: &Content) -> Result<()> {
    let (device, fs_type) = blocks::attach(store, row)?;
    let target = row.target.clone();
    let read_only = row.request.is_read_only();
    fs::create_dir_all(&target).context(|| format!("making {}", target.display()))?;
    reach("inline.directory_made")?;
    if !is_shown(row, &device)? {
        check_directory("target_path", &target)?;
        let flags = mount_flags(&row.request);
        filesystem::mount_device(device.path(), &target, fs_type, &flags, read_only)?;
    }
    if read_only {
        return Ok(());
    }
    blocks::grow(store, row, &device)?;
    let fresh = row.phase == Phase::Creating && row.request.from_snapshot.is_none();
    if row.request.read_only_content {
        content::refresh(&target, content)?;
    } else if fresh {
        let mode = fs::Permissions::from_mode(SCRATCH_MODE);
        fs::set_permissions(&target, mode).context(|| format!("opening {}", target.display()))?;
        reach("inline.mode_set")?;
        content::seed(&target, content)?;
    }
    match row.request.capability.access {
        Access::Mount { group: Some(group), .. } => filesystem::give_to_group(&target, group),
        Access::Mount { group: None, .. } | Access::Block => Ok(()),
    }
}

fn mount_flags(request: &InlineRequest) -> Vec<String> {
    let Access::Mount { flags, .. } = &request.capability.access else { return Vec::new() };
    let own = request.read_only_content.then(|| CONTENT_FLAGS.to_owned());
    flags.iter().cloned().chain(own).collect()
}

fn is_shown(row: &Inline, device: &LoopDevice) -> Result<bool> {
    Ok(filesystem::mount_at(&row.target)?.is_some_and(|mount| mount.shows(device)))
}

/// Takes a volume away for good. OK when it is not there, or not at `target`.
pub fn unpublish(store: &Store, handle: &str, target: &Path) -> Result<()> {
    let _lock = store.locks.take([lock_key(handle).as_str()])?;
    match store.catalog.read()?.get::<Inline>(handle)? {
        Some(row) if row.target == target => take_away(store, row),
        Some(_) | None => Ok(()),
    }
}

/// Intent, mount, blocks, target, row. Whatever is gone already is passed over.
fn take_away(store: &Store, row: Inline) -> Result<()> {
    let row = Inline { phase: Phase::Deleting, ..row };
    store.catalog.write(|tx| tx.put(&row))?;
    if let Some(device) = blocks::device(store, &row)? {
        filesystem::unmount(&row.target, |mount| mount.shows(&device))?;
        device.release()?;
    }
    blocks::remove(store, &row)?;
    remove_target(&row.target)?;
    store.catalog.write(|tx| tx.remove::<Inline>(&row.handle))
}

/// The inline volume of this handle, whatever phase it is in.
pub fn find(store: &Store, handle: &str) -> Result<Option<Inline>> {
    store.catalog.read()?.get::<Inline>(handle)
}

/// How full it is; `path` is its target.
pub fn usage(store: &Store, row: &Inline, path: &Path) -> Result<Usage> {
    let missing = || {
        Error::Missing(format!("volume_path: {:?} is not in use at {}", row.handle, path.display()))
    };
    if row.target != path {
        return Err(missing());
    }
    let device = blocks::device(store, row)?.ok_or_else(missing)?;
    if is_shown(row, &device)? { filesystem::usage(path) } else { Err(missing()) }
}

/// What is wrong with it, if anything (CSI VolumeCondition).
pub fn condition(store: &Store, row: &Inline) -> Result<Condition> {
    let healthy = || "the volume is healthy".to_owned();
    Ok(match defect(store, row)? {
        Some(message) => Condition { abnormal: true, message },
        None => Condition { abnormal: false, message: healthy() },
    })
}

fn defect(store: &Store, row: &Inline) -> Result<Option<String>> {
    if row.phase != Phase::Ready {
        return Ok(Some("the volume is being made or removed".to_owned()));
    }
    if let Some(message) = blocks::defect(store, row)? {
        return Ok(Some(message));
    }
    let Some(device) = blocks::device(store, row)? else {
        return Ok(Some("the volume has no loop device; restart the pod".to_owned()));
    };
    if !is_shown(row, &device)? {
        let target = row.target.display();
        return Ok(Some(format!("the volume is not mounted at {target}; restart the pod")));
    }
    let room = store.pool.room()?;
    Ok((!row.request.in_memory && upkeep::under_pressure(room))
        .then(|| "the pool is nearly full; delete data or grow the pool".to_owned()))
}
