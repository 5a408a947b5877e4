//! The invariants after a power loss.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use csi_loopback::backend::{self, Backend, Config, PoolChoice, PoolKind, SnapshotFilter, check};

use super::ledger::{Certainty, Moment, Print, Records, Snapshot, Volume};
use super::load::{RAW, differing, pool_root, print_of_zeros, prints};
use support::random::Random;
use support::*;

/// Statistics of the checks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    pub snapshots: u64,
    pub deltas: u64,
    /// Different blocks, all contained in the deltas.
    pub blocks: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.snapshots += other.snapshots;
        self.deltas += other.deltas;
        self.blocks += other.blocks;
    }
}

/// A pool after a power loss.
pub struct Look<'a> {
    data_dir: PathBuf,
    records: &'a Records,
    moment: Moment,
    backend: Backend,
    /// The directory of the pool's files.
    root: PathBuf,
    /// The objects of the backend, by name.
    volumes: BTreeMap<String, backend::Volume>,
    snapshots: BTreeMap<String, backend::Snapshot>,
    counts: Counts,
    random: Random,
}

impl<'a> Look<'a> {
    pub fn new(
        kind: PoolKind,
        data_dir: &Path,
        records: &'a Records,
        moment: Moment,
        seed: u64,
    ) -> Self {
        let config = Config {
            data_dir: data_dir.to_owned(),
            pool: PoolChoice::Kind(kind),
            pool_size: None,
            pool_sparse: false,
            pool_block_size: None,
            retention: std::time::Duration::from_secs(3600),
            overcommit: 1e6,
            inline: Default::default(),
            runtime: None,
            freeze_guard: Default::default(),
        };
        let backend = Backend::open(config).expect("the driver starts after a power loss");
        let volumes = backend.volumes(None, 0).unwrap().items;
        let snapshots = backend.snapshots(&SnapshotFilter::default(), None, 0).unwrap().items;
        Self {
            data_dir: data_dir.to_owned(),
            records,
            moment,
            backend,
            root: pool_root(kind, data_dir, "self"),
            volumes: volumes.into_iter().map(|row| (row.name.clone(), row)).collect(),
            snapshots: snapshots.into_iter().map(|row| (row.name.clone(), row)).collect(),
            counts: Counts::default(),
            random: Random::new(seed),
        }
    }

    /// Panics if an invariant is violated.
    pub fn verify(mut self) -> Counts {
        self.check_volumes();
        self.check_snapshots();
        self.check_groups();
        let names: BTreeSet<&str> =
            self.records.snapshots.iter().map(|snapshot| snapshot.volume.as_str()).collect();
        names.into_iter().for_each(|volume| self.check_chain(volume));
        self.go_on();
        let Self { backend, data_dir, counts, .. } = self;
        drop(backend);
        let report = check::check(&data_dir).unwrap();
        assert!(report.findings.is_empty(), "pool check: {:?}", report.findings);
        counts
    }

    fn certain(&self, what: &str, exists: Certainty, found: bool) {
        match exists {
            Certainty::Yes => assert!(found, "{what} was acknowledged but is missing"),
            Certainty::No => assert!(!found, "{what} was deleted or never created but exists"),
            Certainty::Maybe => {}
        }
    }

    fn check_volumes(&self) {
        for name in self.volumes.keys() {
            assert!(self.records.volume(name).is_some(), "{name}: this volume was never created");
        }
        for volume in &self.records.volumes {
            let row = self.volumes.get(&volume.name);
            self.certain(&volume.name, volume.life.exists(self.moment), row.is_some());
            if let Some(row) = row {
                self.check_volume(volume, row);
            }
        }
    }

    fn check_volume(&self, volume: &Volume, row: &backend::Volume) {
        let name = &volume.name;
        let (mut least, mut most) = (0, 0);
        for (span, size) in &volume.sizes {
            match span.at(self.moment) {
                Certainty::Yes => (least, most) = (*size, *size),
                Certainty::Maybe => most = most.max(*size),
                Certainty::No => {}
            }
        }
        let size = row.capacity_bytes;
        assert!((least..=most).contains(&size), "{name} has {size} bytes, not {least} to {most}");
        let path = self.root.join("volumes").join(&row.id);
        assert_eq!(path.metadata().unwrap().len(), size, "the backing file of {name}");
        let Some(content) = &volume.content else { return };
        assert_same(name, content, &prints(&path));
    }

    fn check_snapshots(&mut self) {
        for (name, row) in &self.snapshots {
            let known = self.records.snapshot(name);
            let known = known.unwrap_or_else(|| panic!("{name}: this snapshot was never taken"));
            assert!(known.id.is_empty() || known.id == row.id, "{name} has another id");
        }
        for snapshot in &self.records.snapshots {
            let row = self.snapshots.get(&snapshot.name);
            self.certain(&snapshot.name, snapshot.life.exists(self.moment), row.is_some());
            let (Some(row), Some(content)) = (row, &snapshot.content) else { continue };
            let found = prints(&self.root.join("snapshots").join(&row.id));
            assert_eq!(found.len(), content.len(), "the size of {}", row.name);
            assert_same(&row.name, content, &found);
            self.check_allocated(row, content);
            self.counts.snapshots += 1;
        }
    }

    fn check_allocated(&self, row: &backend::Snapshot, content: &[Print]) {
        let zero = print_of_zeros();
        let allocated = blocks(self.backend.allocated(&row.id).unwrap());
        for block in (0..content.len()).filter(|block| content[*block] != zero) {
            let found = allocated.binary_search(&(block as u64)).is_ok();
            assert!(found, "block {block} of {} contains data but is not allocated", row.name);
        }
    }

    /// All members or none.
    fn check_groups(&self) {
        let mut found: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        for snapshot in &self.records.snapshots {
            let Some(group) = &snapshot.group else { continue };
            let entry = found.entry(&group.name).or_insert((0, group.members));
            entry.0 += usize::from(self.snapshots.contains_key(&snapshot.name));
        }
        for (name, (members, of)) in found {
            assert!(members == 0 || members == of, "{name} has {members} members of {of}");
        }
    }

    /// The existing snapshots of a volume, and those deleted later: each can be a base.
    fn chain(&self, volume: &str) -> Vec<&'a Snapshot> {
        let is_known = |snapshot: &&Snapshot| {
            let acknowledged = snapshot.life.made.at(self.moment) == Certainty::Yes;
            snapshot.volume == volume
                && snapshot.content.is_some()
                && (acknowledged || self.snapshots.contains_key(&snapshot.name))
        };
        self.records.snapshots.iter().filter(is_known).collect()
    }

    /// Checks the deltas from the previous snapshot and from an older one.
    fn check_chain(&mut self, volume: &str) {
        let chain = self.chain(volume);
        for (number, target) in chain.iter().enumerate().skip(1) {
            let Some(row) = self.snapshots.get(&target.name) else { continue };
            let id = row.id.clone();
            let further = self.random.below(number as u64) as usize;
            for base in BTreeSet::from([number - 1, further]) {
                self.check_delta(chain[base], &id, target.content.as_ref().unwrap());
            }
        }
    }

    fn check_delta(&mut self, base: &Snapshot, target: &str, content: &[Print]) {
        let before = base.content.as_ref().unwrap();
        let delta = self.backend.delta(&base.id, target);
        let delta = delta.unwrap_or_else(|error| panic!("{} to {target}: {error}", base.name));
        let reported = blocks(delta);
        let differing = differing(before, content);
        for block in &differing {
            let found = reported.binary_search(block).is_ok();
            assert!(
                found,
                "block {block} differs from {} to {target}: not in the delta",
                base.name
            );
        }
        self.counts.deltas += 1;
        self.counts.blocks += differing.len() as u64;
    }

    /// The pool works: new writes are in the delta from the last snapshot.
    fn go_on(&mut self) {
        let Some(row) = self.volumes.get(RAW) else { return };
        let path = self.root.join("volumes").join(&row.id);
        let file = File::options().write(true).open(&path).unwrap();
        for _ in 0..50 {
            let block = self.random.below(row.capacity_bytes / BLOCK);
            file.write_all_at(&pattern(self.random.next_u64(), BLOCK as usize), block * BLOCK)
                .unwrap();
        }
        let next = self.backend.create_snapshot("after-the-power-loss", &row.id).unwrap();
        let content = prints(&path);
        let found = prints(&self.root.join("snapshots").join(&next.id));
        assert!(found == content, "the next snapshot has other content than its volume");
        self.check_allocated(&next, &content);
        if let Some(last) = self.chain(RAW).last() {
            self.check_delta(last, &next.id, &content);
        }
    }
}

fn assert_same(name: &str, content: &[Print], found: &[Print]) {
    let differing = differing(content, found);
    let first = &differing[..differing.len().min(8)];
    let count = differing.len();
    assert!(count == 0, "{name} has other content in {count} blocks, {first:?} and so on");
}
