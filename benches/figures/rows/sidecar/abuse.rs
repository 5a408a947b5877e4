//! Short requests of a well-behaved client while another one abuses the gRPC port.

use std::time::Duration;

use anyhow::Result;
use csi_loopback::grpc::RawMessage;
use support::abuse::{Experience, JUNK_TOKENS, experience};
use support::cluster::sidecar::channel_with;

use super::relay::{DELTA, decode};
use super::rig::{Implementation, Rig};
use crate::Options;
use crate::harness::endpoint;
use crate::report::{Report, Row};
use crate::stats::{Samples, bytes, time};

/// Requests of the sidecar to the API server, per second and at once.
const LIMITS: [&str; 2] = ["--kube-api-qps=20", "--kube-api-burst=40"];

/// A request without an answer after this time counts as failed.
const PATIENCE: Duration = Duration::from_secs(10);

/// The quick version abuses only our sidecar: the released one is silent for two minutes.
pub fn measure(options: Options, report: &mut Report, rig: &Rig<'_>) -> Result<()> {
    let released = match options.quick {
        true => "not measured".to_owned(),
        false => describe(&abused(rig, Implementation::Released)?),
    };
    let ours = abused(rig, Implementation::Ours)?;
    let times: Samples = ours.calls.iter().copied().collect();
    let good = ours.failed == 0 && times.max() < 2.0;
    let what = "a short request over a new connection, during abuse of the port";
    let mut row = Row::value("sidecar", what, describe(&ours));
    row.peak_bytes = Some(ours.most);
    report.row(row.against(format!("released sidecar: {released}"), None).must("2 s", good));
    Ok(())
}

fn abused(rig: &Rig<'_>, implementation: Implementation) -> Result<Experience> {
    let sidecar = rig.sidecar(implementation, &LIMITS)?;
    let request = RawMessage::of(&rig.delta(&rig.token(), &rig.handle("still")?, "same"));
    let process = sidecar.served.process.pid();
    Ok(experience(sidecar.served.port, process, JUNK_TOKENS, || {
        rig.driver.runtime.block_on(async {
            let channel = channel_with(endpoint(), sidecar.served.port, &rig.trusted());
            let call = decode(channel, DELTA, request.clone());
            matches!(tokio::time::timeout(PATIENCE, call).await, Ok(Ok(_)))
        })
    }))
}

fn describe(abused: &Experience) -> String {
    let times: Samples = abused.calls.iter().copied().collect();
    format!(
        "median {}, slowest {}, {} of {} failed, {}",
        time(times.median()),
        time(times.max()),
        abused.failed,
        times.count(),
        bytes(abused.most)
    )
}
