//! Garbage collection of inline volumes: those that a crash left unfinished, and those of vanished
//! pods.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use super::super::attachment::thaw_unpublished;
use super::super::error::{Context, Error, Result};
use super::super::filesystem;
use super::super::loop_device::LoopDevice;
use super::super::model::{Inline, Phase};
use super::super::store::Store;
use super::super::target::present;
use super::{blocks, delete, is_mounted, lock};

/// How long to wait until one device is detached. The next collection comes soon, and other volumes
/// wait for this one.
const DETACH_TIMEOUT: Duration = Duration::from_millis(500);

/// Deletes unfinished volumes and volumes of vanished pods. Skips volumes with a call in progress.
pub fn collect(store: &Store) -> Result<()> {
    for row in store.catalog.read()?.select(|_: &Inline| true)? {
        // An error for one volume must not affect the others.
        if let Err(error) = collect_one(store, &row) {
            tracing::error!(volume = row.handle, %error, "failed to remove an inline volume; the next collection tries again");
        }
    }
    Ok(())
}

fn collect_one(store: &Store, Inline { handle, target, .. }: &Inline) -> Result<()> {
    // Check before taking the lock, so that no call fails for a volume that needs no collection.
    if due_for_removal(store, handle)?.is_none() {
        return Ok(());
    }
    let Ok(_lock) = lock(store, handle, target) else { return Ok(()) };
    let Some(row) = due_for_removal(store, handle)? else { return Ok(()) };
    tracing::info!(volume = handle, phase = ?row.phase, "removing an inline volume that is unfinished or whose pod no longer exists");
    delete_if_unused(store, row)
}

/// The volume with this handle, if it must be deleted.
fn due_for_removal(store: &Store, handle: &str) -> Result<Option<Inline>> {
    let Some(row) = store.catalog.read()?.get::<Inline>(handle)? else { return Ok(None) };
    Ok((row.phase != Phase::Ready || is_orphaned(store, &row)?).then_some(row))
}

/// Deletes a volume. Does not wait for mounts in other places.
fn delete_if_unused(store: &Store, row: Inline) -> Result<()> {
    if was_never_used(&row) {
        return delete(store, row, super::DETACH_TIMEOUT);
    }
    if let Some(device) = blocks::device(store, &row)?
        && is_in_use(&row, &device)?
        && !is_mounted(&row, &device)?
    {
        return Err(Error::Busy(format!(
            "{} is still mounted at another path or in another mount namespace; unmount it there",
            device.path().display()
        )));
    }
    delete(store, row, DETACH_TIMEOUT)
}

/// Whether no pod has used it. Then only a tool that a killed driver started can hold the device,
/// and that tool ends by itself.
fn was_never_used(row: &Inline) -> bool {
    row.phase == Phase::Creating || row.format.is_none_or(|format| format.unfinished)
}

/// Whether the target no longer exists and the filesystem is mounted in no mount namespace.
///
/// A missing target is conclusive only if the directory that outlives pods exists and is not empty:
/// the driver may start before the disk of kubelet's directory is mounted, or without that
/// directory. An empty directory may be the mount point; kubelet's contains at least the driver's
/// own pod.
fn is_orphaned(store: &Store, row: &Inline) -> Result<bool> {
    if present(&row.target)?.is_some() || !is_nonempty(persistent_parent(&row.target))? {
        return Ok(false);
    }
    match blocks::device(store, row)? {
        Some(device) => {
            thaw_unpublished(&row.handle, &device, []);
            Ok(!is_in_use(row, &device)?)
        }
        // A volume in memory ends with its mount.
        None => Ok(true),
    }
}

/// Whether the filesystem is mounted or the device is held. An exclusive open is not used for
/// deferred volumes: it would make a concurrent mount by a container runtime fail. A virtual
/// machine that uses the device prevents its detach anyway.
fn is_in_use(row: &Inline, device: &LoopDevice) -> Result<bool> {
    match row.request.deferred {
        Some(_) => Ok(filesystem::mounted_type(device)?.is_some()),
        None => device.is_in_use(),
    }
}

/// The directory that outlives the pod: `pods` for a target that kubelet chose
/// (`pods/UID/volumes/kubernetes.io~csi/NAME/mount`), else the parent of the target.
fn persistent_parent(target: &Path) -> &Path {
    let above = |levels| target.ancestors().nth(levels);
    let named = |levels, name| above(levels).is_some_and(|path: &Path| path.ends_with(name));
    let levels = if named(2, "volumes/kubernetes.io~csi") && named(5, "pods") { 5 } else { 1 };
    above(levels).unwrap_or(target)
}

fn is_nonempty(directory: &Path) -> Result<bool> {
    match fs::read_dir(directory) {
        Ok(mut entries) => Ok(entries.next().is_some()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        result => result.map(|_| false).context(|| format!("listing {}", directory.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_persistent_parent_is_the_pods_directory_of_kubelet() {
        let target = "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/name/mount";
        assert_eq!(persistent_parent(Path::new(target)), Path::new("/var/lib/kubelet/pods"));
        for (target, parent) in [
            (
                "/a/b/uid/volumes/kubernetes.io~csi/name/mount",
                "/a/b/uid/volumes/kubernetes.io~csi/name",
            ),
            ("/tmp/target", "/tmp"),
            ("/target", "/"),
            ("/", "/"),
        ] {
            assert_eq!(persistent_parent(Path::new(target)), Path::new(parent));
        }
    }
}
