//! Scenario: a pool image grows while a pod writes.

use csi_loopback::proto::admin::v1 as admin;
use support::MIB;
use support::driver::*;
use tonic::Status;

use super::harness::{Scenario, Scene};

/// Each round grows the pool by some MiB.
#[derive(Default)]
pub struct Grow {
    volume: String,
    size: u64,
}

impl Grow {
    pub const FLAGS: [&str; 2] = ["--pool-size", "320Mi"];
    const STEP: u64 = 8 * MIB;
}

impl Scenario for Grow {
    fn prepare(&mut self, on: &mut Scene, _round: usize) {
        if self.volume.is_empty() {
            self.volume = on.driver.volume(&on.name("v", 0), MIB, block());
            on.driver.publish(&self.volume, &block());
            // The first growth beyond the flag updates the marker; later ones do not.
            self.size = 320 * MIB + Self::STEP;
            on.driver.ok(admin::GrowPoolRequest { size_bytes: self.size });
        }
        self.size += Self::STEP;
    }

    fn call(&mut self, on: &mut Scene) -> Result<(), Status> {
        on.driver.call(admin::GrowPoolRequest { size_bytes: self.size }).map(drop)
    }

    fn check(&mut self, on: &Scene) {
        let pool = on.driver.ok(admin::GetPoolRequest {});
        let image = pool.image.unwrap();
        assert_eq!((image.size_bytes, image.allocated), (self.size, true));
        // The log of the XFS is not counted.
        assert!(pool.total_bytes > self.size - 80 * MIB, "{pool:?}");
    }

    fn published(&self) -> Vec<(&str, bool)> {
        vec![(self.volume.as_str(), false)]
    }
}
