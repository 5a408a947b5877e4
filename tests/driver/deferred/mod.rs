//! Deferred volumes, which a container runtime mounts: the entry of the runtime, no mount on the
//! host, and snapshots, expansion, usage and restarts as for other volumes.

mod host;
mod inline;
mod refusals;
mod runtime;
mod snapshots;
mod volumes;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use csi_loopback::backend::{
    Access, AccessMode, Backend, Capability, Deferral, Error, FsType, PoolKind, Publication,
    Result, Usage, Volume, VolumeRequest,
};
use runtime::TestRuntime;
use support::container::Container;
use support::{ALL_KINDS, MIB, Pool, have_root, path};

/// Large enough for each of the filesystems.
const BYTES: u64 = 300 * MIB;

/// A pool whose backend has a runtime.
struct Rig {
    pool: Pool,
    runtime: Arc<TestRuntime>,
    attached: Vec<(String, PathBuf)>,
}

impl Rig {
    fn new(kind: PoolKind) -> Self {
        let runtime = TestRuntime::new();
        let known = Arc::clone(&runtime);
        let pool = Pool::with(kind, |config| config.runtime = Some(known));
        Self { pool, runtime, attached: Vec::new() }
    }

    fn backend(&self) -> &Backend {
        self.pool.backend()
    }

    /// Restarts the backend, with the runtime or without.
    fn restart(&mut self, with_runtime: bool) {
        let runtime = Arc::clone(&self.runtime);
        self.pool.stop();
        self.pool.configure(|config| config.runtime = with_runtime.then_some(runtime as _));
        self.pool.start();
    }

    fn staging(&self, volume: &Volume) -> PathBuf {
        self.pool.scratch().join(format!("stage-{}", volume.id))
    }

    fn target(&self, name: &str) -> PathBuf {
        self.pool.scratch().join("pods").join(name)
    }

    fn volume(&self, name: &str, fs_type: FsType) -> Volume {
        let fs_type = Some(fs_type);
        let request = VolumeRequest { required_bytes: BYTES, fs_type, ..support::request() };
        self.pool.create(name, request)
    }

    fn stage(&mut self, volume: &Volume, capability: &Capability) {
        let staging = self.staging(volume);
        self.attached.push((volume.id.clone(), staging.clone()));
        self.backend().stage(&volume.id, &staging, capability).unwrap();
    }

    fn publish(&self, volume: &Volume, target: &Path, wanted: &Publication) -> Result<()> {
        self.backend().publish(&volume.id, &self.staging(volume), target, wanted)
    }

    /// A deferred volume and its target.
    fn deferred_volume(&mut self, name: &str, fs_type: FsType) -> (Volume, PathBuf) {
        let volume = self.volume(name, fs_type);
        self.stage(&volume, &one_writer());
        let target = self.target(name);
        self.publish(&volume, &target, &deferred()).unwrap();
        (volume, target)
    }

    fn container(&self, target: &Path) -> Container {
        self.runtime.container(target)
    }

    fn unpublish_and_unstage(&self, volume: &Volume, target: &Path) {
        self.backend().unpublish(&volume.id, target).unwrap();
        self.backend().unstage(&volume.id, &self.staging(volume)).unwrap();
        assert!(!target.exists());
        assert!(support::kernel::loops_named(&volume.id).is_empty());
    }

    /// Mounts a volume on this host, like one that is not deferred.
    fn on_host<T>(&mut self, volume: &Volume, check: impl FnOnce(&Path) -> T) -> T {
        let target = self.target(&format!("host-{}", volume.id));
        self.stage(volume, &one_writer());
        self.publish(volume, &target, &on_host(one_writer())).unwrap();
        let found = check(&target);
        self.unpublish_and_unstage(volume, &target);
        found
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if !self.pool.is_open() {
            return;
        }
        self.runtime.state().unavailable = false;
        // Children first: a container that a failed test left running holds its device.
        for (id, staging) in &self.attached {
            let targets = fs::read_dir(self.pool.scratch().join("pods")).into_iter().flatten();
            for target in targets.flatten() {
                let _ = self.backend().unpublish(id, &target.path());
            }
            let _ = self.backend().unstage(id, staging);
        }
    }
}

/// The capability of a ReadWriteOncePod claim.
fn one_writer() -> Capability {
    let access = Access::Mount { fs_type: None, flags: Vec::new(), group: None };
    Capability { access, mode: AccessMode::SingleNodeSingleWriter }
}

fn deferred() -> Publication {
    Publication { capability: one_writer(), readonly: false, deferred: Some(Deferral::default()) }
}

fn on_host(capability: Capability) -> Publication {
    Publication::on_host(capability, false)
}

/// Whether this host's mount table shows the device anywhere.
fn is_mounted_on_host(device: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().any(|line| line.split(' ').any(|entry| entry == path(device)))
}

fn total(usage: &Usage) -> u64 {
    match usage {
        Usage::Block { total_bytes } | Usage::Mount { total_bytes, .. } => *total_bytes,
    }
}

#[track_caller]
fn refused<T: std::fmt::Debug>(answer: Result<T>, text: &str) {
    match answer {
        Err(Error::Precondition(message)) => assert!(message.contains(text), "{message}"),
        other => panic!("{other:?}"),
    }
}

/// Whether this process can grow a mounted filesystem of this type; prints the reason if not.
fn grows_mounted(fs_type: FsType) -> bool {
    let grows = fs_type != FsType::Ext4 || support::driver::ext4_grows_online();
    if !grows {
        // tests/driver/growth.rs covers the error in this case, and the growth at stage.
        support::report("ext4 does not grow online here: no CAP_SYS_RESOURCE");
    }
    grows
}

/// Runs a test for each filesystem, on a pool of each kind in turn.
fn for_each_filesystem(run: impl Fn(&mut Rig, FsType)) {
    if !have_root() {
        return;
    }
    for (fs_type, kind) in FsType::ALL.into_iter().zip(ALL_KINDS) {
        println!("{fs_type} on a pool of kind {kind}");
        run(&mut Rig::new(kind), fs_type);
    }
}

fn with_rig(run: impl FnOnce(&mut Rig)) {
    if have_root() {
        run(&mut Rig::new(PoolKind::Image));
    }
}
