//! Image pools whose filesystem has blocks of 64 KiB. The oracle and the power loss tests also run
//! on such pools (`POOL_BLOCK_SIZE`).

use std::path::PathBuf;

use csi_loopback::backend::{Error, ModifyVolume, PoolKind, Precision, Snapshot, Volume};
use support::*;

const LARGE: u64 = 64 << 10;

fn with_large_blocks(run: impl FnOnce(&mut Pool)) {
    if have_root() && have_large_blocks() {
        run(&mut Pool::with(PoolKind::Image, |config| config.pool_block_size = Some(LARGE)));
    }
}

/// Four blocks of the pool, and a snapshot of them.
fn written(pool: &mut Pool) -> (Volume, PathBuf, Snapshot) {
    let volume = pool.volume("v", 64 * MIB);
    let device = pool.attach(&volume.id).target;
    write_direct(&device, 0, &pattern(1, 4 * LARGE as usize));
    let first = pool.snapshot("first", &volume);
    (volume, device, first)
}

#[test]
fn only_the_different_part_of_a_large_block_is_reported() {
    with_large_blocks(|pool| {
        let (volume, device, first) = written(pool);
        write_direct(&device, 3 * BLOCK, &pattern(2, BLOCK as usize));
        // The previous content.
        write_direct(&device, LARGE, &pattern(1, 2 * LARGE as usize)[LARGE as usize..]);
        discard(&device, 2 * LARGE, 4 * BLOCK);
        write_direct(&device, 1000 * BLOCK, &pattern(3, BLOCK as usize));
        let second = pool.snapshot("second", &volume);
        let changed = blocks(pool.backend().delta(&first.id, &second.id).unwrap());
        assert_eq!(changed, [3, 32, 33, 34, 35, 1000]);
        // In blocks of the pool.
        let allocated = blocks(pool.backend().allocated(&second.id).unwrap());
        assert!([3, 36, 63, 1000].iter().all(|block| allocated.contains(block)), "{allocated:?}");
    });
}

#[test]
fn precision_block_reports_whole_blocks_of_the_pool() {
    with_large_blocks(|pool| {
        let (volume, device, first) = written(pool);
        let coarse =
            ModifyVolume { change_tracking: None, change_precision: Some(Precision::Block) };
        pool.backend().modify_volume(&volume.id, coarse).unwrap();
        write_direct(&device, 3 * BLOCK, &pattern(2, BLOCK as usize));
        let second = pool.snapshot("second", &volume);
        let changed = blocks(pool.backend().delta(&first.id, &second.id).unwrap());
        assert_eq!(changed, (0..16).collect::<Vec<u64>>());
        pool.restart();
        let exact = ModifyVolume { change_precision: Some(Precision::Exact), ..coarse };
        pool.backend().modify_volume(&volume.id, exact).unwrap();
        write_direct(&device, 5 * BLOCK, &pattern(4, BLOCK as usize));
        let third = pool.snapshot("third", &volume);
        let changed = blocks(pool.backend().delta(&second.id, &third.id).unwrap());
        assert_eq!(changed, [5]);
    });
}

#[test]
fn a_small_write_after_a_snapshot_takes_one_block() {
    if !have_root() || !have_large_blocks() {
        return;
    }
    let mut pool = Pool::with(PoolKind::Image, |config| {
        (config.pool_block_size, config.pool_size) = (Some(LARGE), Some(2 * GIB));
    });
    let volume = pool.volume("v", 256 * MIB);
    let device = pool.attach(&volume.id).target;
    write_direct(&device, 0, &pattern(1, 256 << 20));
    pool.snapshot("first", &volume);
    let available = || pool.backend().pool_status().unwrap().room.available;
    let before = available();
    for number in 0..64 {
        write_buffered(&device, number * 4 * MIB, &pattern(2, BLOCK as usize));
    }
    let taken = before.saturating_sub(available());
    assert!(taken < 64 * LARGE + 2 * MIB, "{taken} bytes for 64 blocks of 64 KiB");
}

#[test]
fn allocated_is_exact_on_a_new_image_pool() {
    if !have_root() {
        return;
    }
    let mut pool = Pool::with(PoolKind::Image, |config| config.pool_block_size = None);
    assert_eq!(pool.backend().pool_status().unwrap().block_size, BLOCK);
    let volume = pool.volume("v", 64 * MIB);
    let device = pool.attach(&volume.id).target;
    let written = [3, 1000, 1002, 16_383];
    for block in written {
        write_direct(&device, block * BLOCK, &pattern(block, BLOCK as usize));
    }
    let snapshot = pool.snapshot("first", &volume);
    assert_eq!(blocks(pool.backend().allocated(&snapshot.id).unwrap()), written);
}

#[test]
fn a_pool_keeps_its_block_size() {
    with_large_blocks(|pool| {
        let (volume, device, first) = written(pool);
        pool.stop();
        pool.configure(|config| config.pool_block_size = Some(BLOCK));
        pool.start();
        write_direct(&device, 3 * BLOCK, &pattern(2, BLOCK as usize));
        let second = pool.snapshot("second", &volume);
        assert_eq!(blocks(pool.backend().delta(&first.id, &second.id).unwrap()), [3]);
    });
}

#[test]
fn an_unsupported_block_size_leaves_no_image() {
    with_large_blocks(|pool| {
        pool.stop();
        std::fs::remove_dir_all(pool.data_dir()).unwrap();
        pool.configure(|config| config.pool_block_size = Some(2 * LARGE));
        assert!(matches!(pool.try_start(), Err(Error::Failed(_))));
        assert_eq!(std::fs::read_dir(pool.data_dir()).unwrap().count(), 1, "the lock alone");
        pool.configure(|config| config.pool_block_size = None);
        pool.start();
    });
}
