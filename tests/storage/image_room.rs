//! A pool image and its filesystem: an allocated image needs no space from the filesystem, a sparse
//! one has a reserve, and both can grow.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use csi_loopback::backend::{Config, Error, ImageStatus, PoolChoice, PoolKind};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::statvfs::statvfs;
use support::full::*;
use support::kernel::wait_for;
use support::*;

/// A pool in an image on a small ext4. Reports a skip if the machine cannot run it.
fn on_small(host_bytes: u64, image_bytes: u64, sparse: bool) -> Option<Pool> {
    let configure = |config: &mut Config| {
        (config.pool_size, config.pool_sparse) = (Some(image_bytes), sparse);
    };
    have_root().then(|| Pool::on_small(PoolKind::Image, host_bytes, configure))
}

/// An image that should be allocated.
fn of_400_mib(config: &mut Config) {
    (config.pool_size, config.pool_sparse) = (Some(400 * MIB), false);
}

/// The filesystem below the pool.
fn host(pool: &Pool) -> PathBuf {
    pool.data_dir().parent().unwrap().to_owned()
}

fn reserve(pool: &Pool) -> PathBuf {
    pool.data_dir().join("pool.reserve")
}

fn image(pool: &Pool) -> ImageStatus {
    pool.backend().pool_status().unwrap().image.unwrap()
}

fn available(host: &Path) -> u64 {
    let stat = statvfs(host).unwrap();
    stat.blocks_available() * stat.fragment_size()
}

fn marker(pool: &Pool) -> String {
    fs::read_to_string(pool.data_dir().join("pool.json")).unwrap()
}

#[test]
fn an_allocated_image_works_on_a_full_filesystem() {
    let Some(mut pool) = on_small(600 * MIB, 400 * MIB, false) else { return };
    let volume = pool.volume("v", 256 * MIB);
    let attached = pool.attach(&volume.id);
    write_direct(&attached.target, 0, &pattern(1, 1 << 20));
    let a = pool.snapshot("a", &volume);
    let filler = HostFiller::all_of(&host(&pool));
    let status = image(&pool);
    assert!(status.allocated && status.available_below < MIB, "{status:?}");
    // Nearly all of the pool, in blocks that were never written.
    for part in 0..200 {
        write_direct(&attached.target, (8 + part) * MIB, &pattern(part, 1 << 20));
    }
    let condition = pool.backend().volume_condition(&volume.id).unwrap();
    assert!(!condition.is_abnormal(), "{condition:?}");
    let b = pool.snapshot("b", &volume);
    let changed: Vec<u64> = (8 * MIB / BLOCK..208 * MIB / BLOCK).collect();
    assert_eq!(blocks(pool.backend().delta(&a.id, &b.id).unwrap()), changed);
    pool.restart();
    assert!(image(&pool).allocated);
    write_direct(&attached.target, 4 * MIB, &pattern(7, 1 << 20));
    assert!(read_all(&attached.target)[(8 * MIB) as usize..][..1 << 20] == pattern(0, 1 << 20));
    // A pod that fills the pool gets ENOSPC from the pool, and can continue after space is freed.
    let large = pool.volume("large", 256 * MIB);
    let large_at = pool.attach(&large.id);
    let end = fill(&large_at.target, 0);
    assert!(end < 256 * MIB / BLOCK, "the pool is never full");
    exhausted(pool.backend().create_snapshot("c", &volume.id), "a snapshot");
    pool.restart();
    pool.backend().delete_snapshot(&a.id).unwrap();
    pool.detach(&large_at);
    pool.backend().delete_volume(&large.id).unwrap();
    wait_for("space is available again", || {
        pool.backend().pool_room().unwrap().available > 100 * MIB
    });
    pool.snapshot("c", &volume);
    // The deleted blocks remain allocated in the image.
    pool.detach(&attached);
    pool.backend().delete_volume(&volume.id).unwrap();
    pool.restart();
    assert!(image(&pool).allocated && image(&pool).available_below < MIB);
    drop(filler);
    pool.stop_sound();
}

#[test]
fn an_image_larger_than_the_free_space_is_refused() {
    let Some(mut pool) = on_small(700 * MIB, 400 * MIB, false) else { return };
    let data_dir = host(&pool).join("other");
    let before = available(&host(&pool));
    for kind in [PoolChoice::Kind(PoolKind::Image), PoolChoice::Auto] {
        pool.stop();
        pool.configure(|config| {
            config.data_dir = data_dir.clone();
            config.pool = kind;
            config.pool_size = Some(GIB);
        });
        let Err(Error::Exhausted(message)) = pool.try_start() else { panic!("{kind:?}") };
        let has = message.split("has ").nth(1).and_then(|rest| rest.split(';').next());
        let has: u64 = has.unwrap().parse().unwrap();
        assert!(has.abs_diff(before) < MIB && message.contains("1073741824"), "{message}");
        assert!(message.contains("--pool-size"), "{message}");
        let left: Vec<_> =
            fs::read_dir(&data_dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["lock"]);
    }
    assert!(before - available(&host(&pool)) < MIB);
}

#[test]
fn a_default_image_is_allocated_with_half_of_the_free_space() {
    if !have_root() {
        return;
    }
    let mut room = 0;
    let pool = Pool::on_small(PoolKind::Image, 900 * MIB, |config| {
        room = available(config.data_dir.parent().unwrap());
        (config.pool_size, config.pool_sparse) = (None, false);
    });
    let status = image(&pool);
    assert!(status.allocated && status.size.abs_diff(room / 2) < MIB, "{room}: {status:?}");
    assert!(marker(&pool).contains(r#""allocated":true"#));
}

#[test]
fn a_sparse_pool_remains_sparse_unless_its_marker_changes() {
    let Some(mut pool) = on_small(700 * MIB, 400 * MIB, true) else { return };
    assert_eq!(marker(&pool), r#"{"version":1,"kind":"image"}"#);
    let volume = pool.volume("v", 64 * MIB);
    let attached = pool.attach(&volume.id);
    write_direct(&attached.target, 0, &pattern(1, 20 << 20));
    pool.detach(&attached);
    let a = pool.snapshot("a", &volume);
    pool.configure(|config| config.pool_sparse = false);
    pool.restart();
    assert!(!image(&pool).allocated);
    let path = pool.data_dir().join("pool.img");
    assert!(reserve(&pool).exists());
    let used = || fs::metadata(&path).unwrap().blocks() * 512;
    assert!(used() < 200 * MIB);
    // Not while a volume is attached: its mount of the pool discards blocks.
    let attached = pool.attach(&volume.id);
    pool.stop();
    let json = pool.data_dir().join("pool.json");
    fs::write(json, r#"{"version":1,"kind":"image","allocated":true}"#).unwrap();
    pool.start();
    assert!(!image(&pool).allocated && reserve(&pool).exists() && used() < 200 * MIB);
    pool.detach(&attached);
    pool.restart();
    assert!(image(&pool).allocated && used() >= 400 * MIB);
    assert!(!reserve(&pool).exists());
    let _filler = HostFiller::all_of(&host(&pool));
    let attached = pool.attach(&volume.id);
    write_direct(&attached.target, 30 * MIB, &pattern(2, 30 << 20));
    let read = read_all(&attached.target);
    assert!(
        read[..20 << 20] == pattern(1, 20 << 20)
            && read[30 << 20..60 << 20] == pattern(2, 30 << 20)
    );
    let b = pool.snapshot("b", &volume);
    let changed: Vec<u64> = (30 * MIB / BLOCK..60 * MIB / BLOCK).collect();
    assert_eq!(blocks(pool.backend().delta(&a.id, &b.id).unwrap()), changed);
    pool.detach(&attached);
}

/// As after a sparse copy of the image.
#[test]
fn an_allocated_image_with_holes_is_allocated_again() {
    let Some(mut pool) = on_small(700 * MIB, 400 * MIB, false) else { return };
    let volume = pool.volume("v", 64 * MIB);
    pool.stop();
    let path = pool.data_dir().join("pool.img");
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let file = File::options().write(true).open(&path).unwrap();
    // This range contains no XFS data: its last allocation group has only a header.
    fallocate(&file, punch, 380 * MIB as i64, 20 * MIB as i64).unwrap();
    drop(file);
    let filler = HostFiller::all_of(&host(&pool));
    pool.start();
    let status = image(&pool);
    assert!(!status.allocated, "{status:?}");
    assert_eq!(pool.backend().pool_room().unwrap().available, status.available_below);
    let condition = pool.backend().volume_condition(&volume.id).unwrap();
    assert!(
        condition.is_abnormal() && condition.message.contains("not allocated"),
        "{condition:?}"
    );
    drop(filler);
    pool.restart();
    assert!(image(&pool).allocated);
    pool.snapshot("a", &volume);
}

/// `cp` on a filesystem that shares blocks.
fn copy_image(pool: &Pool) -> PathBuf {
    let copy = host(pool).join("copy.img");
    run("cp", &["--reflink=always", path(&pool.data_dir().join("pool.img")), path(&copy)]);
    copy
}

/// What the driver does every second.
fn unshare(pool: &Pool) {
    wait_for("the image has its own blocks", || {
        pool.backend().unshare_image().unwrap();
        image(pool).allocated
    });
}

#[test]
fn a_copied_image_gets_its_own_blocks_or_is_reported() {
    if !have_root() {
        return;
    }
    let directory = directory();
    let below = Some(ImageFs::xfs(directory.path(), 1200 * MIB));
    let mut pool = Pool::on(directory, below, PoolKind::Image, of_400_mib);
    let volume = pool.volume("v", 64 * MIB);
    let mut attached = pool.attach(&volume.id);
    // Durable: the device may use the page cache.
    let write = |attached: &Attached, seed| {
        write_direct(&attached.target, 0, &pattern(seed, 60 << 20));
        File::open(&attached.target).unwrap().sync_all().unwrap();
    };
    let healthy = |pool: &Pool| {
        let backend = pool.backend();
        let of_volume = backend.volume_condition(&volume.id).unwrap();
        let of_pool = backend.pool_status().unwrap().condition;
        assert_eq!(of_volume.problem, of_pool.problem);
        assert!(!of_pool.is_abnormal() || of_pool.message.contains("shares"), "{of_pool:?}");
        !of_pool.is_abnormal()
    };
    write(&attached, 1);
    assert!(image(&pool).allocated);
    // With room below, the shared blocks are copied.
    let copy = copy_image(&pool);
    let before = fs::read(&copy).unwrap();
    assert!(!image(&pool).allocated && image(&pool).shared > 50 * MIB, "{:?}", image(&pool));
    assert!(healthy(&pool));
    unshare(&pool);
    let mut filler = Some(HostFiller::all_of(&host(&pool)));
    write(&attached, 2);
    assert!(read_all(&attached.target)[..60 << 20] == pattern(2, 60 << 20));
    assert!(fs::read(&copy).unwrap() == before, "the copy has changed");
    filler.take();
    // Without room they are reported, also after a restart and without a use of the volume.
    fs::remove_file(&copy).unwrap();
    copy_image(&pool);
    // Enough for the log of the pool's XFS, too little for the shared blocks.
    filler = Some(HostFiller::new(&host(&pool), 40 * MIB));
    for _ in 0..2 {
        pool.backend().unshare_image().unwrap();
        assert!(!image(&pool).allocated && image(&pool).shared > 50 * MIB, "{:?}", image(&pool));
        assert!(!healthy(&pool));
        pool.detach(&attached);
        pool.restart();
        attached = pool.attach(&volume.id);
    }
    filler.take();
    unshare(&pool);
    assert!(healthy(&pool) && !reserve(&pool).exists());
    let _filler = HostFiller::all_of(&host(&pool));
    write(&attached, 3);
    assert!(read_all(&attached.target)[..60 << 20] == pattern(3, 60 << 20));
    pool.detach(&attached);
}

#[test]
fn the_reserve_allows_deletions_on_a_full_filesystem() {
    let Some(mut pool) = on_small(900 * MIB, 4 * GIB, true) else { return };
    let path = reserve(&pool);
    let reserve = || fs::metadata(&path).map(|found| found.blocks() * 512);
    assert!(reserve().unwrap() >= 64 * MIB);
    let volume = pool.volume("v", 64 * MIB);
    let volumes: Vec<String> =
        (0..20).map(|number| pool.volume(&format!("v{number}"), MIB).id).collect();
    pool.backend().relieve_pressure().unwrap();
    assert!(!pool.backend().volume_condition(&volume.id).unwrap().is_abnormal());
    let filler = HostFiller::all_of(&host(&pool));
    pool.backend().relieve_pressure().unwrap();
    let condition = pool.backend().volume_condition(&volume.id).unwrap();
    assert!(condition.is_abnormal() && condition.message.contains("I/O errors"), "{condition:?}");
    // The program that fills the disk does not get the reserve. Deletions do, as much as each
    // needs.
    assert!(reserve().unwrap() >= 64 * MIB);
    assert_eq!(image(&pool).available_below, 0);
    for id in &volumes {
        pool.backend().delete_volume(id).unwrap();
    }
    let left = reserve().unwrap_or(0);
    println!("report: {} of 64 MiB of the reserve remained", left / MIB);
    pool.backend().relieve_pressure().unwrap();
    assert_eq!(reserve().unwrap_or(0), left, "the reserve is not used by the filler");
    drop(filler);
    pool.backend().relieve_pressure().unwrap();
    assert!(reserve().unwrap() >= 64 * MIB);
    assert!(!pool.backend().volume_condition(&volume.id).unwrap().is_abnormal());
    // Filled while no driver runs: the start releases a part.
    pool.stop();
    let filler = HostFiller::all_of(&host(&pool));
    assert!(available(&host(&pool)) < MIB);
    pool.start();
    assert!(reserve().unwrap() < 64 * MIB);
    assert_eq!(pool.backend().volumes(None, 0).unwrap().items.len(), 1);
    pool.backend().delete_snapshot(&pool.snapshot("b", &volume).id).unwrap();
    pool.backend().delete_volume(&volume.id).unwrap();
    drop(filler);
    pool.restart();
    assert!(reserve().unwrap() >= 64 * MIB);
}

#[test]
fn an_image_on_a_copy_on_write_filesystem_is_sparse() {
    if !have_root() {
        return;
    }
    let directory = directory();
    let below = Some(ImageFs::btrfs(directory.path(), GIB));
    let mut pool = Pool::on(directory, below, PoolKind::Image, of_400_mib);
    for _ in 0..2 {
        let status = image(&pool);
        assert!(!status.allocated && status.size == 400 * MIB, "{status:?}");
        assert_eq!(fs::metadata(reserve(&pool)).unwrap().len(), 64 * MIB);
        pool.restart();
    }
    assert!(marker(&pool).contains(r#""allocated":true"#));
}

#[test]
fn an_allocated_image_grows_while_volumes_are_attached() {
    let Some(mut pool) = on_small(GIB, 400 * MIB, false) else { return };
    let volume = pool.volume("v", 600 * MIB);
    let attached = pool.attach(&volume.id);
    write_direct(&attached.target, 0, &pattern(1, 8 << 20));
    let a = pool.snapshot("a", &volume);
    let room = pool.backend().pool_room().unwrap();
    for _ in 0..2 {
        let status = pool.backend().grow_pool(700 * MIB).unwrap();
        assert_eq!(status.image.unwrap().size, 700 * MIB);
        assert!(status.room.total >= room.total + 290 * MIB, "{status:?}");
    }
    let filler = HostFiller::all_of(&host(&pool));
    for part in 0..500 {
        write_direct(&attached.target, (8 + part) * MIB, &pattern(part, 1 << 20));
    }
    let b = pool.snapshot("b", &volume);
    let changed: Vec<u64> = (8 * MIB / BLOCK..508 * MIB / BLOCK).collect();
    assert_eq!(blocks(pool.backend().delta(&a.id, &b.id).unwrap()), changed);
    drop(filler);

    let before = (available(&host(&pool)), image(&pool));
    let refused = pool.backend().grow_pool(2 * GIB).unwrap_err();
    assert!(matches!(refused, Error::Exhausted(_)), "{refused}");
    let refused = pool.backend().grow_pool(500 * MIB).unwrap_err();
    assert!(matches!(refused, Error::OutOfRange(_)), "{refused}");
    assert_eq!((available(&host(&pool)), image(&pool)), before);
    // The driver's flags still have the original size of the pool.
    pool.restart();
    assert_eq!(image(&pool).size, 700 * MIB);
    assert!(image(&pool).allocated);
    pool.detach(&attached);
}

#[test]
fn a_larger_pool_size_grows_the_pool_a_smaller_is_refused() {
    for sparse in [false, true] {
        let Some(mut pool) = on_small(GIB, 400 * MIB, sparse) else { return };
        let attached = pool.volume("v", 16 * MIB);
        let attached = pool.attach(&attached.id);
        pool.configure(|config| config.pool_size = Some(500 * MIB));
        pool.restart();
        let total = pool.backend().pool_room().unwrap().total;
        assert!((430 * MIB..=500 * MIB).contains(&total), "{total}");
        assert_eq!((image(&pool).size, image(&pool).allocated), (500 * MIB, !sparse));
        pool.configure(|config| config.pool_size = Some(400 * MIB));
        pool.stop();
        let refused = pool.try_start().unwrap_err().to_string();
        for words in ["--pool-size", "524288000", "419430400"] {
            assert!(refused.contains(words), "{words}: {refused}");
        }
        pool.configure(|config| config.pool_size = None);
        pool.start();
        write_direct(&attached.target, 0, &pattern(1, 1 << 20));
        pool.detach(&attached);
    }
}

/// The file is larger than the device, or the device larger than the filesystem.
#[test]
fn an_interrupted_growth_is_completed_by_the_next_start() {
    let Some(mut pool) = on_small(GIB, 400 * MIB, false) else { return };
    let volume = pool.volume("v", 16 * MIB);
    let attached = pool.attach(&volume.id);
    for (size, step) in [(500 * MIB, "file"), (600 * MIB, "device")] {
        pool.stop();
        let path = pool.data_dir().join("pool.img");
        let file = File::options().write(true).open(&path).unwrap();
        fallocate(&file, FallocateFlags::empty(), 0, size as i64).unwrap();
        if step == "device" {
            let devices =
                std::process::Command::new("losetup").arg("-j").arg(&path).output().unwrap();
            let devices = String::from_utf8(devices.stdout).unwrap();
            let device = devices.split(':').next().unwrap();
            run("losetup", &["-c", device]);
        }
        pool.configure(|config| config.pool_size = None);
        pool.start();
        let total = pool.backend().pool_room().unwrap().total;
        assert!(total > size - 70 * MIB, "{step}: {total}");
        assert!(image(&pool).allocated);
        write_direct(&attached.target, 0, &pattern(size, 1 << 20));
        assert!(read_all(&attached.target)[..1 << 20] == pattern(size, 1 << 20));
    }
    pool.detach(&attached);
}

#[test]
fn pools_without_an_image_do_not_grow() {
    for_each_pool(|pool| {
        if pool.kind() == PoolKind::Image {
            return;
        }
        assert_eq!(pool.backend().pool_status().unwrap().image, None);
        let refused = pool.backend().grow_pool(100 * GIB).unwrap_err();
        let said = refused.to_string();
        assert!(matches!(refused, Error::Precondition(_)) && said.contains("grow that"), "{said}");
    });
}
