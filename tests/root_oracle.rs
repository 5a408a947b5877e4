//! The oracle: random operations on volumes, mirrored in memory. After each snapshot every delta is
//! compared with what really differs: nothing that differs may be missing, and where no block was
//! rewritten with what it held, nothing else may be reported.
//!
//! `ORACLE_SEED` replays a run, `ORACLE_OPERATIONS` sets its length, `ORACLE_POOL` its kind of pool.

mod support;

use std::collections::BTreeSet;

use csi_loopback::backend::{Error, PoolKind, Source, Volume, VolumeRequest};
use support::*;

/// Operations per kind of pool, unless asked for otherwise.
const OPERATIONS: u64 = 20_000;
/// Snapshots per kind of pool that such a run has to reach.
const SNAPSHOTS: u64 = 200;
const MOST_VOLUMES: usize = 3;
const MOST_BYTES: u64 = 24 * MIB;

/// A small generator that the seed determines.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

/// What a block holds, as far as telling blocks apart goes.
type Print = u32;

fn print_of(block: &[u8]) -> Print {
    crc32c::crc32c(block)
}

/// A volume's content, as it has to be.
#[derive(Clone)]
struct Image {
    bytes: Vec<u8>,
    prints: Vec<Print>,
}

impl Image {
    fn empty(bytes: u64) -> Self {
        let mut image = Self { bytes: Vec::new(), prints: Vec::new() };
        image.grow(bytes);
        image
    }

    fn of(bytes: Vec<u8>) -> Self {
        let prints = bytes.chunks(BLOCK as usize).map(print_of).collect();
        Self { bytes, prints }
    }

    fn grow(&mut self, bytes: u64) {
        self.bytes.resize(bytes as usize, 0);
        self.prints.resize((bytes / BLOCK) as usize, print_of(&[0; BLOCK as usize]));
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.bytes[offset as usize..offset as usize + data.len()].copy_from_slice(data);
        let end = (offset + data.len() as u64).div_ceil(BLOCK);
        for block in offset / BLOCK..end {
            let at = (block * BLOCK) as usize;
            self.prints[block as usize] = print_of(&self.bytes[at..at + BLOCK as usize]);
        }
    }
}

/// A snapshot that was cut, perhaps deleted since.
struct Cut {
    id: String,
    prints: Vec<Print>,
    bytes: Option<Vec<u8>>,
    deleted: bool,
}

/// A volume that is attached.
struct Live {
    volume: Volume,
    attached: Attached,
    image: Image,
    cuts: Vec<Cut>,
    /// Blocks that were written since the last cut, with whatever.
    touched: BTreeSet<u64>,
    /// Some of them with what they held already.
    rewritten: bool,
}

#[derive(Default)]
struct Counts {
    snapshots: u64,
    deltas: u64,
    restarts: u64,
    clones: u64,
    restores: u64,
    deleted: u64,
    /// Blocks, in deltas between neighbours without rewritten data.
    differing: u64,
    reported: u64,
}

struct Oracle<'a> {
    pool: &'a mut Pool,
    random: Random,
    live: Vec<Live>,
    names: u64,
    counts: Counts,
}

impl Oracle<'_> {
    fn name(&mut self) -> String {
        self.names += 1;
        format!("o{}", self.names)
    }

    /// Adds a volume that holds `image`.
    fn adopt(&mut self, volume: Volume, image: Image) {
        let attached = self.pool.attach(&volume.id);
        let (cuts, touched) = (Vec::new(), BTreeSet::new());
        self.live.push(Live { volume, attached, image, cuts, touched, rewritten: false });
    }

    fn add_empty(&mut self) {
        let bytes = (8 + self.random.below(8)) * MIB;
        let name = self.name();
        let volume = self.pool.volume(&name, bytes);
        self.adopt(volume, Image::empty(bytes));
    }

    fn step(&mut self) {
        let index = self.random.below(self.live.len() as u64) as usize;
        match self.random.below(1000) {
            0..550 => self.write_blocks(index),
            550..760 => self.write_bytes(index),
            760..850 => self.zero(index),
            850..870 => self.discard(index),
            870..960 => self.rewrite(index),
            960..964 => self.expand(index),
            964..979 => self.snapshot(index),
            979..989 => self.delete_snapshot(index),
            989..992 => self.restart(),
            992..995 => self.derive(index, true),
            995..998 => self.derive(index, false),
            _ => self.delete_volume(index),
        }
    }

    /// A range of up to `most` bytes within a volume, in whole `unit`s.
    fn range(&mut self, index: usize, unit: u64, most: u64) -> (u64, u64) {
        let units = self.live[index].volume.capacity_bytes / unit;
        let start = self.random.below(units);
        let length = 1 + self.random.below((most / unit).min(units - start));
        (start * unit, length * unit)
    }

    fn fresh(&mut self, length: u64) -> Vec<u8> {
        pattern(self.random.next(), length as usize)
    }

    fn touch(&mut self, index: usize, offset: u64, data: &[u8]) {
        let live = &mut self.live[index];
        live.image.write(offset, data);
        live.touched.extend(offset / BLOCK..(offset + data.len() as u64).div_ceil(BLOCK));
    }

    fn write_blocks(&mut self, index: usize) {
        let (offset, length) = self.range(index, BLOCK, 64 << 10);
        let data = self.fresh(length);
        write_direct(&self.live[index].attached.target, offset, &data);
        self.touch(index, offset, &data);
    }

    fn write_bytes(&mut self, index: usize) {
        let (offset, length) = self.range(index, 1, 20_000);
        let data = self.fresh(length);
        write_buffered(&self.live[index].attached.target, offset, &data);
        self.touch(index, offset, &data);
    }

    fn zero(&mut self, index: usize) {
        let (offset, length) = self.range(index, BLOCK, 256 << 10);
        let unmap = self.random.one_in(2);
        zero(&self.live[index].attached.target, offset, length, unmap);
        self.touch(index, offset, &vec![0; length as usize]);
    }

    fn discard(&mut self, index: usize) {
        let (offset, length) = self.range(index, BLOCK, 256 << 10);
        discard(&self.live[index].attached.target, offset, length);
        self.touch(index, offset, &vec![0; length as usize]);
    }

    /// Writes what is there already: it may be reported, or not.
    fn rewrite(&mut self, index: usize) {
        // Most intervals have none, so that precision is seen too.
        if self.live[index].cuts.len() % 4 != 3 {
            return self.write_blocks(index);
        }
        let (offset, length) = self.range(index, BLOCK, 64 << 10);
        let at = offset as usize..(offset + length) as usize;
        let data = self.live[index].image.bytes[at].to_vec();
        // Zeros that are written count as data, and a discard of them later as a change.
        if data.chunks(BLOCK as usize).any(|block| block.iter().all(|byte| *byte == 0)) {
            return self.write_blocks(index);
        }
        write_direct(&self.live[index].attached.target, offset, &data);
        self.touch(index, offset, &data);
        self.live[index].rewritten = true;
    }

    fn expand(&mut self, index: usize) {
        let capacity = self.live[index].volume.capacity_bytes;
        let bytes = (capacity + self.random.below(512) * BLOCK).min(MOST_BYTES).max(capacity);
        let id = &self.live[index].volume.id;
        let grown = self.pool.backend().expand_volume(id, bytes, 0).unwrap();
        assert_eq!(grown.capacity_bytes, bytes);
        self.live[index].volume = grown;
        self.live[index].image.grow(bytes);
    }

    fn snapshot(&mut self, index: usize) {
        let name = self.name();
        let live = &self.live[index];
        let snapshot = self.pool.snapshot(&name, &live.volume);
        assert_eq!(snapshot.capacity_bytes, live.volume.capacity_bytes);
        self.counts.snapshots += 1;
        self.check_allocated(index, &snapshot.id);
        self.check_deltas(index, &snapshot.id);
        // The content of some is kept, to be compared with what a restore finds.
        let keep = self.random.one_in(4);
        let live = &mut self.live[index];
        live.cuts.push(Cut {
            id: snapshot.id,
            prints: live.image.prints.clone(),
            bytes: keep.then(|| live.image.bytes.clone()),
            deleted: false,
        });
        live.touched.clear();
        live.rewritten = false;
        if self.random.one_in(10) {
            self.check_content(index);
        }
    }

    fn check_allocated(&self, index: usize, id: &str) {
        let zero = print_of(&[0; BLOCK as usize]);
        let allocated = blocks(self.pool.backend().allocated(id).unwrap());
        let prints = self.live[index].image.prints.iter().enumerate();
        for (block, _) in prints.filter(|(_, print)| **print != zero) {
            let found = allocated.binary_search(&(block as u64)).is_ok();
            assert!(found, "block {block} holds data and is not reported as allocated");
        }
    }

    /// The deltas from the neighbour, and from some of those before, to a new snapshot.
    fn check_deltas(&mut self, index: usize, id: &str) {
        let cuts = self.live[index].cuts.len();
        for base in (0..cuts).rev() {
            let neighbour = base + 1 == cuts;
            if !neighbour && !self.random.one_in(cuts as u64 / 4 + 1) {
                continue;
            }
            let live = &self.live[index];
            let cut = &live.cuts[base];
            let reported = blocks(self.pool.backend().delta(&cut.id, id).unwrap());
            let differing = differing(&cut.prints, &live.image.prints);
            self.counts.deltas += 1;
            for block in &differing {
                let found = reported.binary_search(block).is_ok();
                assert!(found, "block {block} differs from {} and is not reported", cut.id);
            }
            if !neighbour {
                continue;
            }
            for block in &reported {
                assert!(live.touched.contains(block), "block {block} was never written");
            }
            if !live.rewritten {
                self.counts.differing += differing.len() as u64;
                self.counts.reported += reported.len() as u64;
                let extra: Vec<_> = reported
                    .iter()
                    .filter(|block| differing.binary_search(block).is_err())
                    .collect();
                assert!(
                    extra.is_empty(),
                    "{extra:?} reported without a difference from {}",
                    cut.id
                );
            }
        }
    }

    /// Reads a snapshot back, and the volume as it is now.
    fn check_content(&mut self, index: usize) {
        let live = &self.live[index];
        assert!(read_all(&live.attached.target) == live.image.bytes, "the volume itself is wrong");
        let kept = |cut: &&Cut| !cut.deleted && cut.bytes.is_some();
        let Some(cut) = live.cuts.iter().rev().find(kept) else { return };
        let snapshot = self.pool.backend().snapshot(&cut.id).unwrap();
        let expected = cut.bytes.clone().unwrap();
        assert!(self.pool.read_snapshot(&snapshot) == expected, "{} is wrong", snapshot.id);
    }

    fn delete_snapshot(&mut self, index: usize) {
        let live = &mut self.live[index];
        let alive: Vec<usize> =
            (0..live.cuts.len()).filter(|cut| !live.cuts[*cut].deleted).collect();
        if alive.is_empty() {
            return;
        }
        // The newest more often: it is the one whose data has to stay.
        let newest = self.random.one_in(3);
        let at =
            if newest { alive.len() - 1 } else { self.random.below(alive.len() as u64) as usize };
        let cut = &mut live.cuts[alive[at]];
        self.pool.backend().delete_snapshot(&cut.id).unwrap();
        cut.deleted = true;
        self.counts.deleted += 1;
        assert!(matches!(self.pool.backend().snapshot(&cut.id), Err(Error::NotFound { .. })));
    }

    fn restart(&mut self) {
        self.pool.restart();
        self.counts.restarts += 1;
    }

    /// A clone of a volume, or a volume from one of its snapshots.
    fn derive(&mut self, index: usize, clone: bool) {
        if self.live.len() == MOST_VOLUMES {
            self.delete_volume(index);
        }
        let index = self.random.below(self.live.len() as u64) as usize;
        let live = &self.live[index];
        let kept = live.cuts.iter().rfind(|cut| !cut.deleted && cut.bytes.is_some());
        let (source, image) = match kept {
            Some(cut) if !clone => {
                self.counts.restores += 1;
                (Source::Snapshot(cut.id.clone()), Image::of(cut.bytes.clone().unwrap()))
            }
            _ => {
                self.counts.clones += 1;
                (Source::Volume(live.volume.id.clone()), live.image.clone())
            }
        };
        let name = self.name();
        let volume = self.pool.create(&name, VolumeRequest { source: Some(source), ..request() });
        self.adopt(volume, image);
        let new = self.live.last().unwrap();
        assert!(read_all(&new.attached.target) == new.image.bytes, "a copy is wrong");
    }

    /// Deletes a volume; what is left of its snapshots goes too, in either order.
    fn delete_volume(&mut self, index: usize) {
        if self.live.len() == 1 {
            return;
        }
        let live = self.live.swap_remove(index);
        self.pool.detach(&live.attached);
        let backend = self.pool.backend();
        let volume_first = self.random.one_in(2);
        if volume_first {
            backend.delete_volume(&live.volume.id).unwrap();
        }
        for cut in live.cuts.iter().filter(|cut| !cut.deleted) {
            backend.delete_snapshot(&cut.id).unwrap();
        }
        if !volume_first {
            backend.delete_volume(&live.volume.id).unwrap();
        }
    }
}

/// The blocks that differ; past the end of the older one there are zeros.
fn differing(old: &[Print], new: &[Print]) -> Vec<u64> {
    let zero = print_of(&[0; BLOCK as usize]);
    let differs = |block: &usize| old.get(*block).copied().unwrap_or(zero) != new[*block];
    (0..new.len()).filter(differs).map(|block| block as u64).collect()
}

fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text:?}")))
}

fn torture(test: &str, kind: PoolKind) {
    if !have_root(test) || std::env::var("ORACLE_POOL").is_ok_and(|name| name != kind.to_string()) {
        return;
    }
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    let seed = setting("ORACLE_SEED").unwrap_or(now % 1_000_000_000);
    let operations = setting("ORACLE_OPERATIONS").unwrap_or(OPERATIONS);
    println!("replay with: ORACLE_SEED={seed} ORACLE_OPERATIONS={operations} ORACLE_POOL={kind}");
    let mut pool = Pool::new(kind);
    let mut oracle = Oracle {
        pool: &mut pool,
        random: Random(seed),
        live: Vec::new(),
        names: 0,
        counts: Counts::default(),
    };
    oracle.add_empty();
    oracle.add_empty();
    for _ in 0..operations {
        oracle.step();
    }
    let counts = oracle.counts;
    println!(
        "report: {kind}: seed {seed}: {operations} operations, {} snapshots ({} deleted), {} deltas, \
         {} clones, {} restores, {} restarts; 0 blocks missed; precision {:.4} ({} reported / {} \
         differing)",
        counts.snapshots,
        counts.deleted,
        counts.deltas,
        counts.clones,
        counts.restores,
        counts.restarts,
        counts.reported as f64 / counts.differing.max(1) as f64,
        counts.reported,
        counts.differing,
    );
    assert!(operations < OPERATIONS || counts.snapshots >= SNAPSHOTS, "too few snapshots");
    pool.stop();
    let report = csi_loopback::backend::check::check(pool.data_dir()).unwrap();
    assert!(report.findings.is_empty(), "{:?}", report.findings);
}

#[test]
fn a_reflink_pool_never_misses_a_changed_block() {
    torture("a_reflink_pool_never_misses_a_changed_block", PoolKind::Reflink);
}

#[test]
fn an_image_pool_never_misses_a_changed_block() {
    torture("an_image_pool_never_misses_a_changed_block", PoolKind::Image);
}

#[test]
fn a_copy_pool_never_misses_a_changed_block() {
    torture("a_copy_pool_never_misses_a_changed_block", PoolKind::Copy);
}
