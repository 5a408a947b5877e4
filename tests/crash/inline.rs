//! Scenarios of inline volumes: publish and unpublish, also after a reboot, and a start that finds
//! volumes of vanished pods.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use csi::volume_capability::access_mode::Mode;
use csi_loopback::proto::csi::v1 as csi;
use tonic::Status;

use crate::harness::{Attached, Scenario, Scene};
use support::driver::*;
use support::inline::{PodVolume, is_mounted};
use support::{path, run};

/// The calls, by initial state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// Publish of a new volume with this filesystem.
    Publish(&'static str),
    /// Publish of a new volume, read-only.
    ReadOnly,
    /// Publish of a new volume to a group.
    ToGroup,
    /// Publish of an existing volume.
    Repeat,
    /// Publish of an existing volume after a reboot.
    RepeatAfterReboot,
    Unpublish,
    UnpublishAfterReboot,
    /// A start of the driver that finds a volume whose pod and directory no longer exist.
    Leftovers,
}

pub struct OnPod {
    call: Call,
    round: usize,
    volume: Option<PodVolume>,
}

/// Identifies a volume before and after the call.
const WORDS: &str = "what the pod has written";

impl OnPod {
    pub fn new(call: Call) -> Self {
        Self { call, round: 0, volume: None }
    }

    fn volume(&self) -> &PodVolume {
        self.volume.as_ref().unwrap()
    }

    fn group(&self) -> u32 {
        30_000 + self.round as u32
    }

    fn publishing(&self) -> csi::NodePublishVolumeRequest {
        let volume = self.volume();
        let of = |size, capability| csi::NodePublishVolumeRequest {
            volume_capability: Some(capability),
            ..volume.publishing(&[("size", size)])
        };
        match self.call {
            Call::Publish("xfs") => of("300Mi", mounted("xfs")),
            Call::Publish("btrfs") => of("128Mi", mounted("btrfs")),
            Call::ReadOnly => of("16Mi", with_flags("", Mode::SingleNodeMultiWriter, &["ro"])),
            Call::ToGroup => of("16Mi", in_group(&self.group().to_string())),
            _ => of("16Mi", mounted("")),
        }
    }

    fn unpublishing(&self) -> csi::NodeUnpublishVolumeRequest {
        unpublishing(&self.volume().handle, path(&self.volume().target))
    }

    /// The devices of the volume, by the unique names of their backing files.
    fn devices(&self) -> Vec<String> {
        let begins = format!("inline-{}-", self.volume().handle);
        backing_names().into_iter().filter(|name| name.starts_with(&begins)).collect()
    }

    /// Removes mounts and devices of the volume, as a reboot does.
    fn reboot(&self) {
        let target = path(&self.volume().target);
        while is_mounted(&self.volume().target) {
            run("umount", &[target]);
        }
        self.devices().iter().for_each(|name| detach_loops_named(name));
    }

    fn release(&self, on: &Scene) {
        if self.volume.is_some() {
            on.driver.ok(self.unpublishing());
        }
    }
}

impl Scenario for OnPod {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        self.round = round;
        let keeps = matches!(self.call, Call::Repeat);
        if self.volume.is_none() || !keeps {
            self.release(on);
            let handle = on.name("inline", round);
            let pod = on.driver.scratch().join("pods").join(&handle);
            // Another pod, so that the directory of pods is not empty.
            fs::create_dir_all(pod.with_file_name("other")).unwrap();
            let target = pod.join("volumes/kubernetes.io~csi/v/mount");
            self.volume = Some(PodVolume { handle, target });
        }
        match self.call {
            Call::Publish(_) | Call::ToGroup | Call::ReadOnly => {}
            Call::Repeat
            | Call::RepeatAfterReboot
            | Call::Unpublish
            | Call::UnpublishAfterReboot
            | Call::Leftovers => {
                on.driver.ok(self.publishing());
                fs::write(self.volume().file("file"), WORDS).unwrap();
            }
        }
        if matches!(self.call, Call::RepeatAfterReboot | Call::UnpublishAfterReboot) {
            self.reboot();
        }
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        match self.call {
            Call::Unpublish | Call::UnpublishAfterReboot => {
                on.driver.call(self.unpublishing()).map(drop)
            }
            Call::Leftovers => {
                let pod = on.driver.scratch().join("pods").join(&self.volume().handle);
                on.restart(|| {
                    if is_mounted(&self.volume().target) {
                        run("umount", &[path(&self.volume().target)]);
                    }
                    let _ = fs::remove_dir_all(pod);
                })
            }
            _ => on.driver.call(self.publishing()).map(drop),
        }
    }

    fn check(&mut self, _on: &Scene) {
        let volume = self.volume();
        let found = || fs::read_to_string(volume.file("file")).unwrap();
        match self.call {
            Call::Unpublish | Call::UnpublishAfterReboot => assert!(!volume.target.exists()),
            // A later collection removes a device that is busy during the start.
            Call::Leftovers => {
                wait_for("the inline volume is removed", || !volume.target.exists());
            }
            Call::Repeat | Call::RepeatAfterReboot => assert_eq!(found(), WORDS),
            Call::ReadOnly => {
                assert!(fs::write(volume.file("new"), "x").is_err());
                assert_eq!(fs::read_dir(&volume.target).unwrap().count(), 0, "it begins empty");
            }
            Call::Publish(_) | Call::ToGroup => {
                assert_eq!(fs::read_dir(&volume.target).unwrap().count(), 0, "it begins empty");
                fs::write(volume.file("new"), "x").unwrap();
                let root = fs::metadata(&volume.target).unwrap();
                assert_eq!(root.mode() & 0o777, 0o777);
                if self.call == Call::ToGroup {
                    let of = |of: fs::Metadata| (of.gid(), of.mode() & 0o2000);
                    assert_eq!(of(root), (self.group(), 0o2000));
                    assert_eq!(fs::metadata(volume.file("new")).unwrap().gid(), self.group());
                }
                fs::remove_file(volume.file("new")).unwrap();
            }
        }
    }

    fn begins_after(&self) -> Option<&'static str> {
        // Earlier points are the same in every start.
        (self.call == Call::Leftovers).then_some("pool.directory_made")
    }

    fn in_use(&self, _on: &Scene) -> Vec<PathBuf> {
        match self.call {
            Call::Repeat => vec![self.volume().target.clone()],
            _ => Vec::new(),
        }
    }

    fn attached(&self, _on: &Scene) -> Attached {
        match self.call {
            Call::Unpublish | Call::UnpublishAfterReboot | Call::Leftovers => Attached::default(),
            _ => {
                let devices = self.devices();
                assert_eq!(devices.len(), 1, "one device: {devices:?}");
                let mounts = [self.volume().target.clone()].into();
                Attached { devices: devices.into_iter().collect(), mounts }
            }
        }
    }

    fn finish(&mut self, on: &Scene) {
        self.release(on);
    }
}
