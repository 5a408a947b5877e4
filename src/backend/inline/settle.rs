//! Volumes that nobody will unpublish: what a crash left half-way, and what belonged to pods that vanished.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use super::super::error::{Context, Error, Result};
use super::super::filesystem;
use super::super::loop_device::LoopDevice;
use super::super::model::{Inline, Phase};
use super::super::store::Store;
use super::super::target::present;
use super::{blocks, is_shown, lock, take_away};

/// How long one device may take to let go of its blocks. The next round comes soon, and others wait for this one.
const PATIENCE: Duration = Duration::from_millis(500);

/// One round: whatever was on its way in or out goes, and so does what nobody uses any more. What is under way is left
/// to whoever is at it.
pub fn collect(store: &Store) -> Result<()> {
    for row in store.catalog.read()?.select(|_: &Inline| true)? {
        // One volume in trouble does not keep the others waiting.
        if let Err(error) = look_after(store, &row) {
            tracing::error!(volume = row.handle, %error, "an inline volume is not settled yet; the next round tries again");
        }
    }
    Ok(())
}

fn look_after(store: &Store, Inline { handle, target, .. }: &Inline) -> Result<()> {
    // A look before the lock is taken: nobody's call is refused for a volume that is as it should be.
    if overdue(store, handle)?.is_none() {
        return Ok(());
    }
    let Ok(_lock) = lock(store, handle, target) else { return Ok(()) };
    let Some(row) = overdue(store, handle)? else { return Ok(()) };
    tracing::info!(volume = handle, phase = ?row.phase, "removing an inline volume that is unfinished or whose pod is gone");
    take_away_if_free(store, row)
}

/// The volume of this handle, if it is there and has to go.
fn overdue(store: &Store, handle: &str) -> Result<Option<Inline>> {
    let Some(row) = store.catalog.read()?.get::<Inline>(handle)? else { return Ok(None) };
    Ok((row.phase != Phase::Ready || is_abandoned(store, &row)?).then_some(row))
}

/// Does not wait for who has it mounted elsewhere.
fn take_away_if_free(store: &Store, row: Inline) -> Result<()> {
    if was_never_seen(&row) {
        return take_away(store, row, super::PATIENCE);
    }
    if let Some(device) = blocks::device(store, &row)?
        && is_held(&row, &device)?
        && !is_shown(&row, &device)?
    {
        return Err(Error::Busy(format!(
            "{} is still mounted in another place or mount namespace; unmount it there",
            device.path().display()
        )));
    }
    take_away(store, row, PATIENCE)
}

/// Whether no pod can have it: then who holds it is a tool that a dead driver has started, and will end.
fn was_never_seen(row: &Inline) -> bool {
    row.phase == Phase::Creating || row.format.is_none_or(|format| format.unfinished)
}

/// Whether the place where its pod had it is gone, and nobody has its filesystem mounted, in whatever mount namespace.
///
/// A target that is not there proves something only where the directory that outlives pods can be seen: a driver may
/// be started before the disk of kubelet's directory is mounted, or without that directory. An empty one is taken
/// for the mount point of one that is to come: in kubelet's there is at least the driver's own pod.
fn is_abandoned(store: &Store, row: &Inline) -> Result<bool> {
    if present(&row.target)?.is_some() || !holds_something(outliving(&row.target))? {
        return Ok(false);
    }
    match blocks::device(store, row)? {
        Some(device) => Ok(!is_held(row, &device)?),
        // With the target the mount is gone, which alone keeps what is in memory.
        None => Ok(true),
    }
}

/// Whether somebody has its filesystem mounted. To open a device for oneself, which is the way to ask, would fail a
/// container runtime that mounts it at that moment; a virtual machine that has it keeps its blocks from going in any
/// case.
fn is_held(row: &Inline, device: &LoopDevice) -> Result<bool> {
    match row.request.deferred {
        Some(_) => Ok(filesystem::live(device)?.is_some()),
        None => device.is_held(),
    }
}

/// The directory that is there before and after the pod: `pods`, where kubelet chose the target
/// (`pods/UID/volumes/kubernetes.io~csi/NAME/mount`), else the one that the target is in.
fn outliving(target: &Path) -> &Path {
    let above = |levels| target.ancestors().nth(levels);
    let named = |levels, name| above(levels).is_some_and(|path: &Path| path.ends_with(name));
    let levels = if named(2, "volumes/kubernetes.io~csi") && named(5, "pods") { 5 } else { 1 };
    above(levels).unwrap_or(target)
}

fn holds_something(directory: &Path) -> Result<bool> {
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
    fn a_pod_is_looked_for_where_kubelet_keeps_pods() {
        let target = "/var/lib/kubelet/pods/uid/volumes/kubernetes.io~csi/name/mount";
        assert_eq!(outliving(Path::new(target)), Path::new("/var/lib/kubelet/pods"));
        for (target, parent) in [
            (
                "/a/b/uid/volumes/kubernetes.io~csi/name/mount",
                "/a/b/uid/volumes/kubernetes.io~csi/name",
            ),
            ("/tmp/target", "/tmp"),
            ("/target", "/"),
            ("/", "/"),
        ] {
            assert_eq!(outliving(Path::new(target)), Path::new(parent));
        }
    }
}
