//! The sidecar compared with the released one, with a real API server: throughput and cost of
//! streams (`relay`), the rate of short requests (`requests`), and abuse of the port (`abuse`).

mod abuse;
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
    // The test harness panics on errors. The thread keeps a panic from ending the other rows.
    thread::scope(|scope| scope.spawn(|| all(options, report)).join())
        .unwrap_or_else(|_| Err(anyhow!("the test harness panicked")))
}

fn all(options: Options, report: &mut Report) -> Result<()> {
    let extents: u64 = options.pick(5_000_000, 100_000);
    // In parallel, because each takes seconds.
    let (cluster, made) = thread::scope(|scope| {
        let starting = scope.spawn(Cluster::start);
        let made = records::driver_with_delta(extents);
        (starting.join(), made)
    });
    let cluster = match cluster.map_err(|_| anyhow!("the cluster did not start"))? {
        Ok(cluster) => cluster,
        Err(NoCluster::Unavailable(why)) => {
            let row = Row::value("sidecar", "sidecar, relay and requests", "not measured");
            report.row(row.against(format!("API server and released sidecar: {why}"), None));
            return Ok(());
        }
        Err(NoCluster::Failed(why)) => return Err(anyhow!(why)),
    };
    let (driver, base, target) = made?;
    let rig = Rig::new(&cluster, &driver, &base, &target)?;
    relay::measure(options, report, &rig, extents)?;
    requests::measure(options, report, &rig)?;
    abuse::measure(options, report, &rig)
}
