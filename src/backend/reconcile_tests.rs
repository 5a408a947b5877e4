//! Each state that a crash can leave, forged by hand: after the next start everything is settled, a
//! check finds nothing, and the call that was cut short succeeds when it is repeated.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use super::super::catalog::Catalog;
use super::super::loop_device::Lifetime;
use super::super::model::{
    Access, AccessMode, Capability, ChainBreak, Format, FsType, Predecessor, Publication,
    VolumeRequest,
};
use super::super::pool::{PoolChoice, PoolKind};
use super::super::tracker::{Bitmap, Header, RecordWriter, Style};
use super::super::units::{Block, BlockRange};
use super::super::{Backend, Config, CreateVolume, Error, check, filesystem, sys};
use super::*;
use crate::backend::loop_device::LoopDevice;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

/// A backend that is opened and closed as often as a test wants. What is attached is let go of at
/// the end, also after a panic.
struct Pool {
    backend: Option<Backend>,
    config: Config,
    staged: Vec<PathBuf>,
    directory: TempDir,
}

impl Pool {
    fn new(kind: PoolKind) -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let config = Config {
            data_dir: directory.path().join("data"),
            pool: PoolChoice::Kind(kind),
            pool_size: Some(4 << 30),
            retention: Duration::from_secs(3600),
            overcommit: 1e6,
        };
        let backend = Some(Backend::open(config.clone()).unwrap());
        Self { backend, config, staged: Vec::new(), directory }
    }

    fn backend(&self) -> &Backend {
        self.backend.as_ref().unwrap()
    }

    fn store(&self) -> &Store {
        &self.backend().store
    }

    /// What a crash does not close, the kernel does; then the driver starts again.
    fn restart(&mut self) {
        self.backend = None;
        self.backend = Some(Backend::open(self.config.clone()).unwrap());
    }

    /// Starts again and expects nothing to be left to settle.
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
        let file = File::open(self.store().volume_path(&volume.id)).unwrap();
        LoopDevice::find(&file).unwrap().into_iter().next()
    }

    fn put<R: crate::backend::catalog::Row>(&self, row: &R) {
        self.store().catalog.write(|tx| tx.put(row)).unwrap();
    }

    /// What a cut writes first.
    fn put_cutting(&self, name: &str, volume: &Volume, group: Option<&str>) -> Snapshot {
        let volume = self.backend().volume(&volume.id).unwrap();
        let row = snapshot::new_row(&volume, name, group).unwrap();
        self.store()
            .catalog
            .write(|tx| {
                tx.put(&row)?;
                if group.is_none() { tx.name(&row) } else { Ok(()) }
            })
            .unwrap();
        row
    }

    /// What a cut has on disk at several points.
    fn put_files(&self, row: &Snapshot, progress: Progress) {
        if progress >= Progress::Data {
            let data = pool::new_file(&self.store().snapshot_path(&row.id)).unwrap();
            data.set_len(row.capacity_bytes / 2).unwrap();
            data.write_all_at(&[7; 4096], 0).unwrap();
            if progress >= Progress::Sealed {
                pool::set_immutable(&data, true).unwrap();
            }
        }
        if progress >= Progress::HalfARecord {
            let path = self.store().record_path(&row.id, row.record_generation);
            if progress == Progress::HalfARecord {
                fs::write(path, "CBT").unwrap();
            } else {
                write_record(&path, row, None, 1, &[0]);
            }
        }
    }

    fn gone(&self, row: &Snapshot) {
        let store = self.store();
        assert_eq!(store.catalog.read().unwrap().get::<Snapshot>(&row.id).unwrap(), None);
        assert!(!store.snapshot_path(&row.id).exists());
        assert!(!store.record_path(&row.id, row.record_generation).exists());
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Progress {
    Row,
    Data,
    Sealed,
    HalfARecord,
    Record,
}

const PROGRESS: [Progress; 5] =
    [Progress::Row, Progress::Data, Progress::Sealed, Progress::HalfARecord, Progress::Record];

impl Drop for Pool {
    fn drop(&mut self) {
        for path in &self.staged {
            // A test that failed may have left it frozen.
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
        // Immutable files keep the directory from going.
        let _ = Command::new("chattr").args(["-R", "-i"]).arg(&self.config.data_dir).output();
    }
}

/// A record in which the first blocks, this many, are allocated.
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

/// Runs a test on a fresh pool of the kinds that differ in how files are made and removed.
fn for_each_pool(test: &str, run: impl Fn(&mut Pool)) {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED: {test}: needs root");
        return;
    }
    for kind in [PoolKind::Image, PoolKind::Copy] {
        println!("with a pool of kind {kind}");
        run(&mut Pool::new(kind));
    }
}

#[test]
fn root_a_volume_that_was_being_created_is_undone() {
    for_each_pool("root_a_volume_that_was_being_created_is_undone", |pool| {
        let source = pool.volume("source");
        let base = pool.snapshot("base", &source);
        let sources = [
            None,
            Some(Source::Snapshot(base.id.clone())),
            Some(Source::Volume(source.id.clone())),
        ];
        for (number, source) in sources.into_iter().enumerate() {
            for with_file in [false, true] {
                let name = format!("v-{number}-{with_file}");
                let mut request = pool.request(&name);
                request.request.source.clone_from(&source);
                let made = pool.backend().create_volume(&request).unwrap();
                // Back to before its last step.
                pool.put(&Volume { phase: Phase::Creating, ..made.clone() });
                let path = pool.store().volume_path(&made.id);
                if with_file {
                    File::options().write(true).open(&path).unwrap().set_len(MIB).unwrap();
                } else {
                    pool::remove(&path).unwrap();
                }
                pool.recover();
                assert!(matches!(pool.backend().volume(&made.id), Err(Error::NotFound { .. })));
                assert!(!pool.store().volume_path(&made.id).exists());
                let again = pool.backend().create_volume(&request).unwrap();
                assert_ne!(again.id, made.id);
                assert_eq!(pool.backend().create_volume(&request).unwrap(), again);
            }
        }
        pool.recover();
    });
}

/// The same without a restart: the undoing itself had failed.
#[test]
fn root_a_call_undoes_what_an_earlier_one_left() {
    for_each_pool("root_a_call_undoes_what_an_earlier_one_left", |pool| {
        let half_made = pool.volume("v");
        pool.put(&Volume { phase: Phase::Creating, ..half_made.clone() });
        let volume = pool.volume("v");
        assert_ne!(volume.id, half_made.id);
        assert!(!pool.store().volume_path(&half_made.id).exists());
        for progress in PROGRESS {
            let row = pool.put_cutting("s", &volume, None);
            pool.put_files(&row, progress);
            let made = pool.snapshot("s", &volume);
            pool.gone(&row);
            pool.backend().delete_snapshot(&made.id).unwrap();
        }
        let (group, members) = put_group(pool, "g", std::slice::from_ref(&volume));
        members.iter().for_each(|row| pool.put_files(row, Progress::Record));
        let made = pool.backend().create_group("g", std::slice::from_ref(&volume.id)).unwrap();
        assert_ne!(made.group.id, group.id);
        members.iter().for_each(|row| pool.gone(row));
        pool.recover();
    });
}

#[test]
fn root_a_volume_that_was_being_deleted_is_deleted() {
    for_each_pool("root_a_volume_that_was_being_deleted_is_deleted", |pool| {
        for with_file in [true, false] {
            for baseline_deleted in [true, false] {
                let volume = pool.volume("v");
                pool.write(&volume, 0, 1);
                let a = pool.snapshot(&format!("a-{with_file}-{baseline_deleted}"), &volume);
                pool.write(&volume, 1, 1);
                let b = pool.snapshot(&format!("b-{with_file}-{baseline_deleted}"), &volume);
                if baseline_deleted {
                    pool.backend().delete_snapshot(&b.id).unwrap();
                    assert!(pool.store().snapshot_path(&b.id).exists(), "the hidden baseline");
                }
                // It was attached, and its device stayed.
                let backing = pool.store().open_volume(&volume).unwrap();
                drop(LoopDevice::attach(&backing, Lifetime::Explicit).unwrap());
                if !with_file {
                    LoopDevice::detach_all(&backing).unwrap();
                    pool::remove(&pool.store().volume_path(&volume.id)).unwrap();
                }
                let latest = pool.backend().volume(&volume.id).unwrap();
                pool.put(&Volume { phase: Phase::Deleting, ..latest });
                pool.recover();
                assert!(LoopDevice::find(&backing).unwrap().is_empty());
                let backend = pool.backend();
                assert!(matches!(backend.volume(&volume.id), Err(Error::NotFound { .. })));
                backend.delete_volume(&volume.id).unwrap();
                assert_eq!(backend.snapshot(&a.id).unwrap().id, a.id);
                assert_eq!(pool.store().snapshot_path(&b.id).exists(), !baseline_deleted);
                if !baseline_deleted {
                    assert_eq!(pool.delta(&a, &b), [1]);
                    backend.delete_snapshot(&b.id).unwrap();
                }
                backend.delete_snapshot(&a.id).unwrap();
                pool.gone(&a);
                pool.gone(&b);
            }
        }
    });
}

#[test]
fn root_a_snapshot_that_was_being_cut_is_undone() {
    for_each_pool("root_a_snapshot_that_was_being_cut_is_undone", |pool| {
        let volume = pool.volume("v");
        pool.write(&volume, 0, 1);
        let mut before = pool.snapshot("base", &volume);
        for (number, progress) in PROGRESS.into_iter().enumerate() {
            let block = number as u64 + 1;
            pool.write(&volume, block, 1);
            let name = format!("s{number}");
            let row = pool.put_cutting(&name, &volume, None);
            pool.put_files(&row, progress);
            pool.recover();
            pool.gone(&row);
            let made = pool.snapshot(&name, &volume);
            assert_ne!(made.id, row.id);
            assert_eq!(pool.delta(&before, &made), [block], "{progress:?}");
            before = made;
        }
    });
}

fn put_group(pool: &Pool, name: &str, volumes: &[Volume]) -> (Group, Vec<Snapshot>) {
    let id = super::super::ids::new_id("group", name).unwrap();
    let members: Vec<Snapshot> = volumes
        .iter()
        .enumerate()
        .map(|(number, volume)| pool.put_cutting(&format!("{name}-{number}"), volume, Some(&id)))
        .collect();
    let group = Group {
        id,
        name: name.to_owned(),
        phase: Phase::Creating,
        snapshot_ids: members.iter().map(|row| row.id.clone()).collect(),
        volume_ids: volumes.iter().map(|volume| volume.id.clone()).collect(),
        created_at: (1, 0),
    };
    pool.store().catalog.write(|tx| tx.put(&group).and_then(|()| tx.name(&group))).unwrap();
    (group, members)
}

#[test]
fn root_a_group_that_was_being_cut_leaves_no_member() {
    for_each_pool("root_a_group_that_was_being_cut_leaves_no_member", |pool| {
        let volumes = [pool.volume("v"), pool.volume("w")];
        let ids: Vec<String> = volumes.iter().map(|volume| volume.id.clone()).collect();
        let before = pool.snapshot("base", &volumes[1]);
        for (number, progress) in PROGRESS.into_iter().enumerate() {
            pool.write(&volumes[1], number as u64, 1);
            let (group, members) = put_group(pool, &format!("g{number}"), &volumes);
            pool.put_files(&members[0], Progress::Record);
            pool.put_files(&members[1], progress);
            pool.recover();
            members.iter().for_each(|row| pool.gone(row));
            let backend = pool.backend();
            assert!(matches!(backend.group(&group.id, &[]), Err(Error::NotFound { .. })));
            let made = backend.create_group(&group.name, &ids).unwrap();
            assert_ne!(made.group.id, group.id);
            let all: Vec<u64> = (0..=number as u64).collect();
            assert_eq!(pool.delta(&before, &made.snapshots[1]), all);
        }
    });
}

#[test]
fn root_data_that_nobody_needs_goes_and_what_is_needed_stays() {
    for_each_pool("root_data_that_nobody_needs_goes_and_what_is_needed_stays", |pool| {
        let volume = pool.volume("v");
        pool.write(&volume, 0, 1);
        let a = pool.snapshot("a", &volume);
        pool.backend().delete_snapshot(&a.id).unwrap();
        pool.write(&volume, 1, 1);
        let b = pool.snapshot("b", &volume);
        // The commit was the last thing that happened: the old baseline is still on disk.
        let left = pool.store().snapshot_path(&a.id);
        assert!(!left.exists());
        let file = pool::new_file(&left).unwrap();
        file.set_len(a.capacity_bytes).unwrap();
        pool::set_immutable(&file, true).unwrap();
        // So it is after a deletion through the API, and this one is the baseline: it stays.
        pool.backend().delete_snapshot(&b.id).unwrap();
        drop(file);
        pool.recover();
        assert!(!pool.store().snapshot_path(&a.id).exists());
        assert!(pool.store().snapshot_path(&b.id).exists());
        pool.write(&volume, 2, 1);
        let c = pool.snapshot("c", &volume);
        assert_eq!(pool.delta(&b, &c), [2]);
        assert_eq!(pool.delta(&a, &c), [1, 2]);
    });
}

#[test]
fn root_a_baseline_that_is_lost_breaks_the_chain_and_is_never_guessed() {
    for_each_pool("root_a_baseline_that_is_lost_breaks_the_chain", |pool| {
        let volume = pool.volume("v");
        let a = pool.snapshot("a", &volume);
        pool::remove(&pool.store().snapshot_path(&a.id)).unwrap();
        pool.restart();
        pool.write(&volume, 1, 1);
        let b = pool.snapshot("b", &volume);
        assert_eq!(b.predecessor, Predecessor::None(ChainBreak::BaselineLost));
        let refused = pool.backend().delta(&a.id, &b.id).unwrap_err();
        assert!(matches!(refused, Error::Precondition(_)), "{refused}");
        let c = pool.snapshot("c", &volume);
        assert!(pool.delta(&b, &c).is_empty());
    });
}

#[test]
fn root_only_the_record_of_the_right_generation_stays() {
    for_each_pool("root_only_the_record_of_the_right_generation_stays", |pool| {
        let volume = pool.volume("v");
        let snapshots = [0, 1, 2].map(|number| {
            pool.write(&volume, number, 1);
            pool.snapshot(&format!("s{number}"), &volume)
        });
        let [a, b, c] = &snapshots;
        pool.backend().delete_snapshot(&b.id).unwrap();
        // A fold of b into c had written its file and not yet committed it.
        let newer = pool.store().record_path(&c.id, 1);
        write_record(&newer, c, Some(&a.id), 3, &[1, 2]);
        pool.recover();
        assert!(!pool.store().record_path(&c.id, 1).exists());
        assert_eq!(pool.delta(a, c), [1, 2]);
        assert_eq!(pool.delta(b, c), [2]);
        // The fold was committed and the old files were not yet gone.
        write_record(&pool.store().record_path(&c.id, 1), c, Some(&a.id), 3, &[1, 2]);
        let row =
            |id: &str| pool.store().catalog.read().unwrap().get::<Snapshot>(id).unwrap().unwrap();
        let predecessor = Predecessor::Snapshot(a.id.clone());
        pool.put(&Snapshot { predecessor, record_generation: 1, ..row(&c.id) });
        pool.put(&Snapshot { phase: SnapshotPhase::Forgotten, ..row(&b.id) });
        pool.recover();
        let store = pool.store();
        assert!(store.record_path(&c.id, 1).exists() && !store.record_path(&c.id, 0).exists());
        assert!(!store.record_path(&b.id, 0).exists());
        assert_eq!(pool.delta(a, c), [1, 2]);
        let refused = pool.backend().delta(&b.id, &c.id).unwrap_err();
        assert!(matches!(refused, Error::Precondition(_)), "{refused}");
    });
}

#[test]
fn root_an_expansion_that_was_cut_short_is_finished() {
    for_each_pool("root_an_expansion_that_was_cut_short_is_finished", |pool| {
        for (name, attach, in_catalog) in
            [("a", false, false), ("b", true, false), ("c", true, true)]
        {
            let volume = pool.volume(name);
            let staged = attach.then(|| pool.stage(&volume, &raw()));
            let file = pool.store().open_volume(&volume).unwrap();
            file.set_len(8 * MIB).unwrap();
            if in_catalog {
                pool.put(&Volume { capacity_bytes: 8 * MIB, ..volume.clone() });
            }
            drop(file);
            pool.recover();
            assert_eq!(pool.backend().volume(&volume.id).unwrap().capacity_bytes, 8 * MIB);
            let again = pool.backend().expand_volume(&volume.id, 8 * MIB, 0).unwrap();
            assert_eq!(again.capacity_bytes, 8 * MIB);
            assert_eq!(pool.snapshot(name, &volume).capacity_bytes, 8 * MIB);
            if let Some(staged) = staged {
                // ControllerExpandVolume is followed by NodeExpandVolume.
                pool.backend().expand_on_node(&volume.id, &staged).unwrap();
                assert_eq!(pool.device(&volume).unwrap().size().unwrap(), 8 * MIB, "{name}");
                pool.backend().unstage(&volume.id, &staged).unwrap();
            }
        }
    });
}

#[test]
fn root_an_attachment_without_its_device_is_forgotten() {
    for_each_pool("root_an_attachment_without_its_device_is_forgotten", |pool| {
        for (name, capability) in [("raw", raw()), ("ext4", mounted(FsType::Ext4))] {
            let volume = pool.volume(name);
            let target = pool.directory.path().join(format!("target-{name}"));
            // As after a reboot, and as when the crash came before anything was attached.
            let publication = Publication { capability: capability.clone(), readonly: false };
            pool.put(&Attachment {
                volume_id: volume.id.clone(),
                staging_path: pool.directory.path().join("elsewhere"),
                capability: capability.clone(),
                published: [(target.clone(), publication)].into(),
            });
            pool.recover();
            let backend = pool.backend().clone();
            backend.unpublish(&volume.id, &target).unwrap();
            let path = pool.stage(&volume, &capability);
            assert!(pool.device(&volume).is_some());
            backend.unstage(&volume.id, &path).unwrap();
            assert!(pool.device(&volume).is_none());
            backend.delete_volume(&volume.id).unwrap();
        }
    });
}

/// A pod may go on with a volume whose file was removed under it; it is taken out of use as any other.
#[test]
fn root_an_attachment_whose_file_is_gone_is_not_forgotten() {
    for_each_pool("root_an_attachment_whose_file_is_gone_is_not_forgotten", |pool| {
        let volume = pool.volume("v");
        let staged = pool.stage(&volume, &mounted(FsType::Ext4));
        let backing = pool.store().open_volume(&volume).unwrap();
        fs::remove_file(pool.store().volume_path(&volume.id)).unwrap();
        pool.restart();
        let refused = pool.backend().delete_volume(&volume.id);
        let unstaged = pool.backend().unstage(&volume.id, &staged);
        let left = filesystem::mount_at(&staged).unwrap();
        if left.is_some() {
            unmount(&staged).unwrap();
        }
        let devices = LoopDevice::find(&backing).unwrap();
        LoopDevice::detach_all(&backing).unwrap();
        drop(backing);
        assert!(matches!(refused, Err(Error::Precondition(_))), "{refused:?}");
        assert!(unstaged.is_ok() && left.is_none(), "{unstaged:?} {left:?}");
        assert!(devices.is_empty(), "{devices:?}");
        pool.backend().delete_volume(&volume.id).unwrap();
        pool.recover();
    });
}

#[test]
fn root_staging_and_publishing_go_on_from_wherever_they_were_cut_short() {
    for_each_pool("root_staging_and_publishing_go_on", |pool| {
        for (name, capability) in [("raw", raw()), ("ext4", mounted(FsType::Ext4))] {
            let is_raw = capability == raw();
            let volume = pool.volume(name);
            let backing = pool.store().open_volume(&volume).unwrap();
            let path = pool.stage(&volume, &capability);
            let target = pool.directory.path().join(format!("target-{name}"));
            let publish = |pool: &Pool| {
                let backend = pool.backend();
                backend.publish(&volume.id, &path, &target, &capability, false).unwrap();
                assert!(filesystem::mount_at(&target).unwrap().is_some());
                assert!(backend.usage(&volume.id, &target).is_ok());
            };
            // Staged: the device was there, and not yet the mount.
            if !is_raw {
                unmount(&path).unwrap();
            }
            pool.recover();
            pool.stage(&volume, &capability);
            // Published: the row was there, and not yet the target; or it was gone again.
            publish(pool);
            for _ in 0..2 {
                unmount(&target).unwrap();
                pool.recover();
                publish(pool);
            }
            if is_raw { fs::remove_file(&target) } else { fs::remove_dir(&target) }.unwrap_err();
            unmount(&target).unwrap();
            if is_raw { fs::remove_file(&target) } else { fs::remove_dir(&target) }.unwrap();
            pool.recover();
            pool.backend().unpublish(&volume.id, &target).unwrap();
            // Unstaged: the mount was gone, and not yet the device; or that too.
            if !is_raw {
                unmount(&path).unwrap();
            }
            pool.recover();
            assert!(matches!(
                pool.backend().delete_volume(&volume.id),
                Err(Error::Precondition(_))
            ));
            pool.backend().unstage(&volume.id, &path).unwrap();
            pool.backend().unstage(&volume.id, &path).unwrap();
            assert!(LoopDevice::find(&backing).unwrap().is_empty());
            pool.stage(&volume, &capability);
            if !is_raw {
                unmount(&path).unwrap();
            }
            LoopDevice::detach_all(&backing).unwrap();
            pool.recover();
            pool.backend().unstage(&volume.id, &path).unwrap();
            pool.backend().delete_volume(&volume.id).unwrap();
        }
    });
}

#[test]
fn root_a_filesystem_that_a_cut_left_frozen_is_thawed() {
    for_each_pool("root_a_filesystem_that_a_cut_left_frozen_is_thawed", |pool| {
        let mut request = pool.request("v");
        request.request.required_bytes = 32 * MIB;
        let volume = pool.backend().create_volume(&request).unwrap();
        let staged = pool.stage(&volume, &mounted(FsType::Ext4));
        let directory = File::open(&staged).unwrap();
        let frozen = || match sys::thaw(&directory) {
            Ok(()) => true,
            Err(e) => {
                assert_eq!(e.raw_os_error(), Some(libc::EINVAL));
                false
            }
        };
        // By the cut of a snapshot, of a group, and by the clone of a volume in use.
        sys::freeze(&directory).unwrap();
        assert!(frozen(), "the test sees what it looks for");
        for what in ["snapshot", "group", "clone"] {
            match what {
                "snapshot" => drop(pool.put_cutting(what, &volume, None)),
                "group" => drop(put_group(pool, what, std::slice::from_ref(&volume))),
                _ => {
                    let mut request = pool.request(what);
                    request.request.source = Some(Source::Volume(volume.id.clone()));
                    request.request.required_bytes = 0;
                    let clone = pool.backend().create_volume(&request).unwrap();
                    pool.put(&Volume { phase: Phase::Creating, ..clone });
                }
            }
            sys::freeze(&directory).unwrap();
            pool.restart();
            assert!(!frozen(), "{what}");
            fs::write(staged.join("file"), what).unwrap();
            pool.recover();
        }
        let made = pool.snapshot("snapshot", &volume);
        assert!(pool.delta(&made, &made).is_empty());
        // What somebody else froze stays frozen.
        sys::freeze(&directory).unwrap();
        pool.restart();
        assert!(frozen());
        drop(directory);
        pool.backend().unstage(&volume.id, &staged).unwrap();
    });
}

#[test]
fn root_a_filesystem_that_was_being_made_is_made_again() {
    for_each_pool("root_a_filesystem_that_was_being_made_is_made_again", |pool| {
        let volume = pool.volume("v");
        let capability = mounted(FsType::Ext4);
        // Some of it is written, its superblock too.
        let staged = pool.stage(&volume, &capability);
        pool.backend().unstage(&volume.id, &staged).unwrap();
        let latest = pool.backend().volume(&volume.id).unwrap();
        let format = latest.format.map(|format| Format { unfinished: true, ..format });
        assert!(format.is_some());
        let file = pool.store().open_volume(&volume).unwrap();
        file.write_all_at(&[0xaa; 65536], 2 * BLOCK).unwrap();
        drop(file);
        pool.put(&Volume { format, ..latest });
        pool.recover();
        for _ in 0..2 {
            pool.stage(&volume, &capability);
            fs::write(staged.join("file"), "content").unwrap();
            let format = pool.backend().volume(&volume.id).unwrap().format.unwrap();
            assert!(!format.unfinished);
        }
        pool.restart();
        // Once it is whole it is never made again.
        pool.backend().unstage(&volume.id, &staged).unwrap();
        pool.stage(&volume, &capability);
        assert_eq!(fs::read(staged.join("file")).unwrap(), b"content");
        pool.backend().unstage(&volume.id, &staged).unwrap();
    });
}

#[test]
fn root_a_volume_whose_last_snapshot_is_gone_is_forgotten_altogether() {
    for_each_pool("root_a_volume_whose_last_snapshot_is_gone_is_forgotten", |pool| {
        let volume = pool.volume("v");
        let a = pool.snapshot("a", &volume);
        let b = pool.snapshot("b", &volume);
        pool.backend().delete_volume(&volume.id).unwrap();
        let row = |row: &Snapshot| {
            let phase = SnapshotPhase::Deleted { at: 1 };
            Snapshot { phase, has_data: false, ..row.clone() }
        };
        // Both were deleted; the files of one are gone already.
        pool.put(&row(&a));
        pool.put(&row(&b));
        pool::remove(&pool.store().snapshot_path(&a.id)).unwrap();
        pool::remove(&pool.store().record_path(&a.id, 0)).unwrap();
        pool.recover();
        pool.gone(&a);
        pool.gone(&b);
    });
}

/// One volume in trouble does not keep the driver from starting, nor the others from being served.
#[test]
fn root_what_is_damaged_does_not_stop_a_start() {
    for_each_pool("root_what_is_damaged_does_not_stop_a_start", |pool| {
        let broken = pool.volume("broken");
        let whole = pool.volume("whole");
        let a = pool.snapshot("a", &broken);
        let b = pool.snapshot("b", &whole);
        pool.put_cutting("half", &broken, None);
        pool::remove(&pool.store().snapshot_path(&a.id)).unwrap();
        fs::write(pool.store().record_path(&b.id, 0), "CBT").unwrap();
        fs::remove_file(pool.store().volume_path(&broken.id)).unwrap();
        pool.restart();
        let backend = pool.backend();
        assert!(backend.volume_condition(&broken.id).unwrap().abnormal);
        assert!(!backend.volume_condition(&whole.id).unwrap().abnormal);
        let refused = backend.stage(&broken.id, &pool.directory.path().join("s"), &raw());
        assert!(matches!(refused, Err(Error::Damaged(_))), "{refused:?}");
        assert!(matches!(backend.allocated(&b.id), Err(Error::Damaged(_))));
        pool.snapshot("c", &whole);
        backend.delete_volume(&broken.id).unwrap();
        backend.delete_snapshot(&a.id).unwrap();
        backend.delete_volume(&whole.id).unwrap();
        let report = check::check(&pool.config.data_dir).unwrap_err();
        assert!(matches!(report, Error::Precondition(_)), "{report}");
    });
}

#[test]
fn root_an_image_that_was_being_made_is_made_again() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED: root_an_image_that_was_being_made_is_made_again: needs root");
        return;
    }
    let directory = TempDir::with_prefix("csi-loopback-").unwrap();
    let data_dir = directory.path().join("data");
    fs::create_dir(&data_dir).unwrap();
    // mkfs was under way, and its device outlived the one who had attached it.
    let part = data_dir.join("pool.img.part");
    let file = pool::new_file(&part).unwrap();
    file.set_len(64 * MIB).unwrap();
    let (_, handle) = LoopDevice::attach(&file, Lifetime::Explicit).unwrap();
    handle.write_all_at(&[0xaa; 65536], 0).unwrap();
    drop(handle);
    fs::write(data_dir.join("pool.json.part"), "{").unwrap();
    let config = Config {
        data_dir: data_dir.clone(),
        pool: PoolChoice::Kind(PoolKind::Image),
        pool_size: Some(1 << 30),
        retention: Duration::from_secs(3600),
        overcommit: 1.0,
    };
    let opened = Backend::open(config.clone());
    if opened.is_err() {
        LoopDevice::detach_all(&file).unwrap();
    }
    let room = opened.unwrap().pool_room().unwrap();
    assert!(room.total > 800 * MIB, "{room:?}");
    assert!(!part.exists());
    assert_eq!(check::check(&data_dir).unwrap().findings, []);
    // The image was made and the marker not: it is not made again.
    let image = || {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(data_dir.join("pool.img")).unwrap().ino()
    };
    let made = image();
    fs::remove_file(data_dir.join("pool.json")).unwrap();
    for pool in [PoolChoice::Kind(PoolKind::Image), PoolChoice::Auto] {
        drop(Backend::open(Config { pool, ..config.clone() }).unwrap());
        assert_eq!(image(), made);
        assert_eq!(check::check(&data_dir).unwrap().findings, []);
    }
}

#[test]
fn root_a_catalog_that_was_being_made_is_made_again() {
    for_each_pool("root_a_catalog_that_was_being_made_is_made_again", |pool| {
        let path = pool.store().pool.root().join("catalog.redb");
        fs::remove_file(&path).unwrap();
        // The store had sized its file and not yet written what tells it.
        fs::write(path.with_extension("part"), vec![0; 327_680]).unwrap();
        pool.recover();
        pool.volume("v");
    });
}

#[test]
fn root_a_catalog_that_was_lost_is_not_replaced_by_an_empty_one() {
    for content in [None, Some(""), Some("text")] {
        for_each_pool("root_a_catalog_that_was_lost_is_not_replaced", |pool| {
            pool.volume("v");
            let path = pool.store().pool.root().join("catalog.redb");
            fs::remove_file(&path).unwrap();
            content.iter().for_each(|content| fs::write(&path, content).unwrap());
            pool.backend = None;
            let refused = Backend::open(pool.config.clone()).map(drop);
            assert!(refused.is_err(), "{content:?}");
            let report = check::check(&pool.config.data_dir).map(drop);
            assert!(matches!(report, Err(Error::Damaged(_))), "{content:?}: {report:?}");
        });
    }
}

/// A filesystem that is soon full.
struct Small {
    directory: TempDir,
}

impl Small {
    fn mount(kind: &str, bytes: u64) -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let small = Self { directory };
        let image = small.directory.path().join("image");
        File::create(&image).unwrap().set_len(bytes).unwrap();
        fs::create_dir(small.path()).unwrap();
        let run = |command: &mut Command| assert!(command.status().unwrap().success());
        run(Command::new(format!("mkfs.{kind}")).arg("-q").arg(&image));
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(small.path()));
        small
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("mounted")
    }

    /// Writes to `name` until there is no room for another byte.
    fn fill(&self, name: &str) {
        let file = pool::new_file(&self.path().join(name)).unwrap();
        let mut at = 0;
        for size in [1 << 20, 4096, 1] {
            let chunk = vec![1; size];
            while file.write_all_at(&chunk, at).and_then(|()| file.sync_data()).is_ok() {
                at += size as u64;
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.path()).status();
    }
}

#[test]
fn root_a_catalog_without_room_goes_on_and_lets_things_be_deleted() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED: root_a_catalog_without_room_goes_on: needs root");
        return;
    }
    for (kind, bytes) in [("ext4", 16 * MIB), ("xfs", 320 * MIB)] {
        println!("on {kind}");
        let small = Small::mount(kind, bytes);
        let path = small.path().join("catalog.redb");
        let catalog = Catalog::open(&path).unwrap();
        let row = |number: u64| Volume {
            id: format!("vol-{number:04}"),
            name: format!("volume-{number:04}-{}", "n".repeat(100)),
            capacity_bytes: number,
            phase: Phase::Ready,
            change_tracking: true,
            format: None,
            // Large, for the sake of time.
            source: Some(Source::Snapshot("s".repeat(3000))),
            request: VolumeRequest::default(),
            next_sequence: 1,
            baseline: None,
            chain_break: ChainBreak::First,
        };
        let add = |number: u64| {
            catalog.write(|tx| tx.put(&row(number)).and_then(|()| tx.name(&row(number))))
        };
        let remove = |number: u64| {
            catalog.write(|tx| {
                tx.unname(&row(number)).and_then(|()| tx.remove::<Volume>(&row(number).id))
            })
        };
        (0..20).for_each(|number| add(number).unwrap());
        small.fill("filler");
        let mut count = 20;
        let refused = loop {
            match add(count) {
                Ok(()) => count += 1,
                Err(error) => break error,
            }
            assert!(count < 2000);
        };
        println!("refused after {count}: {refused:?}");
        assert!(matches!(refused, Error::Exhausted(_)), "{refused}");
        for _ in 0..5 {
            let refused = add(count);
            assert!(matches!(refused, Err(Error::Exhausted(_))), "{refused:?}");
        }
        let rows = catalog.read().unwrap().select(|_: &Volume| true).unwrap();
        assert_eq!(rows.len() as u64, count);
        // Rows that are there can be changed, and all of them can go.
        for number in 0..count {
            catalog
                .write(|tx| tx.put(&Volume { baseline: Some("b".into()), ..row(number) }))
                .unwrap();
        }
        for number in 0..count / 2 {
            remove(number).unwrap();
        }
        fs::remove_file(small.path().join("filler")).unwrap();
        add(0).unwrap();
        drop(catalog);
        let catalog = Catalog::open(&path).unwrap();
        let rows = catalog.read().unwrap().select(|_: &Volume| true).unwrap();
        assert_eq!(rows.len() as u64, count - count / 2 + 1);
    }
}
