//! The sidecar compared with the released one, with a real API server: throughput and cost of
//! streams (`relay`), the rate of short requests (`requests`), floods and frozen connections
//! (`abuse`), and many snapshot objects (`scale`).

mod abuse;
mod relay;
mod requests;
mod rig;
mod scale;

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

pub fn scale(options: Options, report: &mut Report) -> Result<()> {
    with_rig("scale", options, report, 1000, scale::measure)
}

fn with_rig(
    row: &'static str,
    options: Options,
    report: &mut Report,
    extents: u64,
    part: Part,
) -> Result<()> {
    // In parallel, because each takes seconds.
    let (cluster, made) = thread::scope(|scope| {
        let starting = scope.spawn(Cluster::start);
        let made = records::driver_with_delta(extents);
        (starting.join(), made)
    });
    let cluster = cluster.map_err(|_| anyhow!("the cluster did not start"))?;
    let what = "API server and released sidecar";
    let Some(cluster) = started(row, what, cluster, report)? else { return Ok(()) };
    let (driver, base, target) = made?;
    part(options, report, &Rig::new(&cluster, &driver, &base, &target)?)
}

/// The cluster, or none, with a row of the reason, if the machine lacks what it needs.
pub fn started(
    row: &'static str,
    what: &str,
    cluster: Result<Cluster, NoCluster>,
    report: &mut Report,
) -> Result<Option<Cluster>> {
    match cluster {
        Ok(cluster) => Ok(Some(cluster)),
        Err(NoCluster::Unavailable(why)) => {
            let row = Row::value(row, what, "not measured");
            report.row(row.against(format!("{what}: {why}"), None));
            Ok(None)
        }
        Err(NoCluster::Failed(why)) => Err(anyhow!(why)),
    }
}
