//! The sidecar between a driver and its clients, beside the released one, around a real API server: how fast
//! and at what cost answers pass through (`relay`), and how many requests it takes (`requests`).

mod relay;
mod requests;
mod rig;

use std::thread;

use anyhow::{Result, anyhow};

use crate::Options;
use crate::records;
use crate::report::{Report, Row};
use rig::Rig;
use support::cluster::{Cluster, NoCluster};

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    // What tests stand on panics where something is not as it should be; the other rows are to go on.
    thread::scope(|scope| scope.spawn(|| all(options, report)).join())
        .unwrap_or_else(|_| Err(anyhow!("what it stands on failed")))
}

fn all(options: Options, report: &mut Report) -> Result<()> {
    let extents: u64 = options.pick(5_000_000, 100_000);
    // Each takes seconds.
    let (cluster, made) = thread::scope(|scope| {
        let starting = scope.spawn(Cluster::start);
        let made = records::driver_with_delta(extents);
        (starting.join(), made)
    });
    let cluster = match cluster.map_err(|_| anyhow!("the cluster does not start"))? {
        Ok(cluster) => cluster,
        Err(NoCluster::Lacking(why)) => {
            let row = Row::said("sidecar", "the sidecar, relay and requests", "not measured");
            report.row(row.against(format!("API server and released sidecar: {why}"), None));
            return Ok(());
        }
        Err(NoCluster::Failed(why)) => return Err(anyhow!(why)),
    };
    let (driver, base, target) = made?;
    let rig = Rig::new(&cluster, &driver, &base, &target)?;
    relay::measure(options, report, &rig, extents)?;
    requests::measure(options, report, &rig)
}
