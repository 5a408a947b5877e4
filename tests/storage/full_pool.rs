//! A full pool refuses operations that need space with a clear error, leaves nothing unfinished,
//! keeps its data, and works again after a deletion.

use std::time::{Duration, Instant};

use csi_loopback::backend::{Backend, CreateVolume, Error, PoolKind, Source, VolumeRequest, check};
use support::full::*;
use support::*;

fn create(backend: &Backend, name: &str, source: Option<Source>) -> Result<String, Error> {
    let request = VolumeRequest { required_bytes: 0, source, ..request() };
    backend.create_volume(&CreateVolume { name: name.to_owned(), request }).map(|made| made.id)
}

/// The objects in the API.
fn shown(backend: &Backend) -> (Vec<String>, Vec<String>) {
    let volumes = backend.volumes(None, 0).unwrap().items.into_iter().map(|row| row.id);
    let snapshots = backend.snapshots(&Default::default(), None, 0).unwrap().items;
    (volumes.collect(), snapshots.into_iter().map(|row| row.id).collect())
}

#[test]
fn a_full_pool_keeps_its_data_and_recovers_by_deletions() {
    if !have_root() {
        return;
    }
    let mut pool = Pool::with(PoolKind::Image, |config| config.pool_size = Some(400 * MIB));
    let large = pool.volume("large", GIB);
    let small = pool.volume("small", 4 * MIB);
    let filler = pool.volume("filler", GIB);
    let large_at = pool.attach(&large.id);
    let small_at = pool.attach(&small.id);
    let filler_at = pool.attach(&filler.id);
    let content = [pattern(1, 20 << 20), pattern(2, 2 << 20)];
    write_direct(&large_at.target, 0, &content[0]);
    write_direct(&small_at.target, 0, &content[1]);
    let a = pool.snapshot("a", &large);
    let s = pool.snapshot("s", &small);
    write_direct(&large_at.target, 0, &pattern(3, 10 << 20));
    let b = pool.snapshot("b", &large);
    fill(&filler_at.target, 0);

    let before = shown(pool.backend());
    for round in 0..3 {
        let backend = pool.backend();
        let name = format!("new-{round}");
        exhausted(create(backend, &name, None), "a volume");
        let sources = [
            Source::Volume(large.id.clone()),
            Source::Volume(small.id.clone()),
            Source::Snapshot(a.id.clone()),
        ];
        for source in sources {
            exhausted(create(backend, &name, Some(source)), "a volume from a source");
        }
        exhausted(backend.create_snapshot(&name, &large.id), "a snapshot");
        exhausted(backend.create_snapshot(&name, &small.id), "a snapshot");
        // One volume: only one of several raw volumes may be written to. XFS may have found a few
        // free blocks: enough for an inode and shared extents.
        match backend.create_group(&name, std::slice::from_ref(&large.id)) {
            Ok(made) => backend.delete_group(&made.group.id, &[]).unwrap(),
            refused => exhausted(refused, "a group snapshot"),
        }
        exhausted(backend.expand_volume(&small.id, 8 * MIB, 0), "an expansion");
        assert_eq!(shown(backend), before);
    }
    let backend = pool.backend();
    assert!(backend.healthy().is_ok());
    assert_eq!(backend.capacity().unwrap().available, 0);
    let condition = backend.volume_condition(&small.id).unwrap();
    assert!(condition.is_abnormal() && condition.message.contains("nearly full"), "{condition:?}");
    // Queries need no space, and neither do unstage and stage.
    let delta: Vec<u64> = (0..10 * MIB / BLOCK).collect();
    assert_eq!(blocks(backend.delta(&a.id, &b.id).unwrap()), delta);
    pool.detach(&small_at);
    let small_at = pool.attach(&small.id);
    assert_eq!(read_all(&small_at.target)[..content[1].len()], content[1]);
    // XFS frees removed blocks in the background.
    let frees = |pool: &Pool, bytes: u64| {
        let room = || pool.backend().pool_room().unwrap().available;
        let deadline = Instant::now() + Duration::from_secs(10);
        while room() < bytes && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(room() >= bytes, "{} are free, not {bytes}", room());
    };
    pool.backend().delete_snapshot(&a.id).unwrap();
    frees(&pool, 9 * MIB);
    // Nothing unfinished remains.
    for attached in [&large_at, &small_at, &filler_at] {
        pool.detach(attached);
    }
    pool.stop();
    assert_eq!(check::check(pool.data_dir()).unwrap().findings, []);
    pool.start();
    pool.backend().delete_volume(&filler.id).unwrap();
    frees(&pool, 200 * MIB);
    // Everything works again, and existing data is unchanged.
    pool.volume("new-0", GIB);
    let c = pool.snapshot("new-0", &large);
    assert!(blocks(pool.backend().delta(&b.id, &c.id).unwrap()).is_empty());
    assert_eq!(blocks(pool.backend().delta(&a.id, &c.id).unwrap()), delta);
    let read = pool.read_snapshot(&s);
    assert_eq!(read[..content[1].len()], content[1]);
    let read = pool.read_snapshot(&b);
    assert_eq!(read[..10 << 20], pattern(3, 10 << 20));
    assert_eq!(read[10 << 20..20 << 20], content[0][10 << 20..]);
    drop(read);
    pool.stop();
    assert_eq!(check::check(pool.data_dir()).unwrap().findings, []);
}

/// Otherwise nothing could be deleted.
#[test]
fn a_pool_without_a_free_block_can_be_opened_and_checked() {
    if !have_root() {
        return;
    }
    let mut pool = Pool::with(PoolKind::Image, |config| config.pool_size = Some(400 * MIB));
    let filler = pool.volume("filler", GIB);
    let attached = pool.attach(&filler.id);
    let end = fill(&attached.target, 0);
    for free in 0..16 {
        pool.restart();
        assert_eq!(shown(pool.backend()).0, [filler.id.as_str()], "{free} blocks free");
        discard(&attached.target, (end - free - 1) * BLOCK, BLOCK);
    }
    pool.detach(&attached);
    pool.stop();
    assert_eq!(check::check(pool.data_dir()).unwrap().findings, []);
    pool.start();
    pool.backend().delete_volume(&filler.id).unwrap();
}

/// With different amounts of free space, taking a snapshot fails before the copy, in the copy, in
/// the record, or succeeds.
#[test]
fn a_snapshot_that_fills_the_pool_leaves_nothing() {
    if !have_root() {
        return;
    }
    let mut pool = Pool::with(PoolKind::Image, |config| {
        config.pool_size = Some(400 * MIB);
        // With larger blocks, a few free ones are enough for everything.
        config.pool_block_size = Some(BLOCK);
    });
    let volume = pool.volume("v", 64 * MIB);
    let filler = pool.volume("filler", GIB);
    let filler_at = pool.attach(&filler.id);
    let attached = pool.attach(&volume.id);
    let device = &attached.target;
    // Many extents, so that their maps need space.
    for number in 0..3000 {
        write_direct(device, number * 5 * BLOCK, &pattern(number, BLOCK as usize));
    }
    let before = pool.snapshot("before", &volume);
    write_direct(device, 2 * BLOCK, &pattern(7, BLOCK as usize));
    let end = fill(&filler_at.target, 0);
    // New files need no block while free inodes exist.
    let spare = (0..100).take_while(|number| {
        match pool.backend().create_snapshot(&format!("spare-{number}"), &volume.id) {
            Ok(_) => true,
            Err(Error::Exhausted(_)) => false,
            Err(other) => panic!("{other}"),
        }
    });
    assert!(spare.count() < 100, "it always fits");
    let shown_before = shown(pool.backend());
    let (mut freed, mut refusals) = (0, std::collections::BTreeSet::new());
    let made = loop {
        let group = [volume.id.clone()];
        match pool.backend().create_snapshot("s", &volume.id) {
            Ok(made) => break made,
            Err(Error::Exhausted(message)) => {
                let places = ["snapshots/", "records/", "cloning", "catalog"];
                refusals.extend(places.into_iter().filter(|place| message.contains(place)));
            }
            Err(other) => panic!("{freed} blocks free: {other}"),
        }
        if let Ok(made) = pool.backend().create_group("g", &group) {
            pool.backend().delete_group(&made.group.id, &[]).unwrap();
        }
        assert_eq!(shown(pool.backend()), shown_before, "{freed} blocks free");
        freed += 4;
        discard(&filler_at.target, (end - freed) * BLOCK, 4 * BLOCK);
        assert!(freed < 4000, "it never fits");
    };
    println!("report: a snapshot was refused at {refusals:?} with less than {freed} blocks free");
    assert!(!refusals.is_empty() && freed > 0, "nothing was refused");
    assert_eq!(blocks(pool.backend().delta(&before.id, &made.id).unwrap()), [2]);
    pool.detach(&attached);
    pool.detach(&filler_at);
    pool.backend().delete_volume(&filler.id).unwrap();
    pool.stop();
    assert_eq!(check::check(pool.data_dir()).unwrap().findings, []);
}

/// On a copy pool there is no space for the copy itself.
#[test]
fn a_copy_that_does_not_fit_leaves_nothing() {
    if !have_root() {
        return;
    }
    let directory = tempfile::TempDir::with_prefix("csi-loopback-").unwrap();
    let _small = Small::mount(directory.path(), 128 * MIB);
    let mut pool = Pool::with(PoolKind::Copy, |config| {
        config.data_dir = directory.path().join("small/data");
    });
    let volume = pool.volume("v", 64 * MIB);
    let attached = pool.attach(&volume.id);
    let content = pattern(1, 30 << 20);
    write_direct(&attached.target, 0, &content);
    let a = pool.snapshot("a", &volume);
    write_direct(&attached.target, 0, &pattern(2, 10 << 20));
    fill(&attached.target, 30 * 256);
    let before = shown(pool.backend());
    for round in 0..3 {
        let name = format!("s{round}");
        exhausted(pool.backend().create_snapshot(&name, &volume.id), "a snapshot");
        exhausted(
            create(pool.backend(), &name, Some(Source::Volume(volume.id.clone()))),
            "a clone",
        );
        assert_eq!(shown(pool.backend()), before);
    }
    pool.detach(&attached);
    pool.stop();
    assert_eq!(check::check(pool.data_dir()).unwrap().findings, []);
    pool.start();
    pool.backend().delete_volume(&volume.id).unwrap();
    assert!(pool.backend().pool_room().unwrap().available > 60 * MIB);
    let read = pool.read_snapshot(&a);
    assert_eq!(read[..content.len()], content);
    drop(pool);
}
