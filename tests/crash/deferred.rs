//! Scenarios of a driver with deferred mounts enabled and the real crust_ops: deferred volumes, and
//! volumes that this host mounts at their targets.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use csi_loopback::crust::{Directory, Target};
use csi_loopback::proto::csi::v1 as csi;
use nix::sys::statvfs::statvfs;
use tonic::Status;

use crate::harness::{Attached, Scenario, Scene};
use support::container::{Container, INSIDE};
use support::driver::*;
use support::inline::{PodVolume, context};
use support::{MIB, path, run};

/// SCENE is the directory of the scene.
pub const FLAGS: [&str; 3] = ["--enable-defer-fs-ops", "--crust-endpoint", "SCENE/crust.sock"];

const BYTES: u64 = 300 * MIB;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// Publish of a deferred volume.
    Publish,
    /// Unpublish of a deferred volume, with directories below its target.
    Unpublish,
    /// A snapshot while a container writes to the volume.
    Snapshot,
    /// NodeExpandVolume of a volume that a container has mounted.
    Expand,
    /// Stage of a volume that is larger than its filesystem, which grows before it is mounted.
    StageLarger,
    /// Publish on this host, which first changes the group of the files.
    PublishOnHost,
    PublishInline,
    UnpublishInline,
    /// A start of the driver after the pod of an inline volume vanished.
    Leftovers,
    /// A start of the driver after the device of a deferred volume was detached.
    Reboot,
}

pub struct Deferred {
    call: Call,
    crust_ops: Option<CrustOps>,
    container: Option<Container>,
    /// Unstage of a volume.
    id: String,
    inline: Option<PodVolume>,
    snapshot: Option<String>,
    snapshots: Vec<String>,
    round: usize,
}

/// Ended when the value is dropped.
struct CrustOps {
    child: Child,
    directory: PathBuf,
}

impl CrustOps {
    fn start(on: &Scene) -> Self {
        let (socket, directory) = (on.place().join("crust.sock"), on.place().join("crust"));
        let child = Command::new(binary())
            .args(["--mode", "runtime-ops", "--endpoint", path(&socket)])
            .args(["--crust-dir", path(&directory)])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_for("crust_ops serves", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
        Self { child, directory }
    }

    fn is_handed_over(&self, target: &Path) -> bool {
        let entry = Directory::new(&self.directory).entry(&Target::new("target", target).unwrap());
        entry.mount_info().unwrap().is_some()
    }

    /// Claims a volume for a container, whose program grows the filesystem.
    fn claim(&self, target: &Path, container: &Container) {
        let program = self.directory.with_file_name("runtime");
        let script = format!(
            "#!/bin/sh\nset -e\nnsenter -m -t {} xfs_growfs -d {INSIDE} >&2\necho '{{\"capacity_bytes\":1}}'\n",
            container.pid()
        );
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let entry = Directory::new(&self.directory).entry(&Target::new("target", target).unwrap());
        entry.write_runtime_cli(&program).unwrap();
    }
}

impl Drop for CrustOps {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The access mode of a ReadWriteOncePod claim.
fn one_writer() -> csi::VolumeCapability {
    of_one_writer(mounted("xfs"))
}

fn of_one_writer(capability: csi::VolumeCapability) -> csi::VolumeCapability {
    let mode = csi::volume_capability::access_mode::Mode::SingleNodeSingleWriter;
    let access_mode = Some(csi::volume_capability::AccessMode { mode: mode.into() });
    csi::VolumeCapability { access_mode, ..capability }
}

impl Deferred {
    pub fn new(call: Call) -> Self {
        Self {
            call,
            crust_ops: None,
            container: None,
            id: String::new(),
            inline: None,
            snapshot: None,
            snapshots: Vec::new(),
            round: 0,
        }
    }

    fn crust_ops(&self) -> &CrustOps {
        self.crust_ops.as_ref().unwrap()
    }

    fn group(&self) -> u32 {
        30_000 + self.round as u32
    }

    fn wanted(&self) -> csi::VolumeCapability {
        match self.call {
            Call::PublishOnHost => of_one_writer(in_group(&self.group().to_string())),
            _ => one_writer(),
        }
    }

    fn target(&self, on: &Scene) -> PathBuf {
        match &self.inline {
            Some(volume) => volume.target.clone(),
            None => on.driver.target(&self.id),
        }
    }

    fn publishing(&self, on: &Scene) -> csi::NodePublishVolumeRequest {
        if let Some(volume) = &self.inline {
            let attributes = [("size", "300Mi")];
            return csi::NodePublishVolumeRequest {
                volume_context: context(&attributes),
                volume_capability: Some(mounted("xfs")),
                defer_fs_ops: true,
                ..volume.publishing(&attributes)
            };
        }
        let request = on.driver.publishing(&self.id, &self.target(on), &self.wanted());
        csi::NodePublishVolumeRequest { defer_fs_ops: self.call != Call::PublishOnHost, ..request }
    }

    fn unpublishing(&self, on: &Scene) -> csi::NodeUnpublishVolumeRequest {
        let id = self.inline.as_ref().map_or(&self.id, |volume| &volume.handle);
        unpublishing(id, path(&self.target(on)))
    }

    fn larger(&mut self, on: &Scene) -> String {
        let snapshot = self.snapshot.get_or_insert_with(|| {
            let small = on.driver.volume(&on.name("small", 0), BYTES, one_writer());
            on.driver.stage(&small, &one_writer());
            on.driver.unstage(&small);
            on.driver.snapshot(&on.name("snapshot", 0), &small)
        });
        let request = csi::CreateVolumeRequest {
            volume_content_source: Some(Source::Snapshot(snapshot).into()),
            ..create(&on.name("v", self.round), 2 * BYTES, one_writer())
        };
        on.driver.ok(request).volume.unwrap().volume_id
    }

    fn new_pod(&mut self, on: &Scene) {
        let handle = on.name("inline", self.round);
        let pod = on.driver.scratch().join("pods").join(&handle);
        // Another pod, so that the directory of pods is not empty.
        fs::create_dir_all(pod.with_file_name("other")).unwrap();
        let target = pod.join("volumes/kubernetes.io~csi/v/mount");
        self.inline = Some(PodVolume { handle, target });
    }

    fn release(&mut self, on: &Scene) {
        self.container = None;
        if self.inline.is_some() {
            on.driver.ok(self.unpublishing(on));
        } else if !self.id.is_empty() {
            on.driver.take_down(&self.id);
            on.driver.ok(delete_volume(&self.id));
        }
    }

    fn snapshot_name(&self, on: &Scene) -> String {
        on.name("taken", self.round)
    }

    /// A container that has claimed and mounted the volume.
    fn run_container(&mut self, on: &Scene) {
        let device = loops_named(&self.id).remove(0);
        let container = Container::start(device.as_ref(), "xfs", &["nouuid".to_owned()]);
        self.crust_ops().claim(&self.target(on), &container);
        self.container = Some(container);
    }

    fn inside(&self, name: &str) -> PathBuf {
        self.container.as_ref().unwrap().file(name)
    }
}

impl Scenario for Deferred {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        self.round = round;
        if self.crust_ops.is_none() {
            self.crust_ops = Some(CrustOps::start(on));
        }
        let reuses = matches!(self.call, Call::Snapshot | Call::Expand);
        let is_new = round == 1 || !reuses;
        if is_new {
            self.release(on);
        }
        match self.call {
            Call::PublishInline | Call::UnpublishInline | Call::Leftovers => self.new_pod(on),
            Call::StageLarger => self.id = self.larger(on),
            _ if is_new => {
                self.id = on.driver.volume(&on.name("v", round), BYTES, self.wanted());
                on.driver.stage(&self.id, &self.wanted());
            }
            _ => {}
        }
        match self.call {
            Call::Publish | Call::StageLarger | Call::PublishOnHost | Call::PublishInline => {}
            Call::Unpublish | Call::UnpublishInline | Call::Leftovers | Call::Reboot => {
                on.driver.ok(self.publishing(on));
                if self.call == Call::Unpublish {
                    // As an earlier version left it, which mounted no guard.
                    run("umount", &[path(&self.target(on))]);
                }
                fs::create_dir_all(self.target(on).join("sub/path")).unwrap();
            }
            Call::Snapshot | Call::Expand => {
                if is_new {
                    on.driver.ok(self.publishing(on));
                    self.run_container(on);
                }
                if self.call == Call::Expand {
                    on.driver.ok(expand(&self.id, BYTES + round as u64 * 16 * MIB));
                } else {
                    fs::write(self.inside(&format!("round-{round}")), "x").unwrap();
                }
            }
        }
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        match self.call {
            Call::Publish | Call::PublishOnHost | Call::PublishInline => {
                on.driver.call(self.publishing(on)).map(drop)
            }
            Call::Unpublish | Call::UnpublishInline => {
                on.driver.call(self.unpublishing(on)).map(drop)
            }
            Call::StageLarger => {
                on.driver.call(on.driver.staging_of(&self.id, &one_writer())).map(drop)
            }
            Call::Expand => {
                let target = self.target(on);
                on.driver.call(expand_on_node(&self.id, &target)).map(drop)
            }
            Call::Snapshot => {
                let answer = on.driver.call(create_snapshot(&self.snapshot_name(on), &self.id))?;
                let id = answer.snapshot.unwrap().snapshot_id;
                if !self.snapshots.contains(&id) {
                    self.snapshots.push(id);
                }
                Ok(())
            }
            Call::Reboot => on.restart(|| detach_loops_named(&self.id)),
            Call::Leftovers => {
                let pod = on.driver.scratch().join("pods").join(on.name("inline", self.round));
                let target = self.target(on);
                on.restart(|| {
                    // The guard, if the call had mounted it.
                    let _ = Command::new("umount").arg(target).output();
                    let _ = fs::remove_dir_all(pod);
                })
            }
        }
    }

    fn check(&mut self, on: &Scene) {
        let target = self.target(on);
        let size = |at: &Path| {
            let usage = statvfs(at).unwrap();
            usage.blocks() as u64 * usage.fragment_size() as u64
        };
        match self.call {
            Call::Publish | Call::PublishInline => {
                assert!(self.crust_ops().is_handed_over(&target) && target.is_dir());
            }
            Call::Unpublish | Call::UnpublishInline => {
                assert!(!self.crust_ops().is_handed_over(&target) && !target.exists());
            }
            // A later collection removes a device that is busy during the start.
            Call::Leftovers => wait_for("the inline volume is removed", || {
                !self.crust_ops().is_handed_over(&target) && !target.exists()
            }),
            Call::Reboot => assert!(!self.crust_ops().is_handed_over(&target)),
            Call::StageLarger => {
                on.driver.ok(on.driver.publishing(&self.id, &target, &one_writer()));
                assert!(size(&target) > BYTES * 3 / 2, "{}", size(&target));
                on.driver.unpublish(&self.id, &target);
            }
            Call::PublishOnHost => {
                assert_eq!(fs::metadata(&target).unwrap().gid(), self.group());
                fs::write(target.join("file"), "x").unwrap();
            }
            Call::Expand => {
                let least = BYTES - 100 * MIB + (self.round as u64 - 1) * 16 * MIB;
                assert!(size(&self.inside("")) > least, "{} of {least}", size(&self.inside("")));
            }
            Call::Snapshot => {
                let mut distinct = self.snapshots.clone();
                distinct.dedup();
                assert_eq!(distinct.len(), self.round, "one for each round");
            }
        }
        if let Call::PublishInline = self.call {
            // As kubelet does for the pod.
            let id = self.device_name();
            let device = loops_named(&id).remove(0);
            let container = Container::start(device.as_ref(), "xfs", &["nouuid".to_owned()]);
            let root = fs::metadata(container.file("")).unwrap();
            assert_eq!(root.mode() & 0o777, 0o777);
        }
    }

    fn begins_after(&self) -> Option<&'static str> {
        // Earlier points are the same in every start.
        matches!(self.call, Call::Leftovers | Call::Reboot).then_some("pool.directory_made")
    }

    fn in_use(&self, _on: &Scene) -> Vec<PathBuf> {
        self.container.iter().map(|container| container.file("")).collect()
    }

    fn attached(&self, on: &Scene) -> Attached {
        let none = Attached::default();
        match self.call {
            Call::UnpublishInline | Call::Leftovers | Call::Reboot => none,
            // The guard is a mount, too.
            Call::PublishInline => {
                Attached { devices: [self.device_name()].into(), mounts: [self.target(on)].into() }
            }
            Call::Publish | Call::PublishOnHost | Call::Expand | Call::Snapshot => {
                let mut all = none.staged(on, &self.id, false);
                all.mounts.insert(self.target(on));
                all
            }
            _ => none.staged(on, &self.id, false),
        }
    }

    fn finish(&mut self, on: &Scene) {
        for id in self.snapshots.drain(..) {
            on.driver.ok(delete_snapshot(&id));
        }
        self.release(on);
        let left = fs::read_dir(&self.crust_ops().directory).unwrap();
        let left: Vec<PathBuf> = left
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.file_name().is_some_and(|name| name.len() == 64))
            .collect();
        assert!(left.is_empty(), "remaining: {left:?}");
    }
}

impl Deferred {
    /// The name of the backing file of the inline volume, which identifies its device.
    fn device_name(&self) -> String {
        let part = format!("-{}-", self.inline.as_ref().unwrap().handle);
        backing_names().into_iter().find(|name| name.contains(&part)).unwrap()
    }
}
