//! Every operation runs out of space at every step. With any amount of free space, it fails with a
//! clear message and leaves nothing, and the repeated call succeeds when space is available. Pods
//! lose no data.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use csi_loopback::backend::{
    Backend, CreateVolume, Error, FsType, PoolKind, Publication, Snapshot, Source, VolumeRequest,
};
use support::full::*;
use support::kernel::wait_for;
use support::*;

/// Objects that exist during the operations: a volume in use that is written to, with a snapshot.
struct World {
    volume_id: String,
    device: Attached,
    base: Snapshot,
    /// A deleted snapshot with an expired record, which must be merged into its successor.
    expired: Snapshot,
    after: Snapshot,
    content: Vec<u8>,
    changed: Vec<u64>,
}

impl World {
    fn of(pool: &mut Pool) -> Self {
        let volume = pool.volume("v", 32 * MIB);
        let device = pool.attach(&volume.id);
        let mut content = vec![0; (32 * MIB) as usize];
        let mut put = |at: u64, count: u64, seed: u64| {
            let data = pattern(seed, (count * BLOCK) as usize);
            write_direct(&device.target, at * BLOCK, &data);
            content[(at * BLOCK) as usize..][..data.len()].copy_from_slice(&data);
            at
        };
        // Many extents, so that their maps need space, and more data than the reserve of the pool.
        (0..400).map(|number| put(number * 20, 8, number)).for_each(drop);
        let base = pool.snapshot("base", &volume);
        let mut changed: Vec<u64> = (0..10).map(|n| put(n * 50, 1, 1000 + n)).collect();
        let expired = pool.snapshot("expired", &volume);
        changed.extend((10..20).map(|n| put(n * 50, 1, 1000 + n)));
        let after = pool.snapshot("after", &volume);
        pool.backend().delete_snapshot(&expired.id).unwrap();
        Self { volume_id: volume.id, device, base, expired, after, content, changed }
    }

    /// Checks the condition of a full pool, and that queries, unstage and stage need no space.
    fn assert_usable(&self, pool: &mut Pool) {
        assert_eq!(pool.backend().capacity().unwrap().available, 0);
        let condition = pool.backend().volume_condition(&self.volume_id).unwrap();
        assert!(
            condition.is_abnormal() && condition.message.contains("nearly full"),
            "{condition:?}"
        );
        let delta = pool.backend().delta(&self.base.id, &self.after.id).unwrap();
        assert_eq!(blocks(delta), self.changed);
        pool.detach(&self.device);
        pool.attach(&self.volume_id);
        assert!(read_all(&self.device.target) == self.content, "the volume's data is another");
    }

    /// Checks the volume's data and the next delta.
    fn assert_whole(&self, pool: &Pool) {
        assert!(read_all(&self.device.target) == self.content, "the volume's data is another");
        let made = pool.backend().create_snapshot("last", &self.volume_id).unwrap();
        // A retention ends at the end of its last second.
        wait_for("what has expired is forgotten", || {
            pool.backend().forget_expired().unwrap();
            let forgotten = pool.backend().delta(&self.expired.id, &made.id);
            // The id is dropped one retention period later, which is 0 here.
            matches!(forgotten, Err(Error::Precondition(_) | Error::NotFound { .. }))
        });
        assert_eq!(blocks(pool.backend().delta(&self.base.id, &made.id).unwrap()), self.changed);
    }
}

/// The objects in the API.
fn shown(backend: &Backend) -> Vec<String> {
    let volumes = backend.volumes(None, 0).unwrap().items.into_iter().map(|row| row.id);
    let snapshots = backend.snapshots(&Default::default(), None, 0).unwrap().items;
    volumes.chain(snapshots.into_iter().map(|row| row.id)).collect()
}

/// An operation by name, after its input objects are created.
type Operation = (&'static str, fn(&Pool, &World, &str) -> Result<(), Error>);

fn created(pool: &Pool, name: &str, source: Option<Source>) -> Result<(), Error> {
    let required_bytes = if source.is_some() { 0 } else { 8 * MIB };
    let request = VolumeRequest { required_bytes, source, ..request() };
    pool.backend().create_volume(&CreateVolume { name: name.to_owned(), request }).map(drop)
}

/// The spare volume of an operation: small, raw and empty. After its deletion it gets another id.
/// Looking it up may fail too, because the catalog is reopened after a failed write.
fn spare(pool: &Pool, name: &str) -> Result<String, Error> {
    let volumes = pool.backend().volumes(None, 0)?.items;
    let found = volumes.into_iter().find(|row| row.name == format!("for-{name}"));
    Ok(found.map_or("vol-gone-0123456789abcdef".to_owned(), |row| row.id))
}

fn snapshot_of_spare(pool: &Pool, name: &str) -> Result<String, Error> {
    let snapshots = pool.backend().snapshots(&Default::default(), None, 0)?.items;
    let found = snapshots.into_iter().find(|row| row.name == format!("of-{name}"));
    Ok(found.map_or("snap-gone-0123456789abcdef".to_owned(), |row| row.id))
}

/// Operations that need space. All but the last two create something in the API.
const NEEDY: [Operation; 8] = [
    ("create volume", |pool, _, name| created(pool, name, None)),
    ("clone", |pool, world, name| {
        created(pool, name, Some(Source::Volume(world.volume_id.clone())))
    }),
    ("restore", |pool, world, name| {
        created(pool, name, Some(Source::Snapshot(world.base.id.clone())))
    }),
    ("snapshot", |pool, world, name| {
        pool.backend().create_snapshot(name, &world.volume_id).map(drop)
    }),
    ("group", |pool, world, name| {
        let ids = [world.volume_id.clone(), spare(pool, name)?];
        pool.backend().create_group(name, &ids).map(drop)
    }),
    ("expand", |pool, _, name| {
        pool.backend().expand_volume(&spare(pool, name)?, 16 * MIB, 0).map(drop)
    }),
    ("stage with mkfs", |pool, _, name| {
        let path = pool.scratch().join(name);
        pool.backend().stage(&spare(pool, name)?, &path, &mounted(FsType::Ext4))
    }),
    ("publish", |pool, _, name| {
        let (id, path) = (spare(pool, name)?, pool.scratch().join(name));
        let target = pool.scratch().join(format!("{name} target"));
        pool.backend().stage(&id, &path, &raw())?;
        pool.backend().publish(&id, &path, &target, &Publication::on_host(raw(), false))
    }),
];

/// Operations that must succeed in a pool without a free block.
const ALWAYS: [Operation; 5] = [
    ("modify", |pool, _, name| {
        let id = spare(pool, name)?;
        pool.backend().modify_volume(&id, tracking(false))?;
        pool.backend().modify_volume(&id, tracking(true))
    }),
    ("delete snapshot", |pool, _, name| {
        pool.backend().delete_snapshot(&snapshot_of_spare(pool, name)?)
    }),
    ("delete volume", |pool, _, name| pool.backend().delete_volume(&spare(pool, name)?)),
    ("relieve pressure", |pool, _, _| pool.backend().relieve_pressure()),
    ("forget", |pool, _, _| pool.backend().forget_expired()),
];

fn prepare(pool: &Pool, operations: &[Operation]) {
    for (name, _) in operations {
        let volume = pool.volume(&format!("for-{name}"), 8 * MIB);
        pool.snapshot(&format!("of-{name}"), &volume);
    }
}

/// Unpublishes and unstages the volumes of the operations.
fn clean_up(pool: &Pool) {
    for (name, _) in NEEDY {
        let id = spare(pool, name).unwrap();
        let _ = pool.backend().unpublish(&id, &pool.scratch().join(format!("{name} target")));
        let _ = pool.backend().unstage(&id, &pool.scratch().join(name));
    }
}

/// Free space for the next attempt, in blocks: all small amounts, then larger steps.
fn more(room: u64) -> u64 {
    match room {
        0..8 => room + 1,
        8..32 => room + 4,
        32..128 => room + 16,
        _ => room * 3 / 2,
    }
}

#[test]
fn an_operation_on_a_full_pool_leaves_nothing() {
    let pool = pool_with(PoolKind::Image, |config| {
        config.pool_size = Some(400 * MIB);
        config.retention = Duration::ZERO;
    });
    if let Some(pool) = pool {
        with_spares(pool, try_everything);
    }
}

/// Otherwise nothing could be deleted.
#[test]
fn a_pool_without_a_free_block_can_be_opened_and_checked() {
    let pool = pool_with(PoolKind::Image, |config| config.pool_size = Some(400 * MIB));
    let Some(mut pool) = pool else { return };
    let filler = pool.volume("filler", GIB);
    let attached = pool.attach(&filler.id);
    let end = fill(&attached.target, 0);
    for free in 0..16 {
        pool.restart();
        assert_eq!(shown(pool.backend()), [filler.id.as_str()], "{free} blocks free");
        discard(&attached.target, (end - free - 1) * BLOCK, BLOCK);
    }
    pool.detach(&attached);
    pool.restart_sound();
    pool.backend().delete_volume(&filler.id).unwrap();
}

#[test]
#[ignore = "full tier"]
fn an_operation_on_a_full_copy_pool_leaves_nothing() {
    if !have_root() {
        return;
    }
    let retention = Duration::ZERO;
    let pool = Pool::on_small(PoolKind::Copy, 160 * MIB, |config| config.retention = retention);
    with_spares(pool, try_everything);
}

/// Runs a test, and unstages the volumes of the operations also when it fails.
fn with_spares(mut pool: Pool, test: impl FnOnce(&mut Pool)) {
    prepare(&pool, &NEEDY);
    prepare(&pool, &ALWAYS);
    let result = catch_unwind(AssertUnwindSafe(|| test(&mut pool)));
    if pool.is_open() {
        clean_up(&pool);
    }
    if let Err(panic) = result {
        resume_unwind(panic);
    }
}

fn try_everything(pool: &mut Pool) {
    let world = World::of(pool);
    let filler = pool.volume("filler", GIB);
    let filler = pool.attach(&filler.id);
    let mut end = fill(&filler.target, 0);
    world.assert_usable(pool);
    let mut levels = Vec::new();
    for (name, operation) in NEEDY {
        let (mut room, mut refusals) = (0, 0);
        let before = shown(pool.backend());
        while let Err(error) = operation(pool, &world, name) {
            exhausted::<()>(Err(error), &format!("{name} with {room} blocks"));
            assert_eq!(shown(pool.backend()), before, "{name} with {room} blocks");
            refusals += 1;
            let next = more(room);
            discard(&filler.target, (end - next) * BLOCK, (next - room) * BLOCK);
            room = next;
            assert!(room < 1 << 16, "{name} never succeeds");
        }
        levels.push(format!("{name} {refusals}"));
        end = fill(&filler.target, end - room);
    }
    println!("report: refused attempts before success: {}", levels.join(", "));
    clean_up(pool);
    for (name, operation) in ALWAYS {
        let result = operation(pool, &world, name);
        assert!(result.is_ok(), "{name}: {result:?}");
    }
    assert!(pool.backend().healthy().is_ok());
    pool.detach(&filler);
    pool.backend().delete_volume(&filler.volume_id).unwrap();
    wait_for_room(pool, 40 * MIB);
    world.assert_whole(pool);
    pool.detach(&world.device);
    pool.stop_sound();
}

/// The image is sparse: its filesystem has more free space than the disk.
#[test]
fn an_operation_on_a_full_disk_converges_with_free_space() {
    if !have_root() {
        return;
    }
    let pool = Pool::on_small(PoolKind::Image, 700 * MIB, |config| {
        config.pool_size = Some(500 * MIB);
        config.retention = Duration::ZERO;
    });
    with_spares(pool, try_everything_on_a_full_disk);
}

fn try_everything_on_a_full_disk(pool: &mut Pool) {
    let host = pool.data_dir().parent().unwrap().to_owned();
    let world = World::of(pool);
    let mut tally = Vec::new();
    for (name, operation) in NEEDY.into_iter().chain(ALWAYS) {
        let (mut refused, mut failed) = (0, 0);
        for room in [0, 4, 8, 16, 32, 64, 128, 512, 2048] {
            let _filler = HostFiller::new(&host, room << 10);
            match operation(pool, &world, name) {
                Ok(()) => break,
                Err(Error::Exhausted(_)) => refused += 1,
                // Some failures look like a broken disk.
                Err(error @ (Error::Io { .. } | Error::Failed(_))) => {
                    println!("{name} with {room} KiB: {error}");
                    failed += 1;
                }
                Err(other) => panic!("{name} with {room} KiB: {other:?}"),
            }
        }
        tally.push(format!("{name} {refused}+{failed}"));
        // The pool's filesystem also frees the space of failed operations later.
        wait_for_room(pool, 40 * MIB);
        let result = operation(pool, &world, name);
        assert!(result.is_ok(), "{name}, with free space: {result:?}");
        assert!(pool.backend().healthy().is_ok(), "after {name}");
    }
    println!("report: refused with a full host, plus failed otherwise: {}", tally.join(", "));
    clean_up(pool);
    world.assert_whole(pool);
    pool.detach(&world.device);
    pool.stop_sound();
}

/// XFS frees removed blocks in the background.
fn wait_for_room(pool: &Pool, bytes: u64) {
    wait_for("space is available", || pool.backend().pool_room().unwrap().available >= bytes);
}
