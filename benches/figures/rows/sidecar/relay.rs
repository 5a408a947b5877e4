//! The same long delta directly from the driver, through our sidecar and through the released one,
//! to a client that reads frames and to a client that decodes messages. The processor time of each
//! process is measured, because driver, sidecar and client share the cores.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use csi_loopback::grpc::RawMessage;
use csi_loopback::proto::csi::v1 as csi;
use tokio::net::UnixStream;
use tokio_rustls::TlsConnector;
use tonic::Request;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic_prost::ProstCodec;

use super::rig::{Implementation, Rig, Sidecar};
use crate::Options;
use crate::harness::endpoint;
use crate::kernel::{self, CpuClock};
use crate::raw::{self, Received};
use crate::records::Pattern;
use crate::report::{Report, Row};
use crate::stats::{Samples, bytes, digits, grouped, millions, time};
use support::cluster::sidecar::{channel_with, connect, connector};
use support::requests::delta;

/// The method of the Kubernetes API.
pub const DELTA: &str = "/snapshotmetadata.SnapshotMetadata/GetMetadataDelta";

const PER_MESSAGE: [i32; 2] = [256, 4096];
/// Concurrent streams.
const MANY: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Client {
    /// HTTP/2 only.
    Raw,
    /// tonic and prost.
    Decoding,
}

impl Client {
    fn what(self) -> &'static str {
        match self {
            Self::Raw => "frames undecoded",
            Self::Decoding => "client decodes (tonic, prost)",
        }
    }
}

/// A path to the driver.
struct Route {
    /// The process ids of the route's sidecars.
    sidecars: Vec<u32>,
    endpoint: Endpoint,
    channel: Channel,
    call: &'static str,
}

enum Endpoint {
    Socket(PathBuf),
    Tls(TlsConnector, u16),
}

/// Wall and processor time of all runs on a route.
#[derive(Debug, Default)]
struct Spent {
    times: Vec<f64>,
    /// Seconds of processor time: driver, sidecars, client.
    cpu: [Vec<f64>; 3],
}

impl Spent {
    fn rates(&self, extents: u64) -> Samples {
        self.times.iter().map(|seconds| extents as f64 / seconds).collect()
    }

    fn cpu(&self, of: usize) -> f64 {
        self.cpu[of].iter().copied().collect::<Samples>().median()
    }

    /// Describes the wall time and its processor time by process.
    fn split(&self) -> String {
        let wall = self.times.iter().copied().collect::<Samples>().median();
        let [driver, sidecar, client] = [0, 1, 2].map(|of| digits(100.0 * self.cpu(of) / wall));
        format!(
            "{} of wall time, of which driver {driver} %, sidecar {sidecar} %, client {client} %",
            time(wall)
        )
    }
}

pub fn measure(options: Options, report: &mut Report, rig: &Rig<'_>, extents: u64) -> Result<()> {
    let ours = rig.sidecar(Implementation::Ours, &[])?;
    let released =
        rig.sidecar(Implementation::Released, &["-kube-api-qps=100000", "-kube-api-burst=100000"])?;
    thread::sleep(Duration::from_millis(options.pick(2000, 200)));
    let idle = [&ours, &released].map(|one| kernel::memory(one.pid(), "status", "VmRSS"));
    let [idle, released_idle] = idle;
    let row = Row::value("sidecar", "memory of the sidecar, idle", bytes(idle?));
    report.row(row.against(format!("released sidecar: {}", bytes(released_idle?)), None));
    let routes = [Route::direct(rig)?, Route::through(rig, &ours), Route::through(rig, &released)];
    for client in [Client::Raw, Client::Decoding] {
        for max in PER_MESSAGE {
            let requests = requests(rig, max);
            // Verifies the streams, and warms up.
            for (route, request) in routes.iter().zip(&requests) {
                let received = rig.driver.runtime.block_on(route.whole(request))?;
                received.check(Pattern::new(extents).bytes(), max as usize)?;
            }
            let runs = options.pick(11, 1);
            let spent = in_turn(rig, &routes, &requests, client, extents, runs)?;
            report_spent(report, client, max, extents, &spent);
        }
    }
    checks(options, report, rig, &ours, extents)?;
    hop(options, report, rig, &ours, extents)?;
    let streams = options.pick(MANY, 4);
    for count in [1, streams] {
        // Long enough that all streams overlap.
        let each = extents / options.pick(20, 4);
        let [of_ours, of_released] =
            [&ours, &released].map(|one| memory(rig, one, count, extents, each));
        let what = match count {
            1 => "peak memory of the sidecar, 1 stream".to_owned(),
            many => format!("peak memory of the sidecar, {many} concurrent streams"),
        };
        let row = Row::value("sidecar", what, bytes(of_ours?));
        report.row(row.against(format!("released sidecar: {}", bytes(of_released?)), None));
    }
    drop(routes);
    rig.settle(Duration::from_millis(100));
    Ok(())
}

/// The encoded request of each route; the routes have different message types.
fn requests(rig: &Rig<'_>, max: i32) -> [RawMessage; 3] {
    let direct = delta(&rig.base, &rig.target);
    let direct = csi::GetMetadataDeltaRequest { max_results: max, ..direct };
    let mut through = rig.delta(&rig.token(), &rig.base, "target");
    through.max_results = max;
    let through = RawMessage::of(&through);
    [RawMessage::of(&direct), through.clone(), through]
}

/// The cost of `--check-streams`: compares a sidecar with this flag and one without.
fn checks(
    options: Options,
    report: &mut Report,
    rig: &Rig<'_>,
    plain: &Sidecar,
    extents: u64,
) -> Result<()> {
    let checking = rig.sidecar(Implementation::Ours, &["--check-streams"])?;
    let what = "through the sidecar with --check-streams";
    compare(options, report, rig, [plain, &checking], extents, what, |row, plain, _| {
        let Plain { rate, share, .. } = plain;
        row.against(format!("without: {}", millions(rate)), share)
    })
}

/// The cost of many nodes: compares the sidecar of one node with one that calls that of a node.
fn hop(
    options: Options,
    report: &mut Report,
    rig: &Rig<'_>,
    plain: &Sidecar,
    extents: u64,
) -> Result<()> {
    let front = rig.many_nodes()?;
    let what = "through the sidecars for clients and of a node";
    compare(options, report, rig, [plain, &front], extents, what, |row, plain, cpu| {
        let Plain { rate, share, cpu: of_one } = plain;
        let cpu = cpu / of_one;
        let (rate, times) = (millions(rate), digits(cpu));
        let peer = format!("one sidecar: {rate}, with 1/{times} of the sidecars' CPU");
        row.against(peer, share).must("0.7, or 2.2 times the CPU", share >= 0.7 || cpu <= 2.2)
    })
}

/// What a sidecar is compared with: extents per second and processor seconds of the other one, and
/// the share of its rate, per round.
struct Plain {
    rate: f64,
    share: f64,
    cpu: f64,
}

/// Compares two ways to the driver, in turn. `judge` adds the comparison to a row about the second
/// one, with its processor seconds.
fn compare(
    options: Options,
    report: &mut Report,
    rig: &Rig<'_>,
    sidecars: [&Sidecar; 2],
    extents: u64,
    what: &str,
    judge: impl Fn(Row, Plain, f64) -> Row,
) -> Result<()> {
    let routes = sidecars.map(|sidecar| Route::through(rig, sidecar));
    for max in PER_MESSAGE {
        let [_, one, other] = requests(rig, max);
        let requests = [one, other];
        // Verifies the stream; the first one is slower.
        let received = rig.driver.runtime.block_on(routes[1].whole(&requests[1]))?;
        received.check(Pattern::new(extents).bytes(), max as usize)?;
        in_turn(rig, &routes, &requests, Client::Raw, extents, 1)?;
        let runs = options.pick(11, 1);
        let [plain, second] = in_turn(rig, &routes, &requests, Client::Raw, extents, runs)?;
        let shares = plain.times.iter().zip(&second.times).map(|(plain, second)| plain / second);
        let plain = Plain {
            rate: plain.rates(extents).median(),
            share: shares.collect::<Samples>().median(),
            cpu: plain.cpu(1),
        };
        let what = format!(
            "{what}, {} extents, {} per message, {}",
            grouped(extents as i64),
            grouped(max.into()),
            Client::Raw.what()
        );
        let rates = second.rates(extents);
        let row = Row::samples("sidecar", what, &rates, "extents per second", millions);
        let row = judge(row, plain, second.cpu(1));
        report.row(Row { cpu_seconds: Some(second.cpu(1)), ..row });
    }
    Ok(())
}

/// Measures all routes once per round.
fn in_turn<const ROUTES: usize>(
    rig: &Rig<'_>,
    routes: &[Route; ROUTES],
    requests: &[RawMessage; ROUTES],
    client: Client,
    extents: u64,
    rounds: usize,
) -> Result<[Spent; ROUTES]> {
    let mut spent = std::array::from_fn(|_| Spent::default());
    for _ in 0..rounds {
        for ((route, request), spent) in routes.iter().zip(requests).zip(&mut spent) {
            let sidecars = route.sidecars.iter().copied().map(CpuClock::of);
            let clocks =
                [vec![rig.driver.cpu()?], sidecars.collect::<Result<_>>()?, vec![CpuClock::own()]];
            let took = rig.driver.runtime.block_on(async {
                match client {
                    Client::Raw => route.frames(request, drop).await.map(|received| received.whole),
                    Client::Decoding => route.decoded(request, extents).await,
                }
            })?;
            let cpu = clocks.map(|some| some.iter().map(|clock| clock.spent()).sum::<Duration>());
            spent.times.push(took.as_secs_f64());
            for (all, cpu) in spent.cpu.iter_mut().zip(cpu) {
                all.push(cpu.as_secs_f64());
            }
        }
    }
    Ok(spent)
}

fn report_spent(report: &mut Report, client: Client, max: i32, extents: u64, spent: &[Spent; 3]) {
    let [direct, ours, released] = spent;
    let rates = spent.each_ref().map(|spent| spent.rates(extents));
    let [direct_rate, _, released_rate] = rates.each_ref().map(Samples::median);
    let stream = format!(
        "{} extents, {} per message, {}",
        grouped(extents as i64),
        grouped(max.into()),
        client.what()
    );
    // Per round, because other load on the machine disturbs all routes of a round equally.
    let shares = direct.times.iter().zip(&ours.times).map(|(direct, ours)| direct / ours);
    let share = shares.collect::<Samples>().median();
    let what = format!("through the sidecar over TLS, {stream}");
    let row = Row::samples("sidecar", what, &rates[1], "extents per second", millions);
    let peer = format!(
        "directly from the driver: {}; through the released sidecar: {}",
        millions(direct_rate),
        millions(released_rate)
    );
    let mut row = row.against(peer, share).must("0.85 of direct", share >= 0.85);
    row.cpu_seconds = Some(ours.cpu(1));
    report.row(row);
    let per_million = [ours, released].map(|spent| spent.cpu(1) * 1e6 / extents as f64);
    let fewer = per_million[1] / per_million[0];
    let what = format!(
        "CPU of the sidecar per million extents, {} per message, {}",
        grouped(max.into()),
        client.what()
    );
    let row = Row::value("sidecar", what, time(per_million[0]));
    let peer = format!("released sidecar: {}", time(per_million[1]));
    report.row(row.against(peer, fewer).must("10 times less", fewer >= 10.0));
    report.note(format!(
        "{stream}, direct: {}; through the sidecar: {}",
        direct.split(),
        ours.split()
    ));
}

impl Route {
    fn direct(rig: &Rig<'_>) -> Result<Self> {
        let endpoint = Endpoint::Socket(rig.driver.socket());
        Ok(Self {
            sidecars: Vec::new(),
            endpoint,
            channel: rig.driver.channel()?,
            call: raw::DELTA,
        })
    }

    fn through(rig: &Rig<'_>, sidecar: &Sidecar) -> Self {
        let port = sidecar.served.port;
        let _inside = rig.driver.runtime.enter();
        let channel = channel_with(endpoint(), port, &rig.trusted());
        let endpoint = Endpoint::Tls(connector(&rig.trusted()), port);
        Self { sidecars: sidecar.pids(), endpoint, channel, call: DELTA }
    }

    async fn frames(
        &self,
        request: &RawMessage,
        each: impl FnMut(tonic::codegen::Bytes),
    ) -> Result<Received> {
        match &self.endpoint {
            Endpoint::Socket(socket) => {
                let stream = UnixStream::connect(socket).await?;
                raw::receive(stream, self.call, request, each).await
            }
            Endpoint::Tls(connector, port) => {
                let stream = connect(connector, *port).await?;
                raw::receive(stream, self.call, request, each).await
            }
        }
    }

    async fn whole(&self, request: &RawMessage) -> Result<Received> {
        let mut frames = Vec::new();
        let received = self.frames(request, |frame| frames.push(frame)).await?;
        Ok(Received { frames, ..received })
    }

    async fn decoded(&self, request: &RawMessage, extents: u64) -> Result<Duration> {
        let begun = Instant::now();
        let found = decode(self.channel.clone(), self.call, request.clone()).await?;
        ensure!(found == extents, "received {found} of {extents} extents");
        Ok(begun.elapsed())
    }
}

/// Decodes a whole stream and returns the number of extents. The messages are the same in CSI and
/// in Kubernetes.
pub async fn decode(channel: Channel, call: &'static str, request: RawMessage) -> Result<u64> {
    let mut grpc = Grpc::new(channel).max_decoding_message_size(16 << 20);
    grpc.ready().await?;
    let codec = ProstCodec::<RawMessage, csi::GetMetadataDeltaResponse>::default();
    let path = PathAndQuery::from_static(call);
    let mut stream = grpc.server_streaming(Request::new(request), path, codec).await?.into_inner();
    let mut found = 0;
    while let Some(message) = stream.message().await? {
        found += message.block_metadata.len() as u64;
    }
    Ok(found)
}

/// The peak resident bytes of a sidecar while `count` clients, each with its own connection, read
/// the last `each` extents.
fn memory(rig: &Rig<'_>, sidecar: &Sidecar, count: usize, extents: u64, each: u64) -> Result<u64> {
    let route = Route::through(rig, sidecar);
    let offset =
        Pattern::new(extents).bytes().nth((extents - each) as usize).context("an extent")?.0;
    let mut request = rig.delta(&rig.token(), &rig.base, "target");
    (request.starting_offset, request.max_results) = (offset as i64, 4096);
    let request = RawMessage::of(&request);
    kernel::reset_peak(sidecar.pid())?;
    rig.driver.runtime.block_on(async {
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..count {
            let Endpoint::Tls(connector, port) = &route.endpoint else { continue };
            let (connector, port, request) = (connector.clone(), *port, request.clone());
            all.spawn(async move {
                let stream = connect(&connector, port).await?;
                raw::receive(stream, DELTA, &request, drop).await
            });
        }
        all.join_all().await.into_iter().try_for_each(|received| received.map(drop))
    })?;
    kernel::memory(sidecar.pid(), "status", "VmHWM")
}
