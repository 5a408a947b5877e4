//! Nothing is emptied while it is read: every way to free data, tried during every way to read it.
//! A reader returns the right bytes or an error. If pods need the space of deleted data, and all of
//! it is in use, the readers stop.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use csi_loopback::backend::{
    Backend, Config, CreateVolume, Error, PoolKind, Result, Snapshot, Source, Style, Volume,
    VolumeRequest,
};
use csi_loopback::fail_point;
use support::full::exhausted;
use support::kernel::wait_for;
use support::points::Points;
use support::*;

/// Size of a pool: small enough to fill.
const POOL_BYTES: u64 = 400 * MIB;
const VOLUME_BYTES: u64 = 32 * MIB;
/// Every second unit of a volume is written, so that it has enough extents for several steps of a
/// copy and for a clone made ahead.
const UNIT: u64 = 64 << 10;

/// The fail points of this process.
fn own_points() -> Points {
    let directory = std::env::temp_dir().join(format!("readers-{}", std::process::id()));
    fail_point::watch(directory.clone());
    Points::at(directory)
}

/// A small pool, with a volume that fills it.
struct Rig {
    points: Points,
    pool: Pool,
    filler: Attached,
    filled: u64,
    round: usize,
}

impl Rig {
    fn new(kind: PoolKind) -> Self {
        let configure = |config: &mut Config| {
            (config.pool_size, config.retention) = (Some(POOL_BYTES), Duration::ZERO);
        };
        let mut pool = match kind {
            PoolKind::Image => Pool::with(kind, configure),
            PoolKind::Reflink | PoolKind::Copy => Pool::on_small(kind, POOL_BYTES, configure),
        };
        let filler = pool.volume("filler", GIB);
        let filler = pool.attach(&filler.id);
        Self { points: own_points(), pool, filler, filled: 0, round: 0 }
    }

    fn backend(&self) -> &Backend {
        self.pool.backend()
    }

    /// Runs `call` in a thread until it meets a point with this prefix. There it waits.
    fn hold<T: Send + 'static>(
        &self,
        point: &str,
        call: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> JoinHandle<Result<T>> {
        self.points.plan("hang", 1, point);
        let thread = thread::spawn(call);
        wait_for(point, || {
            assert!(!thread.is_finished(), "{point} is not met");
            !self.points.met().is_empty()
        });
        thread
    }

    fn release<T>(&self, thread: JoinHandle<Result<T>>) -> Result<T> {
        self.points.clear();
        thread.join().unwrap()
    }

    fn available(&self) -> u64 {
        self.backend().pool_room().unwrap().available
    }

    /// The space below which the pool drops baselines.
    fn reserve(&self) -> u64 {
        self.backend().pool_room().unwrap().total / 20
    }

    fn name(&mut self, what: &str) -> String {
        self.round += 1;
        format!("{what}-{}", self.round)
    }

    /// Allocates space until the pool drops baselines.
    fn fill(&mut self) {
        let reserve = self.reserve();
        while let Some(excess) = self.available().checked_sub(reserve - MIB) {
            let bytes = (excess + BLOCK).next_multiple_of(UNIT);
            zero(&self.filler.target, self.filled, bytes, false);
            self.filled += bytes;
        }
    }

    fn empty(&mut self) {
        discard(&self.filler.target, 0, self.filled.max(BLOCK));
        self.filled = 0;
        wait_for("the space is free", || self.available() >= 2 * self.reserve());
        self.backend().relieve_pressure().unwrap();
    }

    fn create_from(&mut self, source: Source) -> impl FnOnce() -> Result<Volume> + Send + use<> {
        let (backend, name) = (self.backend().clone(), self.name("copy"));
        let request = VolumeRequest { source: Some(source), ..request() };
        move || backend.create_volume(&CreateVolume { name, request })
    }

    fn content(&mut self, volume: &Volume) -> Vec<u8> {
        let attached = self.pool.attach(&volume.id);
        let content = read_all(&attached.target);
        self.pool.detach(&attached);
        content
    }

    /// Deletes all volumes and snapshots except the filler.
    fn clear(&mut self) {
        self.empty();
        let backend = self.backend();
        for snapshot in backend.snapshots(&Default::default(), None, 0).unwrap().items {
            backend.delete_snapshot(&snapshot.id).unwrap();
        }
        for volume in backend.volumes(None, 0).unwrap().items {
            if volume.id != self.filler.volume_id {
                backend.delete_volume(&volume.id).unwrap();
            }
        }
    }
}

/// A volume with three snapshots and later changes.
struct World {
    volume: Volume,
    snapshots: [Snapshot; 3],
    /// Of the last snapshot.
    content: Vec<u8>,
    /// Of the volume.
    now: Vec<u8>,
}

impl World {
    fn new(rig: &mut Rig) -> Self {
        let name = rig.name("v");
        let volume = rig.pool.volume(&name, VOLUME_BYTES);
        let attached = rig.pool.attach(&volume.id);
        let device = File::options().write(true).open(&attached.target).unwrap();
        let mut now = vec![0; VOLUME_BYTES as usize];
        let mut write = |unit: u64, seed: u64| {
            let bytes = pattern(seed + unit, UNIT as usize);
            device.write_all_at(&bytes, unit * UNIT).unwrap();
            now[(unit * UNIT) as usize..][..bytes.len()].copy_from_slice(&bytes);
        };
        let taken = |number: usize| {
            device.sync_all().unwrap();
            rig.pool.snapshot(&format!("{name}-{number}"), &volume)
        };
        (0..VOLUME_BYTES / UNIT).step_by(2).for_each(|unit| write(unit, 0));
        let first = taken(0);
        write(10, 1000);
        let second = taken(1);
        rewritten().for_each(|unit| write(unit, 2000));
        let third = taken(2);
        let content = read_all(&attached.target);
        rewritten().for_each(|unit| write(unit, 3000));
        device.sync_all().unwrap();
        drop(device);
        rig.pool.detach(&attached);
        Self { volume, snapshots: [first, second, third], content, now }
    }

    fn last(&self) -> &Snapshot {
        &self.snapshots[2]
    }

    /// The data of the last snapshot, if it has a name.
    fn has_data(&self, rig: &Rig) -> bool {
        assert_ne!(rig.pool.kind(), PoolKind::Image, "its files have no path");
        rig.pool.data_dir().join("snapshots").join(&self.last().id).exists()
    }
}

/// The units that are rewritten before and after the last snapshot, so that it has blocks of its
/// own.
fn rewritten() -> impl Iterator<Item = u64> {
    (0..VOLUME_BYTES / UNIT / 2).step_by(2)
}

/// Their blocks.
fn changed_blocks() -> Vec<u64> {
    let per_unit = UNIT / BLOCK;
    rewritten().flat_map(|unit| unit * per_unit..(unit + 1) * per_unit).collect()
}

/// The rest of a reading: checks what was read. An error must be the reader's.
type Rest = Box<dyn FnOnce(&mut Rig, &World) -> Result<()>>;

struct Reader {
    name: &'static str,
    /// Whether it is a call to the driver, which a restart ends.
    is_call: bool,
    /// Reads a part.
    begin: fn(&mut Rig, &World) -> Rest,
}

const READERS: [Reader; 5] = [
    Reader { name: "volume from a snapshot", is_call: true, begin: create_from_snapshot },
    Reader { name: "clone of a volume", is_call: true, begin: clone_volume },
    Reader { name: "comparison", is_call: true, begin: take_snapshot },
    Reader { name: "temporary volume", is_call: false, begin: read_temporary_volume },
    Reader { name: "delta", is_call: false, begin: stream_delta },
];

fn create_from_snapshot(rig: &mut Rig, world: &World) -> Rest {
    let create = rig.create_from(Source::Snapshot(world.last().id.clone()));
    let thread = rig.hold("copy.part_", create);
    Box::new(|rig, world| {
        let volume = rig.release(thread)?;
        assert!(rig.content(&volume) == world.content, "other bytes");
        Ok(())
    })
}

fn clone_volume(rig: &mut Rig, world: &World) -> Rest {
    let create = rig.create_from(Source::Volume(world.volume.id.clone()));
    let thread = rig.hold("copy.settled", create);
    Box::new(|rig, world| {
        let volume = rig.release(thread)?;
        assert!(rig.content(&volume) == world.now, "other bytes");
        Ok(())
    })
}

fn take_snapshot(rig: &mut Rig, world: &World) -> Rest {
    let (backend, id, name) =
        (rig.backend().clone(), world.volume.id.clone(), rig.name("compared"));
    let thread = rig.hold("snapshot.comparing", move || backend.create_snapshot(&name, &id));
    Box::new(|rig, world| {
        let next = rig.release(thread)?;
        // Reading the snapshot needs space.
        rig.empty();
        assert!(rig.pool.read_snapshot(&next) == world.now, "other bytes");
        match rig.backend().delta(&world.last().id, &next.id) {
            Ok(map) => assert_eq!(blocks(map), changed_blocks()),
            Err(Error::Precondition(_)) => {}
            Err(other) => panic!("{other}"),
        }
        Ok(())
    })
}

fn read_temporary_volume(rig: &mut Rig, world: &World) -> Rest {
    let volume = rig.create_from(Source::Snapshot(world.last().id.clone()))().unwrap();
    let attached = rig.pool.attach(&volume.id);
    let device = File::open(&attached.target).unwrap();
    device.read_exact_at(&mut [0; 4096], 0).unwrap();
    Box::new(move |rig, world| {
        let mut read = vec![0; VOLUME_BYTES as usize];
        device.read_exact_at(&mut read, 0).unwrap();
        drop(device);
        assert!(read == world.content, "other bytes");
        rig.pool.detach(&attached);
        Ok(())
    })
}

fn stream_delta(rig: &mut Rig, world: &World) -> Rest {
    let map = rig.backend().delta(&world.snapshots[0].id, &world.last().id).unwrap();
    let mut extents = map.extents(Style::Fixed(BLOCK), 0).unwrap();
    let mut found = vec![extents.next().unwrap().unwrap().offset / BLOCK];
    Box::new(move |_, _| {
        for extent in extents {
            found.push(extent?.offset / BLOCK);
        }
        assert_eq!(found, changed_blocks());
        Ok(())
    })
}

/// A way to free data. `Busy` if the reader excludes it.
struct Free {
    name: &'static str,
    is_slow: bool,
    run: fn(&mut Rig, &World) -> Result<()>,
}

const FREES: [Free; 8] = [
    Free { name: "snapshot deleted", is_slow: false, run: delete_last },
    Free { name: "tracking off", is_slow: false, run: disable_tracking },
    Free { name: "tracking off, snapshot kept", is_slow: true, run: disable_only },
    Free { name: "pressure", is_slow: false, run: press },
    Free { name: "next snapshot", is_slow: false, run: take_next },
    Free { name: "retention", is_slow: true, run: expire },
    Free { name: "volume deleted", is_slow: false, run: delete_volume },
    Free { name: "restart", is_slow: true, run: restart },
];

fn delete_last(rig: &mut Rig, world: &World) -> Result<()> {
    rig.backend().delete_snapshot(&world.last().id)
}

fn disable_tracking(rig: &mut Rig, world: &World) -> Result<()> {
    delete_last(rig, world)?;
    disable_only(rig, world)
}

/// Removes the clone made ahead.
fn disable_only(rig: &mut Rig, world: &World) -> Result<()> {
    rig.backend().modify_volume(&world.volume.id, tracking(false))
}

fn press(rig: &mut Rig, world: &World) -> Result<()> {
    let deleted = delete_last(rig, world);
    rig.fill();
    rig.backend().relieve_pressure()?;
    deleted
}

fn take_next(rig: &mut Rig, world: &World) -> Result<()> {
    delete_last(rig, world)?;
    let name = rig.name("next");
    rig.backend().create_snapshot(&name, &world.volume.id).map(drop)
}

/// Merges the record of the second snapshot, and the last one's after another snapshot.
fn expire(rig: &mut Rig, world: &World) -> Result<()> {
    take_next(rig, world)?;
    rig.backend().delete_snapshot(&world.snapshots[1].id)?;
    thread::sleep(Duration::from_millis(1100));
    rig.backend().forget_expired()
}

fn delete_volume(rig: &mut Rig, world: &World) -> Result<()> {
    for snapshot in &world.snapshots {
        rig.backend().delete_snapshot(&snapshot.id)?;
    }
    rig.backend().delete_volume(&world.volume.id)
}

/// As after a crash between commit and removal.
fn restart(rig: &mut Rig, world: &World) -> Result<()> {
    delete_last(rig, world)?;
    rig.pool.restart();
    Ok(())
}

fn try_pair(rig: &mut Rig, reader: &Reader, free: &Free) {
    let world = World::new(rig);
    let rest = (reader.begin)(rig, &world);
    match (free.run)(rig, &world) {
        Ok(()) | Err(Error::Busy(_)) => {}
        Err(error) => panic!("{}: {error}", free.name),
    }
    match rest(rig, &world) {
        Ok(()) => {}
        Err(Error::Exhausted(_)) if free.name == "pressure" => {}
        Err(error) => panic!("{} during {}: {error}", free.name, reader.name),
    }
    rig.clear();
}

fn try_pairs(kind: PoolKind, is_in_table: impl Fn(&Reader, &Free) -> bool) {
    let mut rig = Rig::new(kind);
    for reader in &READERS {
        for free in &FREES {
            let is_possible = !(reader.is_call && free.name == "restart");
            if is_possible && is_in_table(reader, free) {
                println!("{kind}: {} during {}", free.name, reader.name);
                try_pair(&mut rig, reader, free);
            }
        }
    }
    rig.pool.restart_sound();
}

#[test]
fn a_volume_from_a_deleted_snapshot_holds_its_bytes() {
    if have_root() {
        for kind in ALL_KINDS {
            try_pairs(kind, |reader, free| reader.name == READERS[0].name && !free.is_slow);
        }
    }
}

#[test]
#[ignore = "full tier"]
fn no_free_changes_what_any_reader_reads() {
    if have_root() {
        ALL_KINDS.into_iter().for_each(|kind| try_pairs(kind, |_, _| true));
    }
}

#[test]
fn a_baseline_in_use_is_kept_and_the_next_one_dropped() {
    if !have_root() {
        return;
    }
    for kind in [PoolKind::Reflink, PoolKind::Copy] {
        let mut rig = Rig::new(kind);
        let [read, idle] = [World::new(&mut rig), World::new(&mut rig)];
        let rest = create_from_snapshot(&mut rig, &read);
        // The one that is read is the older one.
        [&read, &idle].into_iter().for_each(|world| delete_last(&mut rig, world).unwrap());
        rig.fill();
        rig.backend().relieve_pressure().unwrap();
        assert!(read.has_data(&rig) && !idle.has_data(&rig), "{kind}");
        rest(&mut rig, &read).unwrap();
        rig.clear();
        rig.pool.restart_sound();
    }
}

/// On every kind of pool: the space is free soon, whether the data still has a name or not.
#[test]
fn readers_of_deleted_data_stop_when_pods_need_its_space() {
    if !have_root() {
        return;
    }
    for kind in ALL_KINDS {
        let mut rig = Rig::new(kind);
        for free in [delete_last, disable_tracking, take_next] {
            let world = World::new(&mut rig);
            let rest = create_from_snapshot(&mut rig, &world);
            free(&mut rig, &world).unwrap();
            stops(&mut rig, &world, rest);
        }
        // An atomic clone is one step.
        let calls: &[fn(&mut Rig, &World) -> Rest] = match kind {
            PoolKind::Copy => &[take_snapshot, clone_volume],
            PoolKind::Reflink | PoolKind::Image => &[take_snapshot],
        };
        for begin in calls {
            let world = World::new(&mut rig);
            delete_last(&mut rig, &world).unwrap();
            let rest = begin(&mut rig, &world);
            stops(&mut rig, &world, rest);
        }
        rig.pool.restart_sound();
    }
}

fn stops(rig: &mut Rig, world: &World, rest: Rest) {
    rig.fill();
    rig.backend().relieve_pressure().unwrap();
    let full = rig.available();
    exhausted(rest(rig, world), "a reader");
    rig.backend().relieve_pressure().unwrap();
    wait_for("the space is free", || rig.available() >= full + 4 * MIB);
    rig.clear();
}

/// Loop devices, clones and extent maps show zeros instead of missing data.
#[test]
fn a_truncated_file_is_refused_by_every_operation() {
    for_each_pool(|pool| {
        if pool.kind() == PoolKind::Image {
            return;
        }
        let volume = pool.volume("v", 4 * MIB);
        let attached = pool.attach(&volume.id);
        write_direct(&attached.target, 0, &pattern(1, (4 * MIB) as usize));
        let snapshot = pool.snapshot("s", &volume);
        pool.detach(&attached);
        let truncate = |directory: &str, id: &str| {
            let file = pool.data_dir().join(directory).join(id);
            run("chattr", &["-i", path(&file)]);
            File::options().write(true).open(&file).unwrap().set_len(MIB).unwrap();
        };
        let create = |source| {
            let request = VolumeRequest { source: Some(source), ..request() };
            pool.backend().create_volume(&CreateVolume { name: "w".to_owned(), request }).map(drop)
        };
        truncate("snapshots", &snapshot.id);
        refused(create(Source::Snapshot(snapshot.id.clone())));
        // The chain starts again.
        let next = pool.snapshot("next", &volume);
        let delta = pool.backend().delta(&snapshot.id, &next.id).map(drop);
        assert!(matches!(delta, Err(Error::Precondition(_))), "{delta:?}");
        truncate("volumes", &volume.id);
        refused(create(Source::Volume(volume.id.clone())));
        refused(pool.backend().create_snapshot("later", &volume.id).map(drop));
        refused(pool.backend().stage(&volume.id, &pool.scratch().join("stage"), &raw()));
        refused(pool.backend().expand_volume(&volume.id, 8 * MIB, 0).map(drop));
        assert_eq!(pool.backend().volumes(None, 0).unwrap().items.len(), 1);
    });
}

#[track_caller]
fn refused(result: Result<()>) {
    match result {
        Err(Error::Damaged(message)) => assert!(message.contains("truncated"), "{message}"),
        other => panic!("{other:?}"),
    }
}
