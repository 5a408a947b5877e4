//! Many short requests: a delta in which nothing has changed. Clients, sidecar, driver and API server share the
//! cores.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use csi_loopback::grpc::RawMessage;
use tokio::task::JoinSet;
use tonic::transport::Channel;

use super::relay::{DELTA, decode};
use super::rig::{Rig, Sidecar, Whose};
use crate::Options;
use crate::harness::endpoint;
use crate::kernel::CpuClock;
use crate::report::{Report, Row};
use crate::stats::{Samples, digits, grouped, time};
use support::cluster::sidecar::channel_with;

/// Connections that the clients share.
const CONNECTIONS: usize = 8;
/// Until the API server has written down what it was asked.
const WRITTEN: Duration = Duration::from_millis(200);

/// Until a connection that nobody needs is closed.
const CLOSED: Duration = Duration::from_millis(50);

/// What came of asking for a while.
struct Asked {
    answers: u64,
    errors: u64,
    /// Of the sidecar, in seconds per answer.
    cpu: f64,
    took: f64,
    /// Requests of the sidecar to the API server.
    reviews: u64,
}

impl Asked {
    fn rate(&self) -> f64 {
        self.answers as f64 / self.took
    }

    fn told(&self) -> String {
        let errors = match self.errors {
            0 => String::new(),
            some => format!(", {some} refused"),
        };
        let each = self.reviews as f64 / self.answers.max(1) as f64;
        let reviews = match each >= 0.01 {
            true => format!("{} API requests each", digits(each)),
            false => format!("{} API requests in all", self.reviews),
        };
        let (rate, answers) = (digits(self.rate()), grouped(self.answers as i64));
        format!("{rate}/s ({answers} answers{errors}), {reviews}")
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

    let released = rig.sidecar(Whose::Released, &unlimited)?;
    let peer = ask(rig, &released, &requests[..1], 16, options.pick(5 * second, quick))?;
    let peer_times = one_by_one(rig, &released, &requests[0], options.pick(300, 20))?;
    drop(released);
    let throttled = rig.sidecar(Whose::Released, &[])?;
    let limited = ask(rig, &throttled, &requests[..1], 4, options.pick(20 * second, quick))?;
    drop(throttled);
    let unlimited_peer = format!("released sidecar without limits: {}", peer.told());
    let limited_peer = format!("released sidecar at its default limits: {}", limited.told());

    for (flags, limits, peer, peer_said) in [
        (&["--kube-api-qps", "-1"][..], "without limits", &peer, &unlimited_peer),
        (
            &["--kube-api-qps", "5"][..],
            "at default limits (5 API requests a second)",
            &limited,
            &limited_peer,
        ),
    ] {
        let ours = rig.sidecar(Whose::Ours, flags)?;
        if limits == "without limits" {
            let times = one_by_one(rig, &ours, &requests[0], options.pick(2000, 50))?;
            report.row(latency(&times, &peer_times));
        }
        for (requests, of) in
            [(&requests[..1], "one token".to_owned()), (&requests[..], format!("{many} tokens"))]
        {
            let asked = ask(rig, &ours, requests, many, options.pick(12 * second, quick))?;
            let what = format!("short requests, {many} at once, {of}, {limits}");
            let mut row = Row::said("sidecar", what, asked.told());
            row.cpu_seconds = Some(asked.cpu);
            let ratio = (peer.answers > 0).then(|| asked.rate() / peer.rate());
            report.row(row.against(peer_said, ratio).must("1,000/s", asked.rate() >= 1000.0));
        }
    }
    let ours = rig.sidecar(Whose::Ours, &["--review-cache-ttl", "0s"])?;
    let asked = ask(rig, &ours, &requests, many, options.pick(5 * second, quick))?;
    let what = format!(
        "short requests, {many} at once, {many} tokens, without limits, nothing remembered (--review-cache-ttl 0s)"
    );
    let mut row = Row::said("sidecar", what, asked.told());
    row.cpu_seconds = Some(asked.cpu);
    report.row(row.against(&unlimited_peer, asked.rate() / peer.rate()));
    Ok(())
}

fn latency(ours: &Samples, released: &Samples) -> Row {
    let tell = |times: &Samples| {
        format!("median {}, p99 {}", time(times.median()), time(times.percentile(99)))
    };
    let what = "a short request, one after the other, token known";
    let mut row = Row::samples("sidecar", what, ours, "seconds", time);
    row.measured = tell(ours);
    let peer = format!("released sidecar without limits: {}", tell(released));
    row.against(peer, released.median() / ours.median())
}

/// Channels to a sidecar, each with a connection.
fn channels(rig: &Rig<'_>, sidecar: &Sidecar) -> Vec<Channel> {
    let _inside = rig.driver.runtime.enter();
    let channel = |_| channel_with(endpoint(), sidecar.served.port, &rig.trusted());
    (0..CONNECTIONS).map(channel).collect()
}

/// `at_once` clients ask, each with one of the requests, one time after the other.
fn ask(
    rig: &Rig<'_>,
    sidecar: &Sidecar,
    requests: &[RawMessage],
    at_once: usize,
    long: Duration,
) -> Result<Asked> {
    let user = sidecar.account.user();
    let channels = channels(rig, sidecar);
    rig.settle(WRITTEN);
    let known = rig.cluster.requests_by(&user);
    let clock = CpuClock::of(sidecar.pid())?;
    let before = clock.now();
    let counted = Arc::new(Counted::default());
    let begun = Instant::now();
    rig.driver.runtime.block_on(async {
        let mut clients = JoinSet::new();
        for client in 0..at_once {
            let channel = channels[client % channels.len()].clone();
            clients.spawn(go_on(
                channel,
                requests[client % requests.len()].clone(),
                counted.clone(),
            ));
        }
        // They are ended wherever they are.
        tokio::time::sleep(long).await;
    });
    let took = begun.elapsed().as_secs_f64();
    let cpu = (clock.now() - before).as_secs_f64();
    drop(channels);
    rig.settle(WRITTEN);
    let reviews = (rig.cluster.requests_by(&user) - known) as u64;
    let answers = counted.answers.load(Ordering::Relaxed);
    let errors = counted.errors.load(Ordering::Relaxed);
    Ok(Asked { answers, errors, cpu: cpu / answers.max(1) as f64, took, reviews })
}

#[derive(Debug, Default)]
struct Counted {
    answers: AtomicU64,
    errors: AtomicU64,
}

/// Asks the same again and again.
async fn go_on(channel: Channel, request: RawMessage, counted: Arc<Counted>) {
    loop {
        match decode(channel.clone(), DELTA, request.clone()).await {
            Ok(_) => counted.answers.fetch_add(1, Ordering::Relaxed),
            Err(error) => {
                if counted.errors.fetch_add(1, Ordering::Relaxed) == 0 {
                    eprintln!("  a request was refused: {error:#}");
                }
                0
            }
        };
    }
}

/// Times of single requests over a connection that is there, to a sidecar that knows the token.
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
