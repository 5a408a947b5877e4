//! States that kills between steps cannot make: data of an interrupted program, lost files, another
//! clock. The next start must recover them, a check must find nothing, and a repetition of the
//! interrupted call must succeed. tests/crash kills the driver at each step.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use super::super::catalog::Catalog;
use super::super::model::{
    Access, AccessMode, Capability, ChainBreak, Format, FsType, Predecessor, Publication,
    VolumeRequest,
};
use super::super::pool::{self, PoolChoice, PoolKind};
use super::super::store::now;
use super::super::testing::have_root;
use super::super::tracker::{Bitmap, Header, RecordWriter, Style};
use super::super::units::{BLOCK_SIZE, Block, BlockRange};
use super::super::{Backend, Config, CreateVolume, Error, check, filesystem, sys};
use super::*;
use crate::loop_device::LoopDevice;

mod clock;
mod files;
mod use_and_loss;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

pub fn config(directory: &Path, kind: PoolKind) -> Config {
    Config {
        data_dir: directory.join("data"),
        pool: PoolChoice::Kind(kind),
        pool_size: Some(4 << 30),
        pool_sparse: true,
        // Tests write records in blocks of 4 KiB.
        pool_block_size: Some(BLOCK_SIZE),
        retention: Duration::from_secs(3600),
        overcommit: 1e6,
        inline: Default::default(),
        runtime: None,
        freeze_guard: Default::default(),
    }
}

/// A backend that can be closed and reopened. Detaches everything at the end, also after a panic.
struct Pool {
    backend: Option<Backend>,
    config: Config,
    staged: Vec<PathBuf>,
    directory: TempDir,
}

impl Pool {
    fn new(kind: PoolKind) -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let config = config(directory.path(), kind);
        let backend = Some(Backend::open(config.clone()).unwrap());
        Self { backend, config, staged: Vec::new(), directory }
    }

    fn backend(&self) -> &Backend {
        self.backend.as_ref().unwrap()
    }

    fn store(&self) -> &Store {
        &self.backend().store
    }

    /// Closes the backend, as the kernel does after a crash, and starts it again.
    fn restart(&mut self) {
        self.backend = None;
        self.backend = Some(Backend::open(self.config.clone()).unwrap());
    }

    /// Restarts the backend and expects a clean check.
    fn recover(&mut self) {
        self.restart();
        self.backend = None;
        let report = check::check(&self.config.data_dir).unwrap();
        assert_eq!(report.findings, [], "after recovery");
        self.restart();
    }

    fn request(&self, name: &str) -> CreateVolume {
        let request =
            VolumeRequest { required_bytes: 4 * MIB, change_tracking: true, ..Default::default() };
        CreateVolume { name: name.to_owned(), request }
    }

    fn volume(&self, name: &str) -> Volume {
        self.backend().create_volume(&self.request(name)).unwrap()
    }

    /// Writes a block of a volume that is not attached.
    fn write(&self, volume: &Volume, block: u64, fill: u8) {
        let file = self.store().open_volume(volume).unwrap();
        file.write_all_at(&[fill; BLOCK as usize], block * BLOCK).unwrap();
    }

    fn snapshot(&self, name: &str, volume: &Volume) -> Snapshot {
        self.backend().create_snapshot(name, &volume.id).unwrap()
    }

    fn delta(&self, base: &Snapshot, target: &Snapshot) -> Vec<u64> {
        let map = self.backend().delta(&base.id, &target.id).unwrap();
        let extents = map.extents(Style::Variable, 0).unwrap().map(Result::unwrap);
        extents.flat_map(|e| e.offset / BLOCK..e.end() / BLOCK).collect()
    }

    fn stage(&mut self, volume: &Volume, capability: &Capability) -> PathBuf {
        let path = self.directory.path().join(format!("stage-{}", volume.id));
        self.staged.push(path.clone());
        self.backend().stage(&volume.id, &path, capability).unwrap();
        path
    }

    fn device(&self, volume: &Volume) -> Option<LoopDevice> {
        let file = File::open(self.store().pool.volume_path(&volume.id)).unwrap();
        LoopDevice::find(&file).unwrap().into_iter().next()
    }

    fn row(&self, id: &str) -> Snapshot {
        self.store().catalog.read().unwrap().get(id).unwrap().unwrap()
    }

    fn put<R: crate::catalog::Row>(&self, row: &R) {
        self.store().catalog.write(|tx| tx.put(row)).unwrap();
    }

    /// The row that is written first when a snapshot is taken.
    fn put_unfinished(&self, name: &str, volume: &Volume, group: Option<&str>) -> Snapshot {
        let volume = self.backend().volume(&volume.id).unwrap();
        let row = snapshot::new_row("0a1b2c", &volume, name, group).unwrap();
        self.store()
            .catalog
            .write(|tx| {
                tx.put(&row)?;
                if group.is_none() { tx.claim_name(&row) } else { Ok(()) }
            })
            .unwrap();
        row
    }

    fn assert_removed(&self, row: &Snapshot) {
        let store = self.store();
        assert_eq!(store.catalog.read().unwrap().get::<Snapshot>(&row.id).unwrap(), None);
        assert!(!store.pool.snapshot_path(&row.id).exists());
        assert!(!store.pool.record_path(&row.id, row.record_generation).exists());
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for path in &self.staged {
            // A failed test may have left it frozen.
            let _ = File::open(path).and_then(|directory| sys::thaw(&directory));
        }
        if self.backend.is_none() {
            self.backend = Backend::open(self.config.clone()).ok();
        }
        if let Some(backend) = self.backend.take() {
            let attached =
                backend.store.catalog.read().and_then(|r| r.select(|_: &Attachment| true));
            for Attachment { volume_id, staging_path, published, .. } in
                attached.unwrap_or_default()
            {
                for target in published.keys() {
                    let _ = backend.unpublish(&volume_id, target);
                }
                let _ = backend.unstage(&volume_id, &staging_path);
            }
        }
        // Immutable files prevent the removal of the directory.
        let _ = Command::new("chattr").args(["-R", "-i"]).arg(&self.config.data_dir).output();
    }
}

/// A record in which the first `first` blocks are allocated.
fn write_record(path: &Path, row: &Snapshot, since: Option<&str>, first: u64, changed: &[u64]) {
    let header = Header::new(&row.id, &row.volume_id, since, row.sequence, row.capacity_bytes);
    let mut writer = RecordWriter::new(pool::new_file(path).unwrap(), &header).unwrap();
    writer.set(Bitmap::Allocated, BlockRange::new(Block(0), Block(first))).unwrap();
    for block in changed {
        let range = BlockRange::new(Block(*block), Block(block + 1));
        writer.set(Bitmap::Changed, range).unwrap();
    }
    writer.finish().unwrap();
}

fn unmount(path: &Path) -> nix::Result<()> {
    nix::mount::umount(path)
}

fn raw() -> Capability {
    Capability { access: Access::Block, mode: AccessMode::SingleNodeWriter }
}

fn mounted(fs_type: FsType) -> Capability {
    let access = Access::Mount { fs_type: Some(fs_type), flags: Vec::new(), group: None };
    Capability { access, mode: AccessMode::SingleNodeWriter }
}

/// Runs a test on a new pool of each kind that creates and removes files differently.
fn for_each_pool(run: impl Fn(&mut Pool)) {
    if !have_root() {
        return;
    }
    for kind in [PoolKind::Image, PoolKind::Copy] {
        println!("with a pool of kind {kind}");
        run(&mut Pool::new(kind));
    }
}

fn put_group(pool: &Pool, name: &str, volumes: &[Volume]) -> (Group, Vec<Snapshot>) {
    let id = super::super::ids::new_id("0a1b2c", "group", name).unwrap();
    let members: Vec<Snapshot> = volumes
        .iter()
        .enumerate()
        .map(|(number, volume)| pool.put_unfinished(&format!("{name}-{number}"), volume, Some(&id)))
        .collect();
    let group = Group {
        id,
        name: name.to_owned(),
        phase: Phase::Creating,
        snapshot_ids: members.iter().map(|row| row.id.clone()).collect(),
        volume_ids: volumes.iter().map(|volume| volume.id.clone()).collect(),
        created_at: (1, 0),
    };
    pool.store().catalog.write(|tx| tx.put(&group).and_then(|()| tx.claim_name(&group))).unwrap();
    (group, members)
}
