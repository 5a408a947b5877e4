//! Scenarios of inline volumes in memory with content that the driver writes.

use std::collections::BTreeMap;
use std::fs;

use csi_loopback::proto::csi::v1 as csi;
use tonic::Status;

use crate::harness::{Attached, Scenario, Scene};
use support::driver::*;
use support::inline::PodVolume;
use support::path;

type Files = &'static [(&'static str, &'static str)];

const BEFORE: Files = &[("a", "before"), ("b", "before"), ("gone", "x")];
const AFTER: Files = &[("a", "after"), ("b", "after"), ("new", "y")];

/// The calls for a volume with a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Publish,
    /// Publish of an existing volume with another secret, while unwanted files exist in it.
    Refresh,
    /// Publish of a writable volume with initial files.
    Seed,
    Unpublish,
}

pub struct InlineContent {
    call: Call,
    volume: Option<PodVolume>,
}

impl InlineContent {
    pub fn new(call: Call) -> Self {
        Self { call, volume: None }
    }

    fn volume(&self) -> &PodVolume {
        self.volume.as_ref().unwrap()
    }

    fn publishing(&self, files: Files) -> csi::NodePublishVolumeRequest {
        let attributes: &[(&str, &str)] = match self.call {
            Call::Seed => &[("size", "16Mi"), ("readOnlyContent", "false")],
            Call::Publish | Call::Refresh | Call::Unpublish => &[("size", "16Mi")],
        };
        let request = self.volume().publishing_content(attributes, files);
        csi::NodePublishVolumeRequest { readonly: self.call != Call::Seed, ..request }
    }

    fn release(&mut self, on: &Scene) {
        if let Some(volume) = self.volume.take() {
            on.driver.unpublish(&volume.handle, &volume.target);
        }
    }
}

impl Scenario for InlineContent {
    fn prepare(&mut self, on: &mut Scene, round: usize) {
        if self.call != Call::Refresh || self.volume.is_none() {
            self.release(on);
            let handle = on.name("inline", round);
            let target = on.driver.scratch().join(format!("target-{handle}"));
            self.volume = Some(PodVolume { handle, target });
        }
        match self.call {
            Call::Publish | Call::Seed => {}
            Call::Unpublish => drop(on.driver.ok(self.publishing(BEFORE))),
            Call::Refresh => {
                // Each round has the same generations.
                on.driver.ok(self.publishing(&[("a", "once")]));
                on.driver.ok(self.publishing(BEFORE));
                // What an earlier version left, whose mount was writable.
                let target = path(&self.volume().target);
                support::run("mount", &["-o", "remount,bind,rw", target]);
                fs::create_dir_all(self.volume().file("left/deep/deeper")).unwrap();
                support::run("mount", &["-o", "remount,bind,ro", target]);
            }
        }
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        let volume = self.volume();
        match self.call {
            Call::Unpublish => {
                on.driver.call(unpublishing(&volume.handle, path(&volume.target))).map(drop)
            }
            _ => on.driver.call(self.publishing(AFTER)).map(drop),
        }
    }

    fn check(&mut self, _on: &Scene) {
        let volume = self.volume();
        if self.call == Call::Unpublish {
            assert!(!volume.target.exists());
            return;
        }
        let mut found = BTreeMap::new();
        for entry in fs::read_dir(&volume.target).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if !name.starts_with("..") && name != "lost+found" {
                found.insert(name.clone(), fs::read_to_string(volume.file(&name)).unwrap());
            }
        }
        let wanted = AFTER.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        assert_eq!(found, wanted.collect());
    }

    fn attached(&self, _on: &Scene) -> Attached {
        match self.call {
            Call::Unpublish => Attached::default(),
            _ => Attached { mounts: [self.volume().target.clone()].into(), ..Attached::default() },
        }
    }

    fn finish(&mut self, on: &Scene) {
        self.release(on);
    }
}
