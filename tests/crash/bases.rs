//! Scenario: the retention of a deleted snapshot is changed.

use csi_loopback::proto::admin::v1 as admin;
use support::MIB;
use support::driver::*;
use tonic::Status;

use super::harness::{Scenario, Scene};
use admin::base::Retention as Kept;
use admin::set_base_retention_request::Retention;

/// Each round extends the retention by one day.
#[derive(Default)]
pub struct Keep {
    volume: String,
    base: String,
    seconds: u64,
}

pub fn keep(id: &str, seconds: u64) -> admin::SetBaseRetentionRequest {
    let retention = Some(Retention::ForSeconds(seconds));
    admin::SetBaseRetentionRequest { snapshot_id: id.to_owned(), retention }
}

impl Scenario for Keep {
    fn prepare(&mut self, on: &mut Scene, _round: usize) {
        if self.volume.is_empty() {
            self.volume = on.driver.volume(&on.name("v", 0), MIB, block());
            self.base = on.driver.snapshot(&on.name("base", 0), &self.volume);
            on.driver.snapshot(&on.name("next", 0), &self.volume);
            on.driver.ok(delete_snapshot(&self.base));
            // The first entry creates the table of rows with their own retention.
            on.driver.ok(keep(&self.base, 86_400));
            self.seconds = 86_400;
        }
        self.seconds += 86_400;
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        on.driver.call(keep(&self.base, self.seconds)).map(drop)
    }

    fn check(&mut self, on: &Scene) {
        let volume_id = self.volume.clone();
        let bases = on.driver.ok(admin::ListBasesRequest { volume_id, ..Default::default() }).bases;
        let base = bases.iter().find(|base| base.snapshot_id == self.base).unwrap();
        assert_eq!(base.retention, Some(Kept::ForSeconds(self.seconds)));
    }
}
