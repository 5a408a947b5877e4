//! Detects lost writes: writes that the kernel accepted and could not write back, because the pool
//! was full or the disk failed. The kernel reports that once, to the next fsync or syncfs, and then
//! treats the pages as clean. A snapshot taken after the report looks complete but lacks these
//! writes. Therefore the report is recorded in the volume's row: the volume gets no snapshot and no
//! clone, and its condition is abnormal, until it is unstaged and staged again. Its user then
//! starts from the data on disk.
//!
//! No descriptor is kept open to receive reports. A report that no process has received goes to
//! every descriptor that is opened later (errseq_t), so the next snapshot receives it, also after a
//! restart of the driver. A report that the volume's user received is known to the user. An open
//! file would prevent an unmount of the filesystem, and would not survive the driver.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use nix::unistd::syncfs;
use tracing::error;

use super::error::{Error, Result};
use super::loop_device::LoopDevice;
use super::model::{Attachment, LostWrites, Volume};
use super::store::{Store, now};

/// Lost writes by volume id that could not be recorded in the catalog. This process still refuses
/// snapshots.
#[derive(Debug, Default)]
pub struct Unrecorded(Mutex<BTreeMap<String, LostWrites>>);

impl Unrecorded {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, LostWrites>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes back a mounted filesystem. `mounted` is any file on it. The caller of this and of all
/// functions in this module holds the volume's lock.
pub fn sync_filesystem(store: &Store, volume_id: &str, mounted: &File) -> Result<()> {
    checked(store, volume_id, "syncing its filesystem", syncfs(mounted).map_err(io::Error::from))
}

/// Writes back the page cache of a volume's loop device and of its backing file.
pub fn flush_device(store: &Store, volume_id: &str, device: &LoopDevice) -> Result<()> {
    flush(store, volume_id, "flushing its loop device", &device.open(false)?)
}

/// Writes back the backing file of a volume.
pub fn flush_file(store: &Store, volume_id: &str, backing: &File) -> Result<()> {
    flush(store, volume_id, "flushing its backing file", backing)
}

fn flush(store: &Store, volume_id: &str, doing: &str, file: &File) -> Result<()> {
    checked(store, volume_id, doing, file.sync_all())
}

/// Writes back the filesystem of a path.
pub fn sync_mounted(path: &Path) -> io::Result<()> {
    File::open(path).and_then(|root| Ok(syncfs(&root)?))
}

/// Receives errors that an unmount would not report. Lost writes are logged and recorded, but do
/// not prevent the unmount.
pub fn sync_before_unmount(store: &Store, volume_id: &str, mounted_at: &Path) {
    let synced = sync_mounted(mounted_at);
    // A failed open says nothing about the volume, unless the filesystem has shut down.
    if !matches!(&synced, Err(error) if is_open_error(error)) {
        let _ = checked(store, volume_id, "syncing its filesystem", synced);
    }
}

fn is_open_error(error: &io::Error) -> bool {
    use libc::{EACCES, ELOOP, EMFILE, ENFILE, ENOENT, ENOTDIR};
    let codes = [EACCES, ELOOP, EMFILE, ENFILE, ENOENT, ENOTDIR];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// Receives errors that a detach would not report, like [`sync_before_unmount`].
pub fn flush_before_detach(store: &Store, volume_id: &str, device: &LoopDevice) {
    let _ = flush_device(store, volume_id, device);
    if let Ok(backing) = File::open(store.pool.volume_path(volume_id)) {
        let _ = flush_file(store, volume_id, &backing);
    }
}

fn checked(store: &Store, volume_id: &str, doing: &str, flushed: io::Result<()>) -> Result<()> {
    let Err(source) = flushed else { return Ok(()) };
    // These errors concern the call, not the data.
    if matches!(source.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::ENOMEM)) {
        return Err(Error::io(format!("{doing} (volume {volume_id:?})"), source));
    }
    let lost = LostWrites { since: now().0, cause: format!("{doing}: {source}"), unstaged: false };
    error!(volume = volume_id, cause = lost.cause, "writes to a volume were lost");
    let lost = store.unrecorded.lock().entry(volume_id.to_owned()).or_insert(lost).clone();
    record_or_log(store, volume_id);
    Err(refused(volume_id, &lost))
}

fn record_or_log(store: &Store, volume_id: &str) {
    if let Err(error) = record(store, volume_id) {
        error!(volume = volume_id, %error, "failed to record lost writes in the catalog: they will be unknown after a restart of the driver");
    }
}

/// Moves the lost writes of a volume from memory to its row. Keeps the first report.
fn record(store: &Store, volume_id: &str) -> Result<()> {
    let Some(lost) = store.unrecorded.lock().get(volume_id).cloned() else { return Ok(()) };
    let reading = store.catalog.read()?;
    if let Some(volume) = reading.get::<Volume>(volume_id)?
        && volume.lost_writes.is_none()
    {
        let unstaged = reading.get::<Attachment>(volume_id)?.is_none();
        let lost_writes = Some(LostWrites { unstaged, ..lost });
        store.catalog.write(|tx| tx.put(&Volume { lost_writes, ..volume }))?;
    }
    store.unrecorded.lock().remove(volume_id);
    Ok(())
}

/// The lost writes of the volume, if any.
pub fn lost(store: &Store, volume: &Volume) -> Option<LostWrites> {
    volume.lost_writes.clone().or_else(|| store.unrecorded.lock().get(&volume.id).cloned())
}

/// `Precondition` if the volume has lost writes.
pub fn check(store: &Store, volume: &Volume) -> Result<()> {
    let Some(lost) = lost(store, volume) else { return Ok(()) };
    if volume.lost_writes.is_none() {
        record_or_log(store, &volume.id);
    }
    Err(refused(&volume.id, &lost))
}

fn refused(volume_id: &str, lost: &LostWrites) -> Error {
    Error::Precondition(describe(volume_id, lost))
}

pub fn describe(volume_id: &str, lost: &LostWrites) -> String {
    /// 9999-12-31T23:59:59Z: no later time can be formatted.
    const LAST_SECOND: u64 = 253_402_300_799;
    let since = UNIX_EPOCH + Duration::from_secs(lost.since.min(LAST_SECOND));
    let since = humantime::format_rfc3339_seconds(since);
    format!(
        "writes to volume {volume_id:?} were lost, reported at {since} ({}); check its data and delete the pods that use it, \
         so that it is unstaged and staged again, or restore it from a snapshot",
        lost.cause
    )
}

/// Removes the row of an attachment after its device is detached. The next stage clears the lost
/// writes.
pub fn unstaged(store: &Store, volume_id: &str) -> Result<()> {
    let volume = store.catalog.read()?.get::<Volume>(volume_id)?;
    let changed = volume.and_then(|volume| {
        let lost = lost(store, &volume)?;
        let lost_writes = Some(LostWrites { unstaged: true, ..lost });
        (volume.lost_writes != lost_writes).then_some(Volume { lost_writes, ..volume })
    });
    store.catalog.write(|tx| {
        changed.iter().try_for_each(|volume| tx.put(volume))?;
        tx.remove::<Attachment>(volume_id)
    })?;
    store.unrecorded.lock().remove(volume_id);
    Ok(())
}

/// Clears the lost writes from before the last unstage.
pub fn staged(store: &Store, volume_id: &str) -> Result<()> {
    let volume = store.catalog.read()?.get::<Volume>(volume_id)?;
    match volume {
        Some(volume) if volume.lost_writes.as_ref().is_some_and(|lost| lost.unstaged) => {
            store.catalog.write(|tx| tx.put(&Volume { lost_writes: None, ..volume }))
        }
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::super::model::VolumeRequest;
    use super::super::pool::PoolKind;
    use super::super::reconcile::tests::config;
    use super::super::{Backend, CreateVolume};
    use super::*;
    use common::fail_point::in_tests::fail_after;

    fn open(directory: &TempDir) -> Backend {
        Backend::open(config(directory.path(), PoolKind::Copy)).unwrap()
    }

    fn volume(backend: &Backend, name: &str) -> Volume {
        let request = VolumeRequest { required_bytes: 1 << 20, ..Default::default() };
        backend.create_volume(&CreateVolume { name: name.to_owned(), request }).unwrap()
    }

    fn reported(store: &Store, volume: &Volume, code: i32) -> Result<()> {
        checked(store, &volume.id, "flushing", Err(io::Error::from_raw_os_error(code)))
    }

    fn is_refused(store: &Store, id: &str) -> bool {
        let volume = store.catalog.read().unwrap().live_volume(id).unwrap();
        matches!(check(store, &volume), Err(Error::Precondition(_)))
    }

    #[test]
    fn unrecorded_lost_writes_are_refused_and_recorded_later() {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let backend = open(&directory);
        let (lost, whole) = (volume(&backend, "lost"), volume(&backend, "whole"));
        let row = |id: &str| backend.store.catalog.read().unwrap().live_volume(id).unwrap();
        fail_after(Some(0));
        assert!(matches!(reported(&backend.store, &lost, libc::EIO), Err(Error::Precondition(_))));
        assert!(is_refused(&backend.store, &lost.id));
        fail_after(None);
        assert_eq!(row(&lost.id).lost_writes, None);
        assert!(backend.volume_condition(&lost.id).unwrap().is_abnormal());
        assert!(is_refused(&backend.store, &lost.id) && !is_refused(&backend.store, &whole.id));
        let recorded = row(&lost.id).lost_writes.unwrap();
        assert!(recorded.cause.contains("flushing"), "{recorded:?}");
        drop(backend);
        let backend = open(&directory);
        assert!(is_refused(&backend.store, &lost.id));
        // The first report is kept.
        reported(&backend.store, &lost, libc::ENOSPC).unwrap_err();
        let row = backend.store.catalog.read().unwrap().live_volume(&lost.id).unwrap();
        assert_eq!(row.lost_writes, Some(recorded));
    }

    #[test]
    fn an_error_of_the_call_is_not_a_lost_write() {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let backend = open(&directory);
        let volume = volume(&backend, "v");
        for code in [libc::EINTR, libc::ENOMEM] {
            assert!(matches!(reported(&backend.store, &volume, code), Err(Error::Io { .. })));
        }
        assert!(!is_refused(&backend.store, &volume.id));
    }

    #[test]
    fn an_invalid_time_can_be_formatted() {
        let lost = LostWrites { since: u64::MAX, cause: "x".to_owned(), unstaged: false };
        assert!(describe("v", &lost).contains("9999"));
    }
}
