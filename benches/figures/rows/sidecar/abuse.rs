//! Short requests of a well-behaved client while others abuse the gRPC port or repeat valid
//! requests, and after all connections to the API server have frozen.

use std::time::{Duration, Instant};

use anyhow::Result;
use csi_loopback::grpc::RawMessage;
use support::abuse::{Experience, JUNK_TOKENS, Protocol, experience, junk_tokens};
use support::cluster::sidecar::channel_with;

use super::relay::{DELTA, decode};
use super::requests::call_repeatedly;
use super::rig::{Implementation, Rig, Sidecar};
use crate::Options;
use crate::harness::endpoint;
use crate::report::{Report, Row};
use crate::stats::{Samples, bytes, time};

/// Requests of the sidecar to the API server, per second and at once.
const LIMITS: [&str; 2] = ["--kube-api-qps=20", "--kube-api-burst=40"];

/// A request without an answer after this time counts as failed.
const PATIENCE: Duration = Duration::from_secs(10);
/// Clients that repeat a valid request, and the number of their tokens.
const CLIENTS: usize = 64;
/// Time after a freeze without a successful request after which it is not measured further.
const LONGEST: Duration = Duration::from_secs(120);

/// Measures our sidecar and then the released one, which is silent for two minutes in most cases.
/// The quick version measures only ours.
pub fn measure(options: Options, report: &mut Report, rig: &Rig<'_>) -> Result<()> {
    let both = |of: &dyn Fn(Implementation) -> Result<String>| -> Result<(String, String)> {
        let released = match options.quick {
            true => "not measured".to_owned(),
            false => of(Implementation::Released)?,
        };
        Ok((of(Implementation::Ours)?, released))
    };
    for (protocol, what) in
        [(JUNK_TOKENS, "abuse of the port"), (junk_tokens(36), "junk tokens of 36 addresses")]
    {
        let (ours, released) =
            both(&|implementation| Ok(describe(&abused(rig, implementation, &protocol)?)))?;
        row(
            report,
            &format!("a short request over a new connection, during {what}"),
            ours,
            released,
        );
    }
    let (ours, released) = both(&|implementation| Ok(describe(&flooded(rig, implementation)?)))?;
    let what = format!("the same, while {CLIENTS} clients repeat a valid request");
    row(report, &what, ours, released);
    let (ours, released) = both(&|implementation| frozen(rig, implementation))?;
    row(
        report,
        "a request with a new token, after connections to the API server froze",
        ours,
        released,
    );
    Ok(())
}

fn row(report: &mut Report, what: &str, ours: String, released: String) {
    let row = Row::value("abuse", what, ours);
    report.row(row.against(format!("released sidecar: {released}"), None));
}

fn abused(
    rig: &Rig<'_>,
    implementation: Implementation,
    protocol: &Protocol,
) -> Result<Experience> {
    let sidecar = rig.sidecar(implementation, &LIMITS)?;
    let request = RawMessage::of(&rig.delta(&rig.token(), &rig.handle("still")?, "same"));
    let process = sidecar.served.process.pid();
    let call = || is_answered(rig, &sidecar, &request);
    Ok(experience(sidecar.served.port, process, protocol.clone(), call))
}

/// Whether a request over a new connection succeeds in time.
fn is_answered(rig: &Rig<'_>, sidecar: &Sidecar, request: &RawMessage) -> bool {
    rig.driver.runtime.block_on(async {
        let channel = channel_with(endpoint(), sidecar.served.port, &rig.trusted());
        let call = decode(channel, DELTA, request.clone());
        matches!(tokio::time::timeout(PATIENCE, call).await, Ok(Ok(_)))
    })
}

/// Twenty requests, each with a new token, during a flood of valid ones.
fn flooded(rig: &Rig<'_>, implementation: Implementation) -> Result<Experience> {
    let sidecar = rig.sidecar(implementation, &LIMITS)?;
    let base = rig.handle("still")?;
    let request = || RawMessage::of(&rig.delta(&rig.token(), &base, "same"));
    let own: Vec<_> = (0..20).map(|_| request()).collect();
    let flood =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    for _ in 0..CLIENTS {
        let (port, trusted, request) = (sidecar.served.port, rig.trusted(), request());
        flood.spawn(async move {
            let channel = channel_with(endpoint(), port, &trusted);
            call_repeatedly(channel, request, Default::default()).await;
        });
    }
    std::thread::sleep(Duration::from_secs(2));
    let mut flooded = Experience::default();
    for request in &own {
        let begun = Instant::now();
        flooded.failed += usize::from(!is_answered(rig, &sidecar, request));
        flooded.calls.push(begun.elapsed());
    }
    flood.shutdown_background();
    flooded.most = crate::kernel::memory(sidecar.pid(), "status", "VmHWM")?;
    Ok(flooded)
}

/// When the first request succeeds after a freeze, and how many failed before.
fn frozen(rig: &Rig<'_>, implementation: Implementation) -> Result<String> {
    let proxy = rig.cluster.proxy();
    let sidecar = rig.sidecar_at(&proxy.server(), implementation, &[])?;
    let base = rig.handle("still")?;
    let answered = || {
        let request = RawMessage::of(&rig.delta(&rig.token(), &base, "same"));
        is_answered(rig, &sidecar, &request)
    };
    anyhow::ensure!(answered(), "a request fails before the freeze");
    proxy.freeze();
    let begun = Instant::now();
    let mut failed = 0;
    while !answered() {
        failed += 1;
        if begun.elapsed() > LONGEST {
            return Ok(format!("none succeeded in {} s", begun.elapsed().as_secs()));
        }
        std::thread::sleep(Duration::from_millis(250));
    }
    Ok(format!("answered after {:.1} s, {failed} failed", begun.elapsed().as_secs_f64()))
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
