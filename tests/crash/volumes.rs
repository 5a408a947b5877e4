//! Scenarios of volumes: create, expand, modify and delete.

use std::fs;
use std::path::{Path, PathBuf};

use csi_loopback::proto::csi::v1 as csi;
use tonic::{Code, Status};

use crate::harness::{Scenario, Scene};
use crate::snapshots::{Mounted, blocks};
use support::driver::*;
use support::{BLOCK, MIB, pattern, read_all, write_direct};

/// The only volume with this name.
fn volume_named(on: &Scene, name: &str) -> String {
    let mut ids = volume_ids(&on.driver);
    ids.retain(|id| id.starts_with(&format!("vol-{name}-")));
    assert_eq!(ids.len(), 1, "volumes named {name}: {ids:?}");
    ids.remove(0)
}

/// CreateVolume of an empty volume.
#[derive(Default)]
pub struct CreateEmpty {
    name: String,
}

impl Scenario for CreateEmpty {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        self.name = on.name("v", round);
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        on.driver.call(create(&self.name, 4 * MIB, block())).map(drop)
    }

    fn check(&mut self, on: &Scene) {
        let id = volume_named(on, &self.name);
        let found = on.driver.ok(get_volume(&id)).volume.unwrap();
        assert_eq!(found.capacity_bytes as u64, 4 * MIB);
    }
}

/// CreateVolume from a snapshot, larger than its source.
#[derive(Default)]
pub struct CreateFromSnapshot {
    snapshot: String,
    name: String,
    round: usize,
}

impl Scenario for CreateFromSnapshot {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        if self.snapshot.is_empty() {
            let volume = on.driver.volume(&on.name("source", 0), 2 * MIB, block());
            let content = pattern(7, MIB as usize);
            on.driver.with_device(&volume, |device| write_direct(device, BLOCK, &content));
            self.snapshot = on.driver.snapshot(&on.name("snapshot", 0), &volume);
        }
        (self.name, self.round) = (on.name("v", round), round);
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        let source = Source::Snapshot(&self.snapshot);
        on.driver.call(from_source(&self.name, source, 4 * MIB)).map(drop)
    }

    fn check(&mut self, on: &Scene) {
        let id = volume_named(on, &self.name);
        let content = on.driver.with_device(&id, read_all);
        assert_eq!(content.len() as u64, 4 * MIB);
        let end = BLOCK as usize + MIB as usize;
        assert!(content[BLOCK as usize..end] == pattern(7, MIB as usize));
        assert!(content[end..].iter().all(|byte| *byte == 0));
    }
}

/// CreateVolume from a mounted volume, which is frozen.
#[derive(Default)]
pub struct CloneMounted {
    source: Option<Mounted>,
    name: String,
    round: usize,
}

impl Scenario for CloneMounted {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        let source = self.source.get_or_insert_with(|| Mounted::new(on, "source"));
        source.change(round);
        (self.name, self.round) = (on.name("v", round), round);
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        let source = Source::Volume(&self.source.as_ref().unwrap().id);
        let request = csi::CreateVolumeRequest {
            volume_content_source: Some(source.into()),
            ..create(&self.name, 0, mounted(""))
        };
        on.driver.call(request).map(drop)
    }

    fn check(&mut self, on: &Scene) {
        let id = volume_named(on, &self.name);
        if self.round % 4 == 1 {
            let target = on.driver.publish(&id, &mounted(""));
            let count = fs::read_to_string(target.join("count")).unwrap();
            on.driver.take_down(&id);
            assert_eq!(count, self.round.to_string());
        }
    }

    fn published(&self) -> Vec<(&str, bool)> {
        self.source.iter().map(|source| (&*source.id, true)).collect()
    }
}

/// DeleteVolume with deleted snapshots: everything is removed.
#[derive(Default)]
pub struct Delete {
    id: String,
}

impl Scenario for Delete {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        self.id = on.driver.volume(&on.name("v", round), MIB, block());
        for what in ["older", "newer"] {
            let snapshot = on.driver.snapshot(&on.name(what, round), &self.id);
            on.driver.ok(delete_snapshot(&snapshot));
        }
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        on.driver.call(delete_volume(&self.id)).map(drop)
    }

    fn check(&mut self, on: &Scene) {
        assert!(volume_ids(&on.driver).is_empty());
        on.driver.refused(get_volume(&self.id), Code::NotFound, "does not exist");
    }
}

/// ControllerExpandVolume of a published raw volume, whose device grows too.
#[derive(Default)]
pub struct Expand {
    id: String,
    device: PathBuf,
    bytes: u64,
}

fn size_of(device: &Path) -> u64 {
    use std::io::{Seek, SeekFrom};
    fs::File::open(device).unwrap().seek(SeekFrom::End(0)).unwrap()
}

impl Scenario for Expand {
    fn prepare(&mut self, on: &mut Scene, _: usize) {
        if self.id.is_empty() {
            self.bytes = 4 * MIB;
            self.id = on.driver.volume(&on.name("v", 0), self.bytes, block());
            self.device = on.driver.publish(&self.id, &block());
        }
        self.bytes += MIB;
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        on.driver.call(expand(&self.id, self.bytes)).map(drop)
    }

    fn check(&mut self, on: &Scene) {
        let capacity = on.driver.ok(get_volume(&self.id)).volume.unwrap().capacity_bytes;
        assert_eq!(capacity as u64, self.bytes);
        // NodeExpandVolume, which the orchestrator calls next, grows the device after a crash.
        on.driver.ok(expand_on_node(&self.id, &self.device));
        assert_eq!(size_of(&self.device), self.bytes);
    }

    fn published(&self) -> Vec<(&str, bool)> {
        vec![(self.id.as_str(), false)]
    }
}

/// ControllerModifyVolume: disables tracking, with a hidden baseline.
#[derive(Default)]
pub struct TrackingOff {
    id: String,
    base: String,
    round: usize,
}

impl Scenario for TrackingOff {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        if self.id.is_empty() {
            self.id = on.driver.volume(&on.name("v", 0), MIB, block());
        }
        on.driver.ok(modify(&self.id, &[("changeTracking", "true")]));
        self.base = on.driver.snapshot(&on.name("base", round), &self.id);
        on.driver.ok(delete_snapshot(&self.base));
        self.round = round;
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        on.driver.call(modify(&self.id, &[("changeTracking", "false")])).map(drop)
    }

    fn check(&mut self, on: &Scene) {
        let next = on.driver.snapshot(&on.name("next", self.round), &self.id);
        let refused = delta(&self.base, &next);
        on.driver.refused(refused, Code::FailedPrecondition, "change tracking was off");
        on.driver.ok(delete_snapshot(&next));
    }
}

/// ControllerModifyVolume: enables tracking again.
#[derive(Default)]
pub struct TrackingOn {
    id: String,
    round: usize,
}

impl Scenario for TrackingOn {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        if self.id.is_empty() {
            self.id = on.driver.volume(&on.name("v", 0), MIB, block());
        }
        on.driver.ok(modify(&self.id, &[("changeTracking", "false")]));
        self.round = round;
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        on.driver.call(modify(&self.id, &[("changeTracking", "true")])).map(drop)
    }

    fn check(&mut self, on: &Scene) {
        let [a, b] = ["a", "b"].map(|what| {
            let id = on.driver.snapshot(&on.name(what, self.round), &self.id);
            let content = pattern(self.round as u64, BLOCK as usize);
            on.driver.with_device(&self.id, |device| write_direct(device, 5 * BLOCK, &content));
            id
        });
        assert_eq!(blocks(&on.driver.ok(delta(&a, &b))), [5].into());
        for id in [a, b] {
            on.driver.ok(delete_snapshot(&id));
        }
    }
}
