//! Lost writes: the kernel accepted writes of a pod and could not write them back. Such a volume
//! gets no snapshot or clone until it is unstaged and staged again.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use csi_loopback::backend::{
    Access, Capability, CreateVolume, Error, FsType, PoolKind, Snapshot, Source, Volume,
    VolumeRequest,
};
use support::delta::differing_blocks;
use support::full::*;
use support::kernel::{detach_loops_named, wait_for};
use support::*;

/// A full pool, with a volume in use that has a snapshot.
struct Full {
    pool: Pool,
    volume: Volume,
    attached: Attached,
    capability: Capability,
    base: Snapshot,
    other: Volume,
    filler: Attached,
    /// The first unwritten block of the filler.
    end: u64,
}

impl Full {
    fn new(kind: PoolKind, capability: Capability) -> Self {
        let mut pool = match kind {
            PoolKind::Copy => Pool::on_small(kind, 400 * MIB, |_| {}),
            _ => Pool::with(kind, |config| config.pool_size = Some(512 * MIB)),
        };
        let least = match capability.access {
            Access::Mount { fs_type: Some(fs_type), .. } => fs_type.min_bytes(),
            Access::Mount { .. } | Access::Block => 0,
        };
        let volume = pool.volume("v", least.max(64 * MIB));
        let other = pool.volume("other", MIB);
        let filler = pool.volume("filler", GIB);
        let attached = pool.attach_as(&volume.id, &capability);
        let kept = pattern(1, MIB as usize);
        if attached.target.is_dir() {
            fs::write(attached.target.join("kept"), &kept).unwrap();
        } else {
            write_direct(&attached.target, 0, &kept);
        }
        let base = pool.snapshot("base", &volume);
        let filler = pool.attach(&filler.id);
        let end = fill(&filler.target, 0);
        Self { pool, volume, attached, capability, base, other, filler, end }
    }

    /// Writes without fsync, as a pod may. The writeback fails, and no process gets the error.
    fn lose_a_write(&self) {
        let target = &self.attached.target;
        let data = pattern(2, (4 * MIB) as usize);
        let at = 8 * MIB;
        if target.is_dir() {
            let file = File::create(target.join("lost")).unwrap();
            file.write_all_at(&data, at).unwrap();
            assert!(write_back(&file).is_err(), "the pool has room for it");
            return;
        }
        let device = File::options().write(true).open(target).unwrap();
        device.write_all_at(&data, at).unwrap();
        // The last close writes the pages back. Another program can have the device open.
        drop(device);
        wait_for("the pool has no room for it", || {
            let mut there = vec![1; data.len()];
            File::open(target).unwrap().read_exact_at(&mut there, at).unwrap();
            there != data
        });
    }

    /// Frees space, as an administrator would.
    fn free_room(&self) {
        discard(&self.filler.target, (self.end - 10_000) * BLOCK, 10_000 * BLOCK);
    }

    fn clone_volume(&self) -> Result<Volume, Error> {
        let source = Some(Source::Volume(self.volume.id.clone()));
        let request = VolumeRequest { required_bytes: 0, source, ..request() };
        self.pool.backend().create_volume(&CreateVolume { name: "clone".to_owned(), request })
    }

    /// Checks that snapshots and clones are refused repeatedly, and that the condition has the
    /// reason.
    #[track_caller]
    fn assert_refused(&self, when: &str) {
        let backend = self.pool.backend();
        let members = [self.other.id.clone(), self.volume.id.clone()];
        for _ in 0..2 {
            refused(backend.create_snapshot("s", &self.volume.id), when);
            refused(backend.create_group("g", &members), when);
            refused(self.clone_volume(), when);
        }
        let condition = backend.volume_condition(&self.volume.id).unwrap();
        assert!(
            condition.is_abnormal() && condition.message.contains("were lost"),
            "{when}: {condition:?}"
        );
        let condition = backend.volume_condition(&self.other.id).unwrap();
        assert!(!condition.message.contains("were lost"), "{when}: {condition:?}");
        // The other volume is not affected.
        let made = backend.create_snapshot("of other", &self.other.id).unwrap();
        backend.delete_snapshot(&made.id).unwrap();
    }

    fn stage_again(&mut self) {
        let Attached { volume_id, staging, target } = &self.attached;
        let backend = self.pool.backend();
        let wanted = csi_loopback::backend::Publication::on_host(self.capability.clone(), false);
        backend.stage(volume_id, staging, &self.capability).unwrap();
        // Repeated calls of kubelet change nothing.
        backend.stage(volume_id, staging, &self.capability).unwrap();
        backend.publish(volume_id, staging, target, &wanted).unwrap();
    }

    fn unstage(&self) {
        let Attached { volume_id, staging, target } = &self.attached;
        self.pool.backend().unpublish(volume_id, target).unwrap();
        self.pool.backend().unstage(volume_id, staging).unwrap();
    }

    /// Everything works again, and the next delta has every different block.
    fn assert_whole(mut self) {
        let condition = self.pool.backend().volume_condition(&self.volume.id).unwrap();
        assert!(!condition.message.contains("were lost"), "{condition:?}");
        let made = self.pool.snapshot("s", &self.volume);
        let delta = blocks(self.pool.backend().delta(&self.base.id, &made.id).unwrap());
        let before = self.pool.read_snapshot(&self.base);
        let after = self.pool.read_snapshot(&made);
        for block in differing_blocks(&before, &after) {
            assert!(delta.contains(&block), "block {block} is missing");
        }
        let clone = self.clone_volume().unwrap();
        self.pool.backend().delete_volume(&clone.id).unwrap();
        if self.attached.target.is_dir() {
            let kept = fs::read(self.attached.target.join("kept")).unwrap();
            assert!(kept == pattern(1, MIB as usize));
        }
    }
}

/// Writes back the pages of a file. The error is reported for this file only, not for the
/// filesystem.
fn write_back(file: &File) -> std::io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: the call takes integers.
    match unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, flags) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Error>, when: &str) {
    match result {
        Err(Error::Precondition(message)) => {
            let says = ["were lost", "unstaged and staged again", "restore it from a snapshot"];
            assert!(says.iter().all(|words| message.contains(words)), "{when}: {message}");
        }
        other => panic!("{when}: {other:?}"),
    }
}

#[test]
fn a_mounted_volume_with_lost_writes_gets_no_snapshot() {
    if !have_root() {
        return;
    }
    let cases = FsType::ALL.map(|fs_type| (PoolKind::Image, fs_type));
    for (kind, fs_type) in cases.into_iter().chain([(PoolKind::Copy, FsType::Ext4)]) {
        println!("with {fs_type} on a pool of kind {kind}");
        let mut full = Full::new(kind, mounted(fs_type));
        full.lose_a_write();
        full.free_room();
        full.assert_refused("at first");
        full.pool.restart();
        full.assert_refused("after a restart");
        full.stage_again();
        full.assert_refused("staged twice");
        full.unstage();
        full.assert_refused("unstaged");
        full.pool.restart();
        full.stage_again();
        full.assert_whole();
    }
}

#[test]
fn a_raw_volume_with_lost_writes_gets_no_snapshot() {
    if !have_root() {
        return;
    }
    let mut full = Full::new(PoolKind::Image, raw());
    full.lose_a_write();
    full.free_room();
    full.assert_refused("at first");
    // As after a reboot: the device does not exist, and the volume was not unstaged.
    full.pool.stop();
    run("umount", &[path(&full.attached.target)]);
    detach_loops_named(&full.volume.id);
    full.pool.start();
    full.assert_refused("after a reboot");
    full.stage_again();
    full.assert_whole();
}

/// An unmount reports no errors, so unstage syncs first. A full pool records them.
#[test]
fn an_unstage_records_lost_writes() {
    if !have_root() {
        return;
    }
    for capability in [mounted(FsType::Ext4), raw()] {
        let mut full = Full::new(PoolKind::Image, capability);
        full.lose_a_write();
        full.unstage();
        full.free_room();
        full.assert_refused("unstaged");
        full.pool.restart();
        full.assert_refused("after a restart");
        full.stage_again();
        full.assert_whole();
    }
}
