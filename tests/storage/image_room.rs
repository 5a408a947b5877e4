//! A pool image and its filesystem: an allocated image needs no space from the filesystem, a sparse
//! one has a reserve, and both can grow.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use csi_loopback::backend::{Error, ImageStatus, PoolChoice, PoolKind, check};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::statvfs::statvfs;
use support::full::*;
use support::kernel::wait_for;
use support::*;
use tempfile::TempDir;

/// A pool in an image on a small filesystem.
struct OnSmall {
    pool: Pool,
    host: PathBuf,
    // Dropped in this order: the pool, then its filesystem.
    _small: Small,
    _directory: TempDir,
}

impl OnSmall {
    fn new(host_bytes: u64, image_bytes: u64, sparse: bool) -> Self {
        let directory = directory();
        let small = Small::mount(directory.path(), host_bytes);
        Self::on(directory, small, image_bytes, sparse)
    }

    fn on(directory: TempDir, small: Small, image_bytes: u64, sparse: bool) -> Self {
        let host = directory.path().join("small");
        let pool = Pool::with(PoolKind::Image, |config| {
            config.data_dir = host.join("data");
            config.pool_size = Some(image_bytes);
            config.pool_sparse = sparse;
        });
        Self { pool, host, _small: small, _directory: directory }
    }

    fn status(&self) -> ImageStatus {
        image(&self.pool)
    }

    fn reserve(&self) -> PathBuf {
        self.host.join("data/pool.reserve")
    }
}

fn directory() -> TempDir {
    TempDir::with_prefix("csi-loopback-").unwrap()
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
    if !have_root() {
        return;
    }
    let mut on = OnSmall::new(600 * MIB, 400 * MIB, false);
    let volume = on.pool.volume("v", 256 * MIB);
    let attached = on.pool.attach(&volume.id);
    write_direct(&attached.target, 0, &pattern(1, 1 << 20));
    let a = on.pool.snapshot("a", &volume);
    let filler = HostFiller::all_of(&on.host);
    let status = on.status();
    assert!(status.allocated && status.available_below < MIB, "{status:?}");
    // Nearly all of the pool, in blocks that were never written.
    for part in 0..200 {
        write_direct(&attached.target, (8 + part) * MIB, &pattern(part, 1 << 20));
    }
    let condition = on.pool.backend().volume_condition(&volume.id).unwrap();
    assert!(!condition.is_abnormal(), "{condition:?}");
    let b = on.pool.snapshot("b", &volume);
    let changed: Vec<u64> = (8 * MIB / BLOCK..208 * MIB / BLOCK).collect();
    assert_eq!(blocks(on.pool.backend().delta(&a.id, &b.id).unwrap()), changed);
    on.pool.restart();
    assert!(on.status().allocated);
    write_direct(&attached.target, 4 * MIB, &pattern(7, 1 << 20));
    assert!(read_all(&attached.target)[(8 * MIB) as usize..][..1 << 20] == pattern(0, 1 << 20));
    // A pod that fills the pool gets ENOSPC from the pool, and can continue after space is freed.
    let large = on.pool.volume("large", 256 * MIB);
    let large_at = on.pool.attach(&large.id);
    let end = fill(&large_at.target, 0);
    assert!(end < 256 * MIB / BLOCK, "the pool is never full");
    exhausted(on.pool.backend().create_snapshot("c", &volume.id), "a snapshot");
    on.pool.restart();
    on.pool.backend().delete_snapshot(&a.id).unwrap();
    on.pool.detach(&large_at);
    on.pool.backend().delete_volume(&large.id).unwrap();
    wait_for("space is available again", || {
        on.pool.backend().pool_room().unwrap().available > 100 * MIB
    });
    on.pool.snapshot("c", &volume);
    // The deleted blocks remain allocated in the image.
    on.pool.detach(&attached);
    on.pool.backend().delete_volume(&volume.id).unwrap();
    on.pool.restart();
    assert!(on.status().allocated && on.status().available_below < MIB);
    drop(filler);
    on.pool.stop();
    assert_eq!(check::check(on.pool.data_dir()).unwrap().findings, []);
}

#[test]
fn an_image_larger_than_the_free_space_is_refused() {
    if !have_root() {
        return;
    }
    let mut on = OnSmall::new(700 * MIB, 400 * MIB, false);
    let data_dir = on.host.join("other");
    let before = available(&on.host);
    for kind in [PoolChoice::Kind(PoolKind::Image), PoolChoice::Auto] {
        on.pool.stop();
        on.pool.configure(|config| {
            config.data_dir = data_dir.clone();
            config.pool = kind;
            config.pool_size = Some(GIB);
        });
        let Err(Error::Exhausted(message)) = on.pool.try_start() else { panic!("{kind:?}") };
        let has = message.split("has ").nth(1).and_then(|rest| rest.split(';').next());
        let has: u64 = has.unwrap().parse().unwrap();
        assert!(has.abs_diff(before) < MIB && message.contains("1073741824"), "{message}");
        assert!(message.contains("--pool-size"), "{message}");
        let left: Vec<_> =
            fs::read_dir(&data_dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["lock"]);
    }
    assert!(before - available(&on.host) < MIB);
}

#[test]
fn a_default_image_is_allocated_with_half_of_the_free_space() {
    if !have_root() {
        return;
    }
    let directory = directory();
    let _small = Small::mount(directory.path(), 900 * MIB);
    let host = directory.path().join("small");
    let room = available(&host);
    let pool = Pool::with(PoolKind::Image, |config| {
        config.data_dir = host.join("data");
        (config.pool_size, config.pool_sparse) = (None, false);
    });
    let status = image(&pool);
    assert!(status.allocated && status.size.abs_diff(room / 2) < MIB, "{room}: {status:?}");
    assert!(marker(&pool).contains(r#""allocated":true"#));
    drop(pool);
}

#[test]
fn a_sparse_pool_remains_sparse_unless_its_marker_changes() {
    if !have_root() {
        return;
    }
    let mut on = OnSmall::new(700 * MIB, 400 * MIB, true);
    assert_eq!(marker(&on.pool), r#"{"version":1,"kind":"image"}"#);
    let volume = on.pool.volume("v", 64 * MIB);
    let attached = on.pool.attach(&volume.id);
    write_direct(&attached.target, 0, &pattern(1, 20 << 20));
    on.pool.detach(&attached);
    let a = on.pool.snapshot("a", &volume);
    on.pool.configure(|config| config.pool_sparse = false);
    on.pool.restart();
    assert!(!on.status().allocated);
    let path = on.host.join("data/pool.img");
    assert!(on.reserve().exists());
    let used = || fs::metadata(&path).unwrap().blocks() * 512;
    assert!(used() < 200 * MIB);
    // Not while a volume is attached: its mount of the pool discards blocks.
    let attached = on.pool.attach(&volume.id);
    on.pool.stop();
    let json = on.pool.data_dir().join("pool.json");
    fs::write(json, r#"{"version":1,"kind":"image","allocated":true}"#).unwrap();
    on.pool.start();
    assert!(!on.status().allocated && on.reserve().exists() && used() < 200 * MIB);
    on.pool.detach(&attached);
    on.pool.restart();
    assert!(on.status().allocated && used() >= 400 * MIB);
    assert!(!on.reserve().exists());
    let _filler = HostFiller::all_of(&on.host);
    let attached = on.pool.attach(&volume.id);
    write_direct(&attached.target, 30 * MIB, &pattern(2, 30 << 20));
    let read = read_all(&attached.target);
    assert!(
        read[..20 << 20] == pattern(1, 20 << 20)
            && read[30 << 20..60 << 20] == pattern(2, 30 << 20)
    );
    let b = on.pool.snapshot("b", &volume);
    let changed: Vec<u64> = (30 * MIB / BLOCK..60 * MIB / BLOCK).collect();
    assert_eq!(blocks(on.pool.backend().delta(&a.id, &b.id).unwrap()), changed);
    on.pool.detach(&attached);
}

/// As after a sparse copy of the image.
#[test]
fn an_allocated_image_with_holes_is_allocated_again() {
    if !have_root() {
        return;
    }
    let mut on = OnSmall::new(700 * MIB, 400 * MIB, false);
    let volume = on.pool.volume("v", 64 * MIB);
    on.pool.stop();
    let path = on.host.join("data/pool.img");
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let file = File::options().write(true).open(&path).unwrap();
    // This range contains no XFS data: its last allocation group has only a header.
    fallocate(&file, punch, 380 * MIB as i64, 20 * MIB as i64).unwrap();
    drop(file);
    let filler = HostFiller::all_of(&on.host);
    on.pool.start();
    let status = on.status();
    assert!(!status.allocated, "{status:?}");
    assert_eq!(on.pool.backend().pool_room().unwrap().available, status.available_below);
    let condition = on.pool.backend().volume_condition(&volume.id).unwrap();
    assert!(
        condition.is_abnormal() && condition.message.contains("not allocated"),
        "{condition:?}"
    );
    drop(filler);
    on.pool.restart();
    assert!(on.status().allocated);
    on.pool.snapshot("a", &volume);
}

/// `cp` on a filesystem that shares blocks.
fn copy_image(on: &OnSmall) -> PathBuf {
    let copy = on.host.join("copy.img");
    run("cp", &["--reflink=always", path(&on.host.join("data/pool.img")), path(&copy)]);
    copy
}

/// What the driver does every second.
fn unshare(on: &OnSmall) {
    wait_for("the image has its own blocks", || {
        on.pool.backend().unshare_image().unwrap();
        on.status().allocated
    });
}

#[test]
fn a_copied_image_gets_its_own_blocks_or_is_reported() {
    if !have_root() {
        return;
    }
    let directory = directory();
    let small = Small::mount_xfs(directory.path(), 1200 * MIB);
    let mut on = OnSmall::on(directory, small, 400 * MIB, false);
    let volume = on.pool.volume("v", 64 * MIB);
    let mut attached = on.pool.attach(&volume.id);
    // Durable: the device may use the page cache.
    let write = |attached: &Attached, seed| {
        write_direct(&attached.target, 0, &pattern(seed, 60 << 20));
        File::open(&attached.target).unwrap().sync_all().unwrap();
    };
    let healthy = |on: &OnSmall| {
        let backend = on.pool.backend();
        let of_volume = backend.volume_condition(&volume.id).unwrap();
        let of_pool = backend.pool_status().unwrap().condition;
        assert_eq!(of_volume.problem, of_pool.problem);
        assert!(!of_pool.is_abnormal() || of_pool.message.contains("shares"), "{of_pool:?}");
        !of_pool.is_abnormal()
    };
    write(&attached, 1);
    assert!(on.status().allocated);
    // With room below, the shared blocks are copied.
    let copy = copy_image(&on);
    let before = fs::read(&copy).unwrap();
    assert!(!on.status().allocated && on.status().shared > 50 * MIB, "{:?}", on.status());
    assert!(healthy(&on));
    unshare(&on);
    let mut filler = Some(HostFiller::all_of(&on.host));
    write(&attached, 2);
    assert!(read_all(&attached.target)[..60 << 20] == pattern(2, 60 << 20));
    assert!(fs::read(&copy).unwrap() == before, "the copy has changed");
    filler.take();
    // Without room they are reported, also after a restart and without a use of the volume.
    fs::remove_file(&copy).unwrap();
    copy_image(&on);
    // Enough for the log of the pool's XFS, too little for the shared blocks.
    filler = Some(HostFiller::new(&on.host, 40 * MIB));
    for _ in 0..2 {
        on.pool.backend().unshare_image().unwrap();
        assert!(!on.status().allocated && on.status().shared > 50 * MIB, "{:?}", on.status());
        assert!(!healthy(&on));
        on.pool.detach(&attached);
        on.pool.restart();
        attached = on.pool.attach(&volume.id);
    }
    filler.take();
    unshare(&on);
    assert!(healthy(&on) && !on.reserve().exists());
    let _filler = HostFiller::all_of(&on.host);
    write(&attached, 3);
    assert!(read_all(&attached.target)[..60 << 20] == pattern(3, 60 << 20));
    on.pool.detach(&attached);
}

#[test]
fn the_reserve_allows_deletions_on_a_full_filesystem() {
    if !have_root() {
        return;
    }
    let mut on = OnSmall::new(900 * MIB, 4 * GIB, true);
    let path = on.reserve();
    let reserve = || fs::metadata(&path).map(|found| found.blocks() * 512);
    assert!(reserve().unwrap() >= 64 * MIB);
    let volume = on.pool.volume("v", 64 * MIB);
    let volumes: Vec<String> =
        (0..20).map(|number| on.pool.volume(&format!("v{number}"), MIB).id).collect();
    on.pool.backend().relieve_pressure().unwrap();
    assert!(!on.pool.backend().volume_condition(&volume.id).unwrap().is_abnormal());
    let filler = HostFiller::all_of(&on.host);
    on.pool.backend().relieve_pressure().unwrap();
    let condition = on.pool.backend().volume_condition(&volume.id).unwrap();
    assert!(condition.is_abnormal() && condition.message.contains("I/O errors"), "{condition:?}");
    // The program that fills the disk does not get the reserve. Deletions do, as much as each
    // needs.
    assert!(reserve().unwrap() >= 64 * MIB);
    assert_eq!(on.status().available_below, 0);
    for id in &volumes {
        on.pool.backend().delete_volume(id).unwrap();
    }
    let left = reserve().unwrap_or(0);
    println!("report: {} of 64 MiB of the reserve remained", left / MIB);
    on.pool.backend().relieve_pressure().unwrap();
    assert_eq!(reserve().unwrap_or(0), left, "the reserve is not used by the filler");
    drop(filler);
    on.pool.backend().relieve_pressure().unwrap();
    assert!(reserve().unwrap() >= 64 * MIB);
    assert!(!on.pool.backend().volume_condition(&volume.id).unwrap().is_abnormal());
    // Filled while no driver runs: the start releases a part.
    on.pool.stop();
    let filler = HostFiller::all_of(&on.host);
    assert!(available(&on.host) < MIB);
    on.pool.start();
    assert!(reserve().unwrap() < 64 * MIB);
    assert_eq!(on.pool.backend().volumes(None, 0).unwrap().items.len(), 1);
    on.pool.backend().delete_snapshot(&on.pool.snapshot("b", &volume).id).unwrap();
    on.pool.backend().delete_volume(&volume.id).unwrap();
    drop(filler);
    on.pool.restart();
    assert!(reserve().unwrap() >= 64 * MIB);
}

#[test]
fn an_image_on_a_copy_on_write_filesystem_is_sparse() {
    if !have_root() {
        return;
    }
    let directory = directory();
    let small = Small::mount_btrfs(directory.path(), GIB);
    let mut on = OnSmall::on(directory, small, 400 * MIB, false);
    for _ in 0..2 {
        let status = on.status();
        assert!(!status.allocated && status.size == 400 * MIB, "{status:?}");
        assert_eq!(fs::metadata(on.reserve()).unwrap().len(), 64 * MIB);
        on.pool.restart();
    }
    assert!(marker(&on.pool).contains(r#""allocated":true"#));
}

#[test]
fn an_allocated_image_grows_while_volumes_are_attached() {
    if !have_root() {
        return;
    }
    let mut on = OnSmall::new(GIB, 400 * MIB, false);
    let volume = on.pool.volume("v", 600 * MIB);
    let attached = on.pool.attach(&volume.id);
    write_direct(&attached.target, 0, &pattern(1, 8 << 20));
    let a = on.pool.snapshot("a", &volume);
    let room = on.pool.backend().pool_room().unwrap();
    for _ in 0..2 {
        let status = on.pool.backend().grow_pool(700 * MIB).unwrap();
        assert_eq!(status.image.unwrap().size, 700 * MIB);
        assert!(status.room.total >= room.total + 290 * MIB, "{status:?}");
    }
    let filler = HostFiller::all_of(&on.host);
    for part in 0..500 {
        write_direct(&attached.target, (8 + part) * MIB, &pattern(part, 1 << 20));
    }
    let b = on.pool.snapshot("b", &volume);
    let changed: Vec<u64> = (8 * MIB / BLOCK..508 * MIB / BLOCK).collect();
    assert_eq!(blocks(on.pool.backend().delta(&a.id, &b.id).unwrap()), changed);
    drop(filler);

    let before = (available(&on.host), on.status());
    let refused = on.pool.backend().grow_pool(2 * GIB).unwrap_err();
    assert!(matches!(refused, Error::Exhausted(_)), "{refused}");
    let refused = on.pool.backend().grow_pool(500 * MIB).unwrap_err();
    assert!(matches!(refused, Error::OutOfRange(_)), "{refused}");
    assert_eq!((available(&on.host), on.status()), before);
    // The driver's flags still have the original size of the pool.
    on.pool.restart();
    assert_eq!(on.status().size, 700 * MIB);
    assert!(on.status().allocated);
    on.pool.detach(&attached);
}

#[test]
fn a_larger_pool_size_grows_the_pool_a_smaller_is_refused() {
    if !have_root() {
        return;
    }
    for sparse in [false, true] {
        let mut on = OnSmall::new(GIB, 400 * MIB, sparse);
        let attached = on.pool.volume("v", 16 * MIB);
        let attached = on.pool.attach(&attached.id);
        on.pool.configure(|config| config.pool_size = Some(500 * MIB));
        on.pool.restart();
        let total = on.pool.backend().pool_room().unwrap().total;
        assert!((430 * MIB..=500 * MIB).contains(&total), "{total}");
        assert_eq!((on.status().size, on.status().allocated), (500 * MIB, !sparse));
        on.pool.configure(|config| config.pool_size = Some(400 * MIB));
        on.pool.stop();
        let refused = on.pool.try_start().unwrap_err().to_string();
        for words in ["--pool-size", "524288000", "419430400"] {
            assert!(refused.contains(words), "{words}: {refused}");
        }
        on.pool.configure(|config| config.pool_size = None);
        on.pool.start();
        write_direct(&attached.target, 0, &pattern(1, 1 << 20));
        on.pool.detach(&attached);
    }
}

/// The file is larger than the device, or the device larger than the filesystem.
#[test]
fn an_interrupted_growth_is_completed_by_the_next_start() {
    if !have_root() {
        return;
    }
    let mut on = OnSmall::new(GIB, 400 * MIB, false);
    let volume = on.pool.volume("v", 16 * MIB);
    let attached = on.pool.attach(&volume.id);
    for (size, step) in [(500 * MIB, "file"), (600 * MIB, "device")] {
        on.pool.stop();
        let path = on.host.join("data/pool.img");
        let file = File::options().write(true).open(&path).unwrap();
        fallocate(&file, FallocateFlags::empty(), 0, size as i64).unwrap();
        if step == "device" {
            let devices =
                std::process::Command::new("losetup").arg("-j").arg(&path).output().unwrap();
            let devices = String::from_utf8(devices.stdout).unwrap();
            let device = devices.split(':').next().unwrap();
            run("losetup", &["-c", device]);
        }
        on.pool.configure(|config| config.pool_size = None);
        on.pool.start();
        let total = on.pool.backend().pool_room().unwrap().total;
        assert!(total > size - 70 * MIB, "{step}: {total}");
        assert!(on.status().allocated);
        write_direct(&attached.target, 0, &pattern(size, 1 << 20));
        assert!(read_all(&attached.target)[..1 << 20] == pattern(size, 1 << 20));
    }
    on.pool.detach(&attached);
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
