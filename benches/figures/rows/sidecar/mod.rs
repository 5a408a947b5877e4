//! The sidecar compared with the released one, with a real API server: throughput and cost of
//! streams (`relay`), the rate of short requests (`requests`), and floods and frozen connections
//! (`abuse`).

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

/// Rows that share a cluster and a driver.
type Part = fn(Options, &mut Report, &Rig<'_>) -> Result<()>;

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    with_rig("sidecar", options, report, extents(options), |options, report, rig| {
        relay::measure(options, report, rig, extents(options))?;
        requests::measure(options, report, rig)
    })
}

/// Extents of the long delta.
fn extents(options: Options) -> u64 {
    options.pick(5_000_000, 100_000)
}

pub fn abuse(options: Options, report: &mut Report) -> Result<()> {
    with_rig("abuse", options, report, 1000, abuse::measure)
}

fn with_rig(
    row: &'static str,
    options: Options,
    report: &mut Report,
    extents: u64,
    part: Part,
) -> Result<()> {
    let run = || {
        // In parallel, because each takes seconds.
        let (cluster, made) = thread::scope(|scope| {
            let starting = scope.spawn(Cluster::start);
            let made = records::driver_with_delta(extents);
            (starting.join(), made)
        });
        let cluster = match cluster.map_err(|_| anyhow!("the cluster did not start"))? {
            Ok(cluster) => cluster,
            Err(NoCluster::Unavailable(why)) => {
                let row = Row::value(row, "API server and released sidecar", "not measured");
                report.row(row.against(format!("API server and released sidecar: {why}"), None));
                return Ok(());
            }
            Err(NoCluster::Failed(why)) => return Err(anyhow!(why)),
        };
        let (driver, base, target) = made?;
        part(options, report, &Rig::new(&cluster, &driver, &base, &target)?)
    };
    // The test harness panics on errors. The thread keeps a panic from ending the other rows.
    thread::scope(|scope| scope.spawn(run).join())
        .unwrap_or_else(|_| Err(anyhow!("the test harness panicked")))
}
