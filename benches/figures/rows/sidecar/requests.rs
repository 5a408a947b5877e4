//! Many short requests for an empty delta. Clients, sidecar, driver and API server share the cores.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use csi_loopback::grpc::RawMessage;
use tokio::task::JoinSet;
use tonic::transport::Channel;

use super::relay::{DELTA, decode};
use super::rig::{Implementation, Rig, Sidecar};
use crate::Options;
use crate::harness::endpoint;
use crate::kernel::CpuClock;
use crate::report::{Report, Row};
use crate::stats::{Samples, digits, grouped, time};
use support::cluster::sidecar::channel_with;

/// Connections that the clients share.
const CONNECTIONS: usize = 8;
/// Time for the API server to write its audit log.
const WRITTEN: Duration = Duration::from_millis(200);

/// Time for unused connections to close.
const CLOSED: Duration = Duration::from_millis(50);

/// The result of clients that send requests for a while.
struct Outcome {
    responses: u64,
    errors: u64,
    /// Processor time of the sidecar in seconds per response.
    cpu: f64,
    took: f64,
    /// Requests of the sidecar to the API server.
    reviews: u64,
}

impl Outcome {
    fn rate(&self) -> f64 {
        self.responses as f64 / self.took
    }

    fn summary(&self) -> String {
        let errors = match self.errors {
            0 => String::new(),
            some => format!(", {some} errors"),
        };
        let each = self.reviews as f64 / self.responses.max(1) as f64;
        let reviews = match each >= 0.01 {
            true => format!("{} API requests each", digits(each)),
            false => format!("{} API requests in total", self.reviews),
        };
        let (rate, responses) = (digits(self.rate()), grouped(self.responses as i64));
        format!("{rate}/s ({responses} responses{errors}), {reviews}")
    }
}

pub fn measure(options: Options, report: &mut Report, rig: &Rig<'_>) -> Result<()> {
    let many = options.pick(64, 4);
    let tokens: Vec<String> = (0..many).map(|_| rig.token()).collect();
    let base = rig.handle("still")?;
    let requests: Vec<RawMessage> =
        tokens.iter().map(|token| RawMessage::of(&rig.delta(token, &base, "same"))).collect();
    let second = Duration::from_secs(1);
    let quick = Duration::from_millis(300);
    let unlimited = ["-kube-api-qps=100000", "-kube-api-burst=100000"];

    let released = rig.sidecar(Implementation::Released, &unlimited)?;
    let peer = run_clients(rig, &released, &requests[..1], 16, options.pick(5 * second, quick))?;
    let peer_times = one_by_one(rig, &released, &requests[0], options.pick(300, 20))?;
    drop(released);
    let throttled = rig.sidecar(Implementation::Released, &[])?;
    let limited =
        run_clients(rig, &throttled, &requests[..1], 4, options.pick(20 * second, quick))?;
    drop(throttled);
    let unlimited_peer = format!("released sidecar without limits: {}", peer.summary());
    let limited_peer = format!("released sidecar at its default limits: {}", limited.summary());

    for (flags, limits, peer, peer_summary) in [
        (&["--kube-api-qps", "-1"][..], "without limits", &peer, &unlimited_peer),
        (
            &["--kube-api-qps", "5"][..],
            "at default limits (5 API requests per second)",
            &limited,
            &limited_peer,
        ),
    ] {
        let ours = rig.sidecar(Implementation::Ours, flags)?;
        if limits == "without limits" {
            let times = one_by_one(rig, &ours, &requests[0], options.pick(2000, 50))?;
            report.row(latency(&times, &peer_times));
        }
        for (requests, tokens) in
            [(&requests[..1], "one token".to_owned()), (&requests[..], format!("{many} tokens"))]
        {
            let outcome =
                run_clients(rig, &ours, requests, many, options.pick(12 * second, quick))?;
            let what = format!("short requests, {many} concurrent, {tokens}, {limits}");
            let mut row = Row::value("sidecar", what, outcome.summary());
            row.cpu_seconds = Some(outcome.cpu);
            let ratio = (peer.responses > 0).then(|| outcome.rate() / peer.rate());
            report.row(row.against(peer_summary, ratio).must("1,000/s", outcome.rate() >= 1000.0));
        }
    }
    let ours = rig.sidecar(Implementation::Ours, &["--review-cache-ttl", "0s"])?;
    let outcome = run_clients(rig, &ours, &requests, many, options.pick(5 * second, quick))?;
    let what = format!(
        "short requests, {many} concurrent, {many} tokens, without limits, without a cache (--review-cache-ttl 0s)"
    );
    let mut row = Row::value("sidecar", what, outcome.summary());
    row.cpu_seconds = Some(outcome.cpu);
    report.row(row.against(&unlimited_peer, outcome.rate() / peer.rate()));
    Ok(())
}

fn latency(ours: &Samples, released: &Samples) -> Row {
    let describe = |times: &Samples| {
        format!("median {}, p99 {}", time(times.median()), time(times.percentile(99)))
    };
    let what = "a short request, one after the other, token cached";
    let mut row = Row::samples("sidecar", what, ours, "seconds", time);
    row.measured = describe(ours);
    let peer = format!("released sidecar without limits: {}", describe(released));
    row.against(peer, released.median() / ours.median())
}

/// Channels to a sidecar, each with its own connection.
fn channels(rig: &Rig<'_>, sidecar: &Sidecar) -> Vec<Channel> {
    let _inside = rig.driver.runtime.enter();
    let channel = |_| channel_with(endpoint(), sidecar.served.port, &rig.trusted());
    (0..CONNECTIONS).map(channel).collect()
}

/// Runs concurrent clients, each of which repeats one of the requests.
fn run_clients(
    rig: &Rig<'_>,
    sidecar: &Sidecar,
    requests: &[RawMessage],
    count: usize,
    duration: Duration,
) -> Result<Outcome> {
    let user = sidecar.account.user();
    let channels = channels(rig, sidecar);
    rig.settle(WRITTEN);
    let reviews_before = rig.cluster.requests_by(&user);
    let clock = CpuClock::of(sidecar.pid())?;
    let counted = Arc::new(Counted::default());
    let begun = Instant::now();
    rig.driver.runtime.block_on(async {
        let mut clients = JoinSet::new();
        for client in 0..count {
            let channel = channels[client % channels.len()].clone();
            clients.spawn(call_repeatedly(
                channel,
                requests[client % requests.len()].clone(),
                counted.clone(),
            ));
        }
        // Dropping the set aborts the clients.
        tokio::time::sleep(duration).await;
    });
    let took = begun.elapsed().as_secs_f64();
    let cpu = clock.spent().as_secs_f64();
    drop(channels);
    rig.settle(WRITTEN);
    let reviews = (rig.cluster.requests_by(&user) - reviews_before) as u64;
    let responses = counted.responses.load(Ordering::Relaxed);
    let errors = counted.errors.load(Ordering::Relaxed);
    Ok(Outcome { responses, errors, cpu: cpu / responses.max(1) as f64, took, reviews })
}

#[derive(Debug, Default)]
pub(super) struct Counted {
    responses: AtomicU64,
    errors: AtomicU64,
}

pub(super) async fn call_repeatedly(channel: Channel, request: RawMessage, counted: Arc<Counted>) {
    loop {
        match decode(channel.clone(), DELTA, request.clone()).await {
            Ok(_) => counted.responses.fetch_add(1, Ordering::Relaxed),
            Err(error) => {
                if counted.errors.fetch_add(1, Ordering::Relaxed) == 0 {
                    eprintln!("  a request failed: {error:#}");
                }
                0
            }
        };
    }
}

/// Times of single requests over an open connection, to a sidecar that has cached the token.
fn one_by_one(
    rig: &Rig<'_>,
    sidecar: &Sidecar,
    request: &RawMessage,
    count: usize,
) -> Result<Samples> {
    let channel = channels(rig, sidecar).pop().context("a channel")?;
    let times = rig.driver.runtime.block_on(async {
        let mut times = Vec::with_capacity(count);
        for number in 0..count + 10 {
            let begun = Instant::now();
            decode(channel.clone(), DELTA, request.clone()).await?;
            if number >= 10 {
                times.push(begun.elapsed());
            }
        }
        anyhow::Ok(times)
    })?;
    drop(channel);
    rig.settle(CLOSED);
    Ok(times.into_iter().collect())
}
