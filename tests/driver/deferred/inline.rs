//! Deferred inline volumes: ready before the runtime sees them, removed with the pod, and not
//! mistaken for leftovers.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use csi_loopback::backend::{Content, FsType, InlineRequest, PublishInline};

use super::*;
use support::kernel::wait_for;

const HANDLE: &str = "csi-0123456789abcdef";

fn request(fs_type: Option<FsType>) -> InlineRequest {
    let access = Access::Mount { fs_type, flags: Vec::new(), group: None };
    InlineRequest {
        size_bytes: Some(BYTES),
        capability: Capability { access, mode: AccessMode::SingleNodeWriter },
        readonly: false,
        in_memory: false,
        read_only_content: false,
        sector_size: Default::default(),
        deferred: Some(Deferral::default()),
    }
}

/// A target as kubelet chooses it, next to that of another pod.
fn pod(rig: &Rig) -> PathBuf {
    let pods = rig.target("");
    fs::create_dir_all(pods.join("other")).unwrap();
    rig.target("uid/volumes/kubernetes.io~csi/v/mount")
}

fn publish(rig: &Rig, target: &Path, request: &InlineRequest) -> Result<()> {
    let content = Content::default();
    rig.backend().publish_inline(&PublishInline {
        handle: HANDLE,
        target,
        request,
        content: &content,
    })
}

/// Collects until the volume is gone: a run waits half a second for a device to release its blocks,
/// and then leaves the volume to the next run.
fn collected(rig: &Rig, target: &Path) {
    wait_for("a collection removes it", || {
        rig.backend().collect_inline().unwrap();
        rig.backend().inline_usage().unwrap() == (0, 0, 0)
    });
    gone(rig, target);
}

fn gone(rig: &Rig, target: &Path) {
    assert!(!target.exists() && rig.runtime.state().entries.is_empty());
    assert_eq!(rig.backend().inline_usage().unwrap(), (0, 0, 0));
}

#[test]
fn a_deferred_inline_volume_is_never_mounted_on_the_host() {
    for_each_filesystem(|rig, fs_type| {
        let target = pod(rig);
        let wanted = request(Some(fs_type));
        publish(rig, &target, &wanted).unwrap();
        let entry = rig.runtime.entry(&target).unwrap();
        assert_eq!(entry.fs_type, fs_type);
        let unclaimed = rig.backend().stats(HANDLE, &target).unwrap();
        assert!(unclaimed.usage.is_none() && unclaimed.condition.is_abnormal());
        let container = rig.container(&target);
        let root = fs::metadata(container.file("")).unwrap();
        assert_eq!(root.permissions().mode() & 0o777, 0o777);
        assert_eq!(fs::read_dir(container.file("")).unwrap().count(), 0);
        fs::write(container.file("file"), "x").unwrap();
        // Repeated, after a restart, and after collections: it remains with its content.
        rig.restart(true);
        publish(rig, &target, &wanted).unwrap();
        rig.backend().collect_inline().unwrap();
        assert!(container.file("file").exists() && !is_mounted_on_host(&entry.device));
        let stats = rig.backend().stats(HANDLE, &target).unwrap();
        assert!(!stats.condition.is_abnormal() && total(&stats.usage.unwrap()) > BYTES / 2);
        assert!(rig.backend().is_deferred(HANDLE, &target).unwrap());
        assert!(!rig.backend().volume_condition(HANDLE).unwrap().is_abnormal());
        drop(container);
        // No container has it mounted, but it is not a leftover.
        rig.backend().collect_inline().unwrap();
        assert!(rig.backend().inline(HANDLE).unwrap().is_some());
        rig.backend().unpublish(HANDLE, &target).unwrap();
        gone(rig, &target);
    });
}

#[test]
#[ignore = "full tier"]
fn a_deferred_inline_volume_in_use_is_not_removed() {
    with_rig(|rig| {
        let target = pod(rig);
        publish(rig, &target, &request(None)).unwrap();
        let container = rig.container(&target);
        fs::create_dir_all(target.join("sub/path")).unwrap();
        refused(rig.backend().unpublish(HANDLE, &target), "still mounted");
        rig.backend().collect_inline().unwrap();
        fs::write(container.file("file"), "x").unwrap();
        assert!(rig.runtime.entry(&target).is_some());
        drop(container);
        // The requested unpublish completes without another call.
        collected(rig, &target);
    });
}

#[test]
fn an_orphaned_inline_volume_is_removed_after_its_container() {
    with_rig(|rig| {
        let target = pod(rig);
        publish(rig, &target, &request(None)).unwrap();
        let container = rig.container(&target);
        support::kernel::unmount(&target);
        fs::remove_dir_all(rig.target("uid")).unwrap();
        rig.backend().collect_inline().unwrap();
        assert!(rig.backend().inline(HANDLE).unwrap().is_some(), "a container has it");
        drop(container);
        collected(rig, &target);
    });
}

#[test]
fn a_deferred_inline_volume_is_published_again_after_a_reboot() {
    with_rig(|rig| {
        let target = pod(rig);
        let deferral = Deferral { group: Some(4059), policy: None };
        let wanted = InlineRequest { deferred: Some(deferral), ..request(None) };
        publish(rig, &target, &wanted).unwrap();
        assert_eq!(rig.runtime.entry(&target).unwrap().deferral, deferral);
        let container = rig.container(&target);
        // The group is left to the runtime.
        assert_eq!(fs::metadata(container.file("")).unwrap().gid(), 0);
        fs::write(container.file("file"), "x").unwrap();
        drop(container);
        let id = rig.backend().inline(HANDLE).unwrap().unwrap().id;
        rig.pool.stop();
        support::kernel::detach_loops_named(&id);
        rig.runtime.state().entries.clear();
        rig.pool.start();
        assert!(rig.backend().inline(HANDLE).unwrap().is_some());
        publish(rig, &target, &wanted).unwrap();
        assert!(rig.container(&target).file("file").exists());
        rig.backend().unpublish(HANDLE, &target).unwrap();
        gone(rig, &target);
    });
}

#[test]
fn a_failed_deferral_of_an_inline_volume_leaves_nothing() {
    with_rig(|rig| {
        let target = pod(rig);
        rig.runtime.state().unavailable = true;
        assert!(publish(rig, &target, &request(None)).is_err());
        rig.runtime.state().unavailable = false;
        collected(rig, &target);
        // A driver without the feature refuses it, but removes it.
        publish(rig, &target, &request(None)).unwrap();
        rig.restart(false);
        refused(publish(rig, &target, &request(None)), "--enable-defer-fs-ops");
        refused(rig.backend().stats(HANDLE, &target), "--enable-defer-fs-ops");
        rig.backend().unpublish(HANDLE, &target).unwrap();
        assert!(!target.exists());
        refused(publish(rig, &target, &request(None)), "--enable-defer-fs-ops");
        assert_eq!(rig.backend().inline_usage().unwrap(), (0, 0, 0));
        rig.runtime.state().entries.clear();
        rig.restart(true);
    });
}
