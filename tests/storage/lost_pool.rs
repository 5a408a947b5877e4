//! A pool whose filesystem has shut down, as XFS does when it cannot write its log: all calls
//! report it with the remedy, volumes can be unpublished and unstaged, and after the recovery all
//! acknowledged data exists.

use std::fs;
use std::os::unix::fs::symlink;

use csi_loopback::backend::{
    Backend, CreateVolume, Error, FsType, PoolKind, Source, VolumeRequest, check,
};
use support::kernel::{detach_loops_named, loops_named, mounts_at, shut_down_pool, wait_for};
use support::*;

#[track_caller]
fn lost<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result {
        Err(Error::Unavailable(message)) => {
            let says = ["shut down", "delete the pods", "driver"];
            assert!(says.iter().all(|words| message.contains(words)), "{message}");
            message
        }
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn assert_abnormal(backend: &Backend, volume_id: &str) {
    // An unreadable catalog is another symptom.
    match backend.volume_condition(volume_id) {
        Ok(found) => {
            assert!(found.is_abnormal() && found.message.contains("shut down"), "{found:?}")
        }
        result => drop(lost(result)),
    }
}

#[test]
fn a_shut_down_pool_is_reported_and_recovers_all_data() {
    if !have_root() {
        return;
    }
    for kind in ALL_KINDS {
        println!("with a pool of kind {kind}");
        recovered(match kind {
            PoolKind::Reflink | PoolKind::Image => Pool::new(kind),
            // On an ext4.
            PoolKind::Copy => Pool::on_small(kind, 400 * MIB, |_| {}),
        });
    }
}

fn recovered(mut pool: Pool) {
    let volume = pool.volume("v", 32 * MIB);
    let raw_volume = pool.volume("r", 8 * MIB);
    let kept = pool.volume("kept", 8 * MIB);
    let idle = pool.volume("idle", MIB);
    let ids = [&volume.id, &raw_volume.id, &kept.id, &idle.id];
    let mounted_at = pool.attach_as(&volume.id, &mounted(FsType::Ext4));
    let raw_at = pool.attach(&raw_volume.id);
    let kept_at = pool.attach(&kept.id);
    let content = pattern(1, MIB as usize);
    fs::write(mounted_at.target.join("file"), &content).unwrap();
    write_direct(&raw_at.target, 0, &content);
    let a = pool.snapshot("a", &raw_volume);
    write_direct(&raw_at.target, 4 * BLOCK, &pattern(2, BLOCK as usize));
    let b = pool.snapshot("b", &raw_volume);
    let of_filesystem = pool.snapshot("of filesystem", &volume);

    let backend = pool.backend();
    assert!(backend.healthy().is_ok());
    shut_down_pool(std::process::id());
    lost(backend.healthy());
    ids.iter().for_each(|id| assert_abnormal(backend, id));
    let stats = backend.stats(&volume.id, &mounted_at.target).unwrap();
    assert!(
        stats.condition.is_abnormal() && stats.condition.message.contains("shut down"),
        "{stats:?}"
    );
    for _ in 0..2 {
        lost(backend.create_volume(&CreateVolume { name: "new".to_owned(), request: request() }));
        lost(backend.create_snapshot("c", &idle.id));
        lost(backend.create_snapshot("d", &volume.id));
        lost(backend.create_group("g", &[volume.id.clone(), idle.id.clone()]));
        lost(backend.delete_snapshot(&a.id));
        lost(backend.delete_volume(&idle.id));
        lost(backend.expand_volume(&idle.id, 2 * MIB, 0));
        lost(backend.stage(&idle.id, &pool.scratch().join("idle"), &raw()));
        lost(backend.delta(&a.id, &b.id));
        lost(backend.healthy());
        ids.iter().for_each(|id| assert_abnormal(backend, id));
    }

    // Volumes in use can be unpublished and unstaged, also repeatedly.
    let wrong_order = backend.unstage(&volume.id, &mounted_at.staging);
    assert!(matches!(wrong_order, Err(Error::Precondition(_))), "{wrong_order:?}");
    for unknown in ["vol-unknown-0123456789abcdef", "csi-unknown"] {
        backend.unpublish(unknown, &mounted_at.target).unwrap();
        backend.unstage(unknown, &mounted_at.staging).unwrap();
        assert!(!mounts_at(&mounted_at.target).is_empty());
    }
    let linked = pool.scratch().join("linked");
    symlink(pool.scratch(), &linked).unwrap();
    for attached in [&mounted_at, &raw_at] {
        for _ in 0..2 {
            backend.unpublish(&attached.volume_id, &attached.target).unwrap();
            assert!(!attached.target.exists());
        }
        let staging = linked.join(attached.staging.file_name().unwrap());
        for _ in 0..2 {
            backend.unstage(&attached.volume_id, &staging).unwrap();
        }
        assert!(mounts_at(&attached.staging).is_empty());
        assert!(loops_named(&attached.volume_id).is_empty());
    }

    // An attached volume keeps the filesystem mounted, also during the next start, which names it.
    pool.stop();
    lost(check::check(pool.data_dir()));
    let message = lost(pool.try_start());
    let device = loops_named(&kept.id).pop().expect("it is still attached");
    assert!(message.contains(&kept.id) && message.contains(&device), "{message}");
    assert!(!message.contains(&volume.id) && !message.contains(&raw_volume.id), "{message}");
    run("umount", &[path(&kept_at.target)]);
    detach_loops_named(&kept.id);
    pool.remount();
    wait_for("the pool opens", || pool.try_start().is_ok());

    // A volume that the recovery detached needs no unstage.
    let backend = pool.backend();
    for id in ids {
        let condition = backend.volume_condition(id).unwrap();
        assert!(!condition.is_abnormal(), "{condition:?}");
    }
    assert!(backend.healthy().is_ok());
    assert_eq!(blocks(backend.delta(&a.id, &b.id).unwrap()), [4]);
    let mut written = content.clone();
    assert!(pool.read_snapshot(&a)[..written.len()] == written);
    written[4 * BLOCK as usize..][..BLOCK as usize].copy_from_slice(&pattern(2, BLOCK as usize));
    assert!(pool.read_snapshot(&b)[..written.len()] == written);
    let source = Some(Source::Snapshot(of_filesystem.id.clone()));
    let restored = pool.create("restored", VolumeRequest { source, ..request() });
    for id in [&volume.id, &restored.id] {
        let attached = pool.attach_as(id, &mounted(FsType::Ext4));
        assert!(fs::read(attached.target.join("file")).unwrap() == content);
        pool.detach(&attached);
    }
    let attached = pool.attach(&raw_volume.id);
    assert!(read_all(&attached.target)[..written.len()] == written);
    write_direct(&attached.target, 9 * BLOCK, &pattern(3, BLOCK as usize));
    let c = pool.snapshot("c", &raw_volume);
    assert_eq!(blocks(pool.backend().delta(&a.id, &c.id).unwrap()), [4, 9]);
    pool.detach(&attached);
    pool.stop_sound();
}
