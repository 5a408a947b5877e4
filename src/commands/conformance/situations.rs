//! The situations: what is written to which volume before each snapshot.

use std::sync::Arc;

use super::content::{Image, Patterns, Ranges, SECTOR, mixed};
use super::door::{Change, Edit, Source, Volume};
use super::world::{Branch, Group, Shot, World};

const BLOCK: u64 = 4096;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Where the blocks of "many" are; every second one is written.
pub const MANY: std::ops::Range<u64> = 8 * MIB..24 * MIB;
/// The zeros that are written where nothing was.
const ZEROS: std::ops::Range<u64> = 7 * MIB..7 * MIB + 8 * KIB;
/// A larger volume is not filled, in bytes.
const FULL: u64 = 1 << 30;
/// Snapshots of the chain.
pub const CHAIN: usize = 10;
/// The snapshot of the chain that is deleted.
pub const DELETED: &str = "chain-5";

/// Makes the volumes and snapshots of a group.
pub fn prepare(world: &World<'_>, group: Group) -> Branch {
    let mut branch = Branch::new();
    let names = names(group);
    let result = match group {
        Group::Main => main(world, &mut branch),
        Group::Grown => grown(world, &mut branch),
        Group::Restored => restored(world, &mut branch),
        Group::Cloned => cloned(world, &mut branch),
        Group::Orphan => orphan(world, &mut branch),
    };
    if let Err(reason) = result {
        for name in names {
            if branch.iter().all(|(known, _)| *known != name) {
                branch.push((name, Err(reason.clone())));
            }
        }
    }
    branch
}

/// The names of the snapshots of a group.
fn names(group: Group) -> Vec<String> {
    match group {
        Group::Main => {
            let chain = (1..=CHAIN).map(|number| format!("chain-{number}"));
            ["fresh", "sparse", "changed", "many", "full"]
                .map(str::to_owned)
                .into_iter()
                .chain(chain)
                .collect()
        }
        Group::Grown => vec!["grown-1".into(), "grown-2".into()],
        Group::Restored => vec!["restored-1".into(), "restored-2".into()],
        Group::Cloned => vec!["cloned-1".into(), "cloned-2".into()],
        Group::Orphan => vec!["orphan-1".into(), "orphan-2".into()],
    }
}

/// A volume, and its content as it was written.
struct Written<'w, 'd> {
    world: &'w World<'d>,
    volume: Volume,
    image: Image,
    pattern: u8,
    written_zeros: Ranges,
}

impl<'w, 'd> Written<'w, 'd> {
    fn make(
        world: &'w World<'d>,
        name: &str,
        bytes: u64,
        source: Option<(Source<'_>, Image)>,
    ) -> Result<Self, String> {
        let full = format!("{}-{name}", world.settings.prefix);
        let (from, image) = source.map_or((None, None), |(from, image)| (Some(from), Some(image)));
        let made = world.door.make_volume(&full, bytes, from);
        let mut volume = world.step("create a volume", made)?;
        if !world.settings.no_node {
            // A device may be smaller than the capacity that the driver reports.
            volume.size = world.step("use a volume", world.door.change(&volume, &[]))?;
        }
        let mut image = image.unwrap_or_else(|| Image::new(volume.size));
        image.grow(volume.size);
        Ok(Self { world, volume, image, pattern: 0, written_zeros: Ranges::default() })
    }

    /// The number of a pattern that the volume does not hold yet.
    fn fresh(&mut self) -> u8 {
        self.pattern = Patterns::next(self.pattern);
        self.pattern
    }

    fn change(&mut self, edits: &[Edit]) -> Result<(), String> {
        if self.world.settings.no_node {
            return Err("without a node, nothing can be written (--no-node)".to_owned());
        }
        let size = self.world.door.change(&self.volume, edits);
        let size = self.world.step("write to a volume", size)?;
        self.volume.size = self.volume.size.max(size);
        self.image.grow(size);
        for edit in edits {
            let pattern = match edit.change {
                Change::Write(pattern) => pattern,
                Change::Discard | Change::ZeroOut => 0,
            };
            self.image.set(edit.offset..edit.offset + edit.length, pattern);
        }
        Ok(())
    }

    fn shoot(&mut self, name: &str, branch: &mut Branch) -> Result<(), String> {
        let full = format!("{}-{name}", self.world.settings.prefix);
        let snapshot = self.world.door.snapshot(&self.volume, &full);
        let snapshot = self.world.step("create a snapshot", snapshot)?;
        let shot = Shot {
            name: name.to_owned(),
            snapshot,
            size: self.volume.size,
            volume_size: self.volume.size,
            image: Arc::new(self.image.clone()),
            written_zeros: self.written_zeros.clone(),
            is_deleted: false,
            is_orphan: false,
        };
        branch.push((name.to_owned(), Ok(shot)));
        Ok(())
    }

    fn grow(&mut self, bytes: u64, branch: &mut Branch) -> Result<(), String> {
        let size = self.world.door.grow(&self.volume, bytes);
        self.volume.size = self.world.step("grow a volume", size)?.max(self.volume.size);
        self.image.grow(self.volume.size);
        for shot in branch.iter_mut().filter_map(|(_, shot)| shot.as_mut().ok()) {
            shot.volume_size = self.volume.size;
        }
        Ok(())
    }
}

fn write(offset: u64, length: u64, pattern: u8) -> Edit {
    Edit { offset, length, change: Change::Write(pattern) }
}

/// The blocks that the seed selects in a range: at most this many, ascending.
fn random_blocks(seed: u64, range: std::ops::Range<u64>, count: u64) -> Vec<u64> {
    let blocks = (range.end - range.start) / BLOCK;
    let numbers = (0..count).map(|number| mixed(seed ^ number) % blocks.max(1));
    let mut offsets: Vec<u64> = numbers.map(|number| range.start + number * BLOCK).collect();
    offsets.sort_unstable();
    offsets.dedup();
    offsets
}

fn main(world: &World<'_>, branch: &mut Branch) -> Result<(), String> {
    // Not a multiple of a driver's unit, where the driver allows that.
    let odd = Written::make(world, "main", world.settings.size + SECTOR, None);
    let mut volume = match odd {
        Ok(volume) => volume,
        Err(_) => Written::make(world, "main-even", world.settings.size, None)?,
    };
    volume.shoot("fresh", branch)?;
    let edits = sparse(world, &mut volume);
    volume.change(&edits)?;
    volume.shoot("sparse", branch)?;
    let edits = changed(&mut volume);
    volume.change(&edits)?;
    volume.written_zeros = Ranges(vec![2 * MIB..2 * MIB + BLOCK, ZEROS]);
    volume.shoot("changed", branch)?;
    volume.written_zeros = Ranges::default();
    let pattern = volume.fresh();
    let blocks = (MANY.start..MANY.end).step_by(2 * BLOCK as usize);
    let edits: Vec<Edit> = blocks.map(|offset| write(offset, BLOCK, pattern)).collect();
    volume.change(&edits)?;
    volume.shoot("many", branch)?;
    if volume.volume.size <= FULL {
        let whole = write(0, volume.volume.size, volume.fresh());
        volume.change(&[whole])?;
        volume.shoot("full", branch)?;
    } else {
        let reason = "the volume has more than 1 GiB, so it is not filled".to_owned();
        branch.push(("full".to_owned(), Err(reason)));
    }
    chain(world, volume, branch)
}

/// First, last, single and adjacent blocks, parts of blocks, and a long range.
fn sparse(world: &World<'_>, volume: &mut Written<'_, '_>) -> Vec<Edit> {
    let (size, pattern) = (volume.volume.size, volume.fresh());
    let mut edits = vec![
        write(0, BLOCK, pattern),
        write(MIB, BLOCK, pattern),
        write(2 * MIB, 2 * BLOCK, pattern),
        write(3 * MIB, SECTOR, pattern),
        write(4 * MIB + BLOCK - SECTOR, SECTOR, pattern),
        write(5 * MIB, 64 * KIB, pattern),
    ];
    let random = random_blocks(world.settings.seed, 24 * MIB..size - MIB, 24);
    edits.extend(random.into_iter().map(|offset| write(offset, BLOCK, pattern)));
    edits.push(write(size - SECTOR, SECTOR, pattern));
    edits
}

/// The same bytes again, zeros in each way that a client has, and other data.
fn changed(volume: &mut Written<'_, '_>) -> Vec<Edit> {
    let (size, same, pattern) = (volume.volume.size, volume.pattern, volume.fresh());
    vec![
        write(0, BLOCK, pattern),
        write(MIB, BLOCK, same),
        write(2 * MIB, BLOCK, 0),
        write(3 * MIB + BLOCK, SECTOR, pattern),
        write(4 * MIB, SECTOR, pattern),
        Edit { offset: 5 * MIB, length: 16 * KIB, change: Change::Discard },
        Edit { offset: 5 * MIB + 32 * KIB, length: 16 * KIB, change: Change::ZeroOut },
        write(ZEROS.start, ZEROS.end - ZEROS.start, 0),
        write(size - SECTOR, SECTOR, pattern),
    ]
}

/// Ten snapshots with few changes between them; one in the middle is deleted.
fn chain(
    world: &World<'_>,
    mut volume: Written<'_, '_>,
    branch: &mut Branch,
) -> Result<(), String> {
    for number in 1..=CHAIN {
        let pattern = volume.fresh();
        let own = MIB * 2 + number as u64 * 64 * KIB;
        let edits = [
            write(MIB, BLOCK, pattern),
            write(own, BLOCK, pattern),
            write(own + 32 * KIB, BLOCK, 0),
        ];
        volume.change(&edits)?;
        volume.shoot(&format!("chain-{number}"), branch)?;
    }
    let deleted = branch.iter_mut().find(|(name, _)| name == DELETED);
    if let Some((_, entry @ Ok(_))) = deleted
        && let Ok(shot) = entry
    {
        match world.step("delete a snapshot", world.door.delete_snapshot(&shot.snapshot)) {
            Ok(()) => shot.is_deleted = true,
            Err(reason) => *entry = Err(reason),
        }
    }
    Ok(())
}

/// Grown before, between and after the snapshots.
fn grown(world: &World<'_>, branch: &mut Branch) -> Result<(), String> {
    let (size, grown_size) = (world.settings.size, world.settings.grown_size);
    let step = |number: u64| size + (grown_size - size) / 3 / MIB * MIB * number;
    let mut volume = Written::make(world, "grown", size, None)?;
    volume.grow(step(1), branch)?;
    let pattern = volume.fresh();
    let last = volume.volume.size - BLOCK;
    volume.change(&[write(0, BLOCK, pattern), write(last, BLOCK, pattern)])?;
    volume.shoot("grown-1", branch)?;
    let former = volume.volume.size;
    volume.grow(step(2), branch)?;
    let pattern = volume.fresh();
    let last = volume.volume.size - BLOCK;
    volume.change(&[write(former, BLOCK, pattern), write(last, BLOCK, pattern)])?;
    volume.shoot("grown-2", branch)?;
    volume.grow(grown_size, branch)
}

/// A volume with the content of a snapshot: its first snapshot holds only data of the parent.
fn restored(world: &World<'_>, branch: &mut Branch) -> Result<(), String> {
    let parent = world.shot("changed").map_err(|outcome| outcome.reason())?;
    let source = (Source::Snapshot(&parent.snapshot), parent.image.as_ref().clone());
    let size = parent.size.max(parent.snapshot.size);
    let mut volume = Written::make(world, "restored", size, Some(source))?;
    // The patterns of the parent.
    volume.pattern = 100;
    volume.shoot("restored-1", branch)?;
    let pattern = volume.fresh();
    volume.change(&[write(MIB, BLOCK, pattern), write(6 * MIB, BLOCK, pattern)])?;
    volume.shoot("restored-2", branch)?;
    // A clone must have the capacity that was requested, of which a device can have less.
    let kept = Volume { size: size.max(volume.volume.size), ..volume.volume.clone() };
    let _ = world.restored.set((kept, volume.image));
    Ok(())
}

/// A volume with the content of a volume.
fn cloned(world: &World<'_>, branch: &mut Branch) -> Result<(), String> {
    world.branch(Group::Restored).map_err(|outcome| outcome.reason())?;
    let Some((parent, image)) = world.restored.get() else {
        return Err("there is no volume to clone".to_owned());
    };
    let source = (Source::Volume(parent), image.clone());
    let mut volume = Written::make(world, "cloned", parent.size, Some(source))?;
    volume.pattern = 150;
    volume.shoot("cloned-1", branch)?;
    let pattern = volume.fresh();
    volume.change(&[write(2 * MIB, BLOCK, pattern), write(6 * MIB + BLOCK, BLOCK, pattern)])?;
    volume.shoot("cloned-2", branch)
}

/// The volume of the snapshots is deleted.
fn orphan(world: &World<'_>, branch: &mut Branch) -> Result<(), String> {
    let mut volume = Written::make(world, "orphan", world.settings.size, None)?;
    let pattern = volume.fresh();
    volume.change(&[write(MIB, BLOCK, pattern), write(9 * MIB, 64 * KIB, pattern)])?;
    volume.shoot("orphan-1", branch)?;
    let pattern = volume.fresh();
    volume.change(&[write(MIB, BLOCK, pattern), write(3 * MIB, BLOCK, pattern)])?;
    volume.shoot("orphan-2", branch)?;
    let deleted = world.door.delete_volume(&volume.volume);
    if let Err(reason) = world.step("delete a volume that has snapshots", deleted) {
        branch.iter_mut().for_each(|(_, shot)| *shot = Err(reason.clone()));
        return Err(reason);
    }
    for shot in branch.iter_mut().filter_map(|(_, shot)| shot.as_mut().ok()) {
        shot.is_orphan = true;
    }
    Ok(())
}
