//! Scenarios of volumes in use on the node: stage, publish, expand, unpublish, unstage, and a start
//! after a reboot.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use csi_loopback::proto::csi::v1 as csi;
use nix::sys::statvfs::statvfs;
use tonic::Status;

use crate::harness::{Attached, Scenario, Scene};
use support::driver::*;
use support::{MIB, path, run};

/// The calls of the Node service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// Stage of a new volume, which creates its filesystem.
    StageNew,
    /// Stage of a volume made from a snapshot and larger than that: its filesystem grows.
    StageLarger(&'static str),
    /// Stage of an ext4 in which the kernel has found errors.
    StageDamaged,
    StageRaw,
    /// Stage of a device with the autoclear flag that is still in use.
    StageBusy,
    /// Publish with a group, which owns all files.
    PublishToGroup,
    PublishReadOnly,
    PublishRawReadOnly,
    Unpublish,
    UnpublishRawReadOnly,
    Unstage,
    /// Unstage of a raw volume whose device was made read-only.
    UnstageReadOnly,
    /// NodeExpandVolume of a mounted xfs.
    Expand,
    /// A start of the driver after a reboot: nothing is attached.
    Reboot,
}

pub struct OnNode {
    call: Call,
    id: String,
    round: usize,
    snapshot: Option<String>,
    user: Option<File>,
    blocks_before: u64,
}

impl OnNode {
    pub fn new(call: Call) -> Self {
        Self { call, id: String::new(), round: 0, snapshot: None, user: None, blocks_before: 0 }
    }

    fn wanted(&self) -> csi::VolumeCapability {
        use Call::*;
        match self.call {
            StageRaw | StageBusy | PublishRawReadOnly | UnpublishRawReadOnly | UnstageReadOnly
            | Reboot => block(),
            PublishToGroup => in_group(&self.group().to_string()),
            Expand => mounted("xfs"),
            StageLarger(fs_type) => mounted(fs_type),
            StageNew | StageDamaged | PublishReadOnly | Unpublish | Unstage => mounted(""),
        }
    }

    fn is_mounted(&self) -> bool {
        !matches!(self.wanted().access_type, Some(csi::volume_capability::AccessType::Block(_)))
    }

    /// A new group for the files.
    fn group(&self) -> u32 {
        20_000 + self.round as u32
    }

    fn target(&self, on: &Scene) -> PathBuf {
        on.driver.target(&self.id)
    }

    fn publishing(&self, on: &Scene) -> csi::NodePublishVolumeRequest {
        let readonly = matches!(
            self.call,
            Call::PublishReadOnly | Call::PublishRawReadOnly | Call::UnpublishRawReadOnly
        );
        let request = on.driver.publishing(&self.id, &self.target(on), &self.wanted());
        csi::NodePublishVolumeRequest { readonly, ..request }
    }

    /// A new volume for this round.
    fn new_volume(&mut self, on: &Scene) {
        self.release(on);
        let name = on.name("v", self.round);
        let bytes = match self.call {
            Call::Expand | Call::StageLarger("xfs" | "btrfs") => 300 * MIB,
            _ => 16 * MIB,
        };
        let Call::StageLarger(fs_type) = self.call else {
            self.id = on.driver.volume(&name, bytes, self.wanted());
            return;
        };
        let snapshot = self.snapshot.get_or_insert_with(|| {
            let small = on.driver.volume(&on.name("small", 0), bytes, mounted(fs_type));
            let staging = on.driver.stage(&small, &mounted(fs_type));
            fs::write(staging.join("before"), "x").unwrap();
            on.driver.unstage(&small);
            on.driver.snapshot(&on.name("snapshot", 0), &small)
        });
        // resize2fs grows an ext4 to 1 GiB first.
        let larger = if fs_type == "ext4" { 2048 * MIB } else { 2 * bytes };
        let request = csi::CreateVolumeRequest {
            volume_content_source: Some(Source::Snapshot(snapshot).into()),
            ..create(&name, larger, mounted(fs_type))
        };
        self.id = on.driver.ok(request).volume.unwrap().volume_id;
    }

    fn release(&mut self, on: &Scene) {
        self.user = None;
        if !self.id.is_empty() {
            on.driver.take_down(&self.id);
            on.driver.ok(delete_volume(&self.id));
        }
    }

    fn bytes(&self, on: &Scene) -> u64 {
        let stat = statvfs(&on.driver.staging(&self.id)).unwrap();
        stat.blocks() as u64 * stat.fragment_size()
    }

    fn blocks(&self, on: &Scene) -> u64 {
        statvfs(&on.driver.staging(&self.id)).unwrap().blocks() as u64
    }

    fn is_read_only(&self, device: &std::path::Path) -> bool {
        let output = Command::new("blockdev").args(["--getro", path(device)]).output().unwrap();
        output.stdout.starts_with(b"1")
    }

    fn device(&self) -> String {
        loops_named(&self.id).remove(0)
    }

    /// A file with which the kernel describes the ext4 on the device.
    fn ext4(&self, file: &str) -> PathBuf {
        PathBuf::from(self.device().replace("/dev", "/sys/fs/ext4")).join(file)
    }
}

impl Scenario for OnNode {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        use Call::*;
        self.round = round;
        let reuses = matches!(
            self.call,
            PublishToGroup | PublishReadOnly | PublishRawReadOnly | Unpublish | Expand
        );
        if self.id.is_empty() || !reuses {
            self.new_volume(on);
        }
        match self.call {
            StageNew | StageLarger(_) | StageRaw => {}
            StageDamaged => {
                let staging = on.driver.stage(&self.id, &self.wanted());
                fs::write(staging.join("before"), "x").unwrap();
                fs::write(self.ext4("trigger_fs_error"), "of the test").unwrap();
                on.driver.unstage(&self.id);
            }
            StageBusy => {
                on.driver.stage(&self.id, &block());
                let device = self.device();
                self.user = Some(File::open(&device).unwrap());
                run("losetup", &["-d", &device]);
            }
            PublishToGroup | PublishReadOnly | PublishRawReadOnly => {
                let staging = on.driver.stage(&self.id, &self.wanted());
                on.driver.unpublish(&self.id, &self.target(on));
                if self.call == PublishToGroup {
                    fs::create_dir_all(staging.join("directory")).unwrap();
                    fs::write(staging.join("directory/file"), "x").unwrap();
                }
            }
            Unpublish | UnpublishRawReadOnly => {
                on.driver.stage(&self.id, &self.wanted());
                on.driver.ok(self.publishing(on));
            }
            Unstage => drop(on.driver.stage(&self.id, &self.wanted())),
            UnstageReadOnly => {
                on.driver.stage(&self.id, &self.wanted());
                run("blockdev", &["--setro", &self.device()]);
            }
            Expand => {
                on.driver.stage(&self.id, &self.wanted());
                self.blocks_before = self.blocks(on);
                let bytes = 300 * MIB + round as u64 * 16 * MIB;
                on.driver.ok(expand(&self.id, bytes));
            }
            Reboot => drop(on.driver.publish(&self.id, &block())),
        }
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        use Call::*;
        let (staging, target) = (on.driver.staging(&self.id), self.target(on));
        match self.call {
            StageNew | StageLarger(_) | StageDamaged | StageRaw | StageBusy => {
                on.driver.call(on.driver.staging_of(&self.id, &self.wanted())).map(drop)
            }
            PublishToGroup | PublishReadOnly | PublishRawReadOnly => {
                on.driver.call(self.publishing(on)).map(drop)
            }
            Unpublish | UnpublishRawReadOnly => {
                on.driver.call(unpublishing(&self.id, path(&target))).map(drop)
            }
            Unstage | UnstageReadOnly => {
                on.driver.call(unstaging(&self.id, path(&staging))).map(drop)
            }
            Expand => on.driver.call(expand_on_node(&self.id, &staging)).map(drop),
            Reboot => on.restart(|| {
                while !mounts_at(&target).is_empty() {
                    run("umount", &[path(&target)]);
                }
                detach_loops_named(&self.id);
            }),
        }
    }

    fn check(&mut self, on: &Scene) {
        use Call::*;
        let (staging, target) = (on.driver.staging(&self.id), self.target(on));
        match self.call {
            StageNew => {
                fs::write(staging.join("file"), "x").unwrap();
                assert!(self.bytes(on) > 8 * MIB);
            }
            StageLarger(fs_type) => {
                fs::write(staging.join("file"), "x").unwrap();
                assert_eq!(fs::read(staging.join("before")).unwrap(), b"x");
                let least = if fs_type == "ext4" { 1500 * MIB } else { 500 * MIB };
                let condition = on.driver.ok(stats(&self.id, path(&staging))).volume_condition;
                if condition.unwrap().abnormal {
                    // A failed growth is no error of the call. The next stage repeats it.
                    on.driver.unstage(&self.id);
                    on.driver.stage(&self.id, &self.wanted());
                }
                assert!(self.bytes(on) > least, "{}", self.bytes(on));
            }
            StageDamaged => {
                assert_eq!(fs::read(staging.join("before")).unwrap(), b"x");
                assert_eq!(fs::read_to_string(self.ext4("errors_count")).unwrap(), "0\n");
            }
            StageRaw => assert!(!self.is_read_only(self.device().as_ref())),
            // Its user ends, and the device remains.
            StageBusy => self.user = None,
            PublishToGroup => {
                for name in ["", "directory", "directory/file"] {
                    let found = fs::metadata(target.join(name)).unwrap();
                    assert_eq!(found.gid(), self.group(), "{name:?}");
                    assert_eq!(found.mode() & 0o060, 0o060, "{name:?}");
                }
            }
            PublishReadOnly => {
                assert!(mounts_at(&target)[0].has("ro"));
                assert!(fs::write(target.join("file"), "x").is_err());
                fs::write(staging.join("file"), "x").unwrap();
            }
            PublishRawReadOnly => assert!(self.is_read_only(&target)),
            Unpublish | UnpublishRawReadOnly => {
                assert!(!target.exists());
                assert!(!self.is_read_only(self.device().as_ref()));
            }
            Unstage | UnstageReadOnly => assert!(loops_named(&self.id).is_empty()),
            Expand => assert!(self.blocks(on) > self.blocks_before),
            Reboot => {
                on.driver.publish(&self.id, &block());
                on.driver.take_down(&self.id);
            }
        }
    }

    fn begins_after(&self) -> Option<&'static str> {
        // Earlier points are the same in every start.
        (self.call == Call::Reboot).then_some("pool.directory_made")
    }

    fn attached(&self, on: &Scene) -> Attached {
        use Call::*;
        let none = Attached::default();
        match self.call {
            Unstage | UnstageReadOnly | Reboot => none,
            PublishToGroup | PublishReadOnly | PublishRawReadOnly => {
                none.published(on, &self.id, self.is_mounted())
            }
            _ => none.staged(on, &self.id, self.is_mounted()),
        }
    }

    fn finish(&mut self, on: &Scene) {
        self.release(on);
    }
}
