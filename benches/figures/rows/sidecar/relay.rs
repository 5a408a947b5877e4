//! The same long delta straight from the driver, through our sidecar and through the released one, in turn, to a
//! client that takes frames undecoded and to one that decodes. What each of the processes spends is read from its
//! clock: on a machine with two cores driver, sidecar and client share them.

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

use super::rig::{Rig, Sidecar, Whose};
use crate::Options;
use crate::harness::endpoint;
use crate::kernel::{self, CpuClock};
use crate::raw::{self, Taken};
use crate::records::Pattern;
use crate::report::{Report, Row};
use crate::stats::{Samples, bytes, digits, grouped, millions, time};
use support::cluster::sidecar::{channel_with, connect, connector};

/// The call of the Kubernetes API.
pub const DELTA: &str = "/snapshotmetadata.SnapshotMetadata/GetMetadataDelta";

const PER_MESSAGE: [i32; 2] = [256, 4096];
/// Answers at once.
const MANY: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Client {
    /// HTTP/2 and nothing above it.
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

/// A way to the answer.
struct Way {
    /// The sidecar's process, if it leads through one.
    process: Option<u32>,
    door: Door,
    channel: Channel,
    call: &'static str,
}

enum Door {
    Socket(PathBuf),
    Tls(TlsConnector, u16),
}

/// What the runs of a way took.
#[derive(Debug, Default)]
struct Spent {
    times: Vec<f64>,
    /// Seconds of processor time: driver, sidecar, client.
    cpu: [Vec<f64>; 3],
}

impl Spent {
    fn rates(&self, extents: u64) -> Samples {
        self.times.iter().map(|seconds| extents as f64 / seconds).collect()
    }

    fn cpu(&self, of: usize) -> f64 {
        self.cpu[of].iter().copied().collect::<Samples>().median()
    }

    /// Where the time goes.
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
    let ours = rig.sidecar(Whose::Ours, &[])?;
    let released =
        rig.sidecar(Whose::Released, &["-kube-api-qps=100000", "-kube-api-burst=100000"])?;
    thread::sleep(Duration::from_millis(options.pick(2000, 200)));
    let idle = [&ours, &released].map(|one| kernel::memory(one.pid(), "status", "VmRSS"));
    let [idle, released_idle] = idle;
    let row = Row::said("sidecar", "memory of the sidecar, idle", bytes(idle?));
    report.row(row.against(format!("released sidecar: {}", bytes(released_idle?)), None));
    let ways = [Way::direct(rig)?, Way::through(rig, &ours), Way::through(rig, &released)];
    for client in [Client::Raw, Client::Decoding] {
        for max in PER_MESSAGE {
            let requests = requests(rig, max);
            // Once, to see that the answers are right; and what is slow the first time is not measured.
            for (way, request) in ways.iter().zip(&requests) {
                let taken = rig.driver.runtime.block_on(way.whole(request))?;
                taken.check(Pattern::new(extents).bytes(), max as usize)?;
            }
            let runs = options.pick(11, 1);
            let spent = in_turn(rig, &ways, &requests, client, extents, runs)?;
            tell(report, client, max, extents, &spent);
        }
    }
    checks(options, report, rig, &ours, extents)?;
    let streams = options.pick(MANY, 4);
    for count in [1, streams] {
        // So long that all of them run beside each other, and not longer than it takes.
        let each = extents / options.pick(20, 4);
        let [of_ours, of_released] =
            [&ours, &released].map(|one| memory(rig, one, count, extents, each));
        let what = match count {
            1 => "memory of the sidecar, 1 stream, the most".to_owned(),
            many => format!("memory of the sidecar, {many} streams at once, the most"),
        };
        let row = Row::said("sidecar", what, bytes(of_ours?));
        report.row(row.against(format!("released sidecar: {}", bytes(of_released?)), None));
    }
    drop(ways);
    rig.settle(Duration::from_millis(100));
    Ok(())
}

/// The request for each way. Encoded: they are of different types.
fn requests(rig: &Rig<'_>, max: i32) -> [RawMessage; 3] {
    let direct = csi::GetMetadataDeltaRequest {
        base_snapshot_id: rig.base.clone(),
        target_snapshot_id: rig.target.clone(),
        max_results: max,
        ..Default::default()
    };
    let mut through = rig.delta(&rig.token(), &rig.base, "target");
    through.max_results = max;
    let through = RawMessage::of(&through);
    [RawMessage::of(&direct), through.clone(), through]
}

/// What `--check-streams` costs: a sidecar with it beside one without.
fn checks(
    options: Options,
    report: &mut Report,
    rig: &Rig<'_>,
    plain: &Sidecar,
    extents: u64,
) -> Result<()> {
    let checking = rig.sidecar(Whose::Ours, &["--check-streams"])?;
    let ways = [Way::through(rig, plain), Way::through(rig, &checking)];
    for max in PER_MESSAGE {
        let [_, one, other] = requests(rig, max);
        let requests = [one, other];
        // The first answer is slower.
        in_turn(rig, &ways, &requests, Client::Raw, extents, 1)?;
        let runs = options.pick(11, 1);
        let [plain, checked] = in_turn(rig, &ways, &requests, Client::Raw, extents, runs)?;
        let shares = plain.times.iter().zip(&checked.times).map(|(plain, checked)| plain / checked);
        let what = format!(
            "through the sidecar with --check-streams, {} extents, {} a message, {}",
            grouped(extents as i64),
            grouped(max.into()),
            Client::Raw.what()
        );
        let rates = checked.rates(extents);
        let row = Row::samples("sidecar", what, &rates, "extents per second", millions);
        let peer = format!("without: {}", millions(plain.rates(extents).median()));
        let mut row = row.against(peer, shares.collect::<Samples>().median());
        row.cpu_seconds = Some(checked.cpu(1));
        report.row(row);
    }
    Ok(())
}

/// All ways once in each round.
fn in_turn<const WAYS: usize>(
    rig: &Rig<'_>,
    ways: &[Way; WAYS],
    requests: &[RawMessage; WAYS],
    client: Client,
    extents: u64,
    rounds: usize,
) -> Result<[Spent; WAYS]> {
    let mut spent = std::array::from_fn(|_| Spent::default());
    for _ in 0..rounds {
        for ((way, request), spent) in ways.iter().zip(requests).zip(&mut spent) {
            let clocks = [
                Some(rig.driver.cpu()?),
                way.process.map(CpuClock::of).transpose()?,
                Some(CpuClock::own()),
            ];
            let now = || clocks.map(|clock| clock.map(CpuClock::now).unwrap_or_default());
            let before = now();
            let took = rig.driver.runtime.block_on(async {
                match client {
                    Client::Raw => way.frames(request, drop).await.map(|taken| taken.whole),
                    Client::Decoding => way.decoded(request, extents).await,
                }
            })?;
            let after = now();
            spent.times.push(took.as_secs_f64());
            for of in 0..clocks.len() {
                spent.cpu[of].push((after[of] - before[of]).as_secs_f64());
            }
        }
    }
    Ok(spent)
}

fn tell(report: &mut Report, client: Client, max: i32, extents: u64, spent: &[Spent; 3]) {
    let [direct, ours, released] = spent;
    let rates = spent.each_ref().map(|spent| spent.rates(extents));
    let [straight, _, of_released] = rates.each_ref().map(Samples::median);
    let of = format!(
        "{} extents, {} a message, {}",
        grouped(extents as i64),
        grouped(max.into()),
        client.what()
    );
    // Of each round, in which whoever else uses the machine disturbs all ways alike.
    let shares = direct.times.iter().zip(&ours.times).map(|(straight, ours)| straight / ours);
    let share = shares.collect::<Samples>().median();
    let what = format!("through the sidecar over TLS, {of}");
    let row = Row::samples("sidecar", what, &rates[1], "extents per second", millions);
    let peer = format!(
        "straight from the driver: {}; through the released sidecar: {}",
        millions(straight),
        millions(of_released)
    );
    let mut row = row.against(peer, share).must("0.85 of straight", share >= 0.85);
    row.cpu_seconds = Some(ours.cpu(1));
    report.row(row);
    let per_million = [ours, released].map(|spent| spent.cpu(1) * 1e6 / extents as f64);
    let fewer = per_million[1] / per_million[0];
    let what = format!(
        "CPU of the sidecar per million extents, {} a message, {}",
        grouped(max.into()),
        client.what()
    );
    let row = Row::said("sidecar", what, time(per_million[0]));
    let peer = format!("released sidecar: {}", time(per_million[1]));
    report.row(row.against(peer, fewer).must("10 times fewer", fewer >= 10.0));
    report.note(format!(
        "{of}, straight: {}; through the sidecar: {}",
        direct.split(),
        ours.split()
    ));
}

impl Way {
    fn direct(rig: &Rig<'_>) -> Result<Self> {
        let door = Door::Socket(rig.driver.socket());
        Ok(Self { process: None, door, channel: rig.driver.channel()?, call: raw::DELTA })
    }

    fn through(rig: &Rig<'_>, sidecar: &Sidecar) -> Self {
        let port = sidecar.served.port;
        let _inside = rig.driver.runtime.enter();
        let channel = channel_with(endpoint(), port, &rig.trusted());
        let door = Door::Tls(connector(&rig.trusted()), port);
        Self { process: Some(sidecar.pid()), door, channel, call: DELTA }
    }

    async fn frames(
        &self,
        request: &RawMessage,
        each: impl FnMut(tonic::codegen::Bytes),
    ) -> Result<Taken> {
        match &self.door {
            Door::Socket(socket) => {
                let stream = UnixStream::connect(socket).await?;
                raw::take_from(stream, self.call, request, each).await
            }
            Door::Tls(trusting, port) => {
                let stream = connect(trusting, *port).await?;
                raw::take_from(stream, self.call, request, each).await
            }
        }
    }

    async fn whole(&self, request: &RawMessage) -> Result<Taken> {
        let mut frames = Vec::new();
        let taken = self.frames(request, |frame| frames.push(frame)).await?;
        Ok(Taken { frames, ..taken })
    }

    async fn decoded(&self, request: &RawMessage, extents: u64) -> Result<Duration> {
        let begun = Instant::now();
        let found = decode(self.channel.clone(), self.call, request.clone()).await?;
        ensure!(found == extents, "{found} extents of {extents}");
        Ok(begun.elapsed())
    }
}

/// Asks and decodes all of the answer, whose messages are the same in CSI and in Kubernetes; returns the number of
/// extents.
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

/// The most that a sidecar has resident while so many clients, each on a connection of its own, take the last `each`
/// extents, in bytes.
fn memory(rig: &Rig<'_>, sidecar: &Sidecar, count: usize, extents: u64, each: u64) -> Result<u64> {
    let way = Way::through(rig, sidecar);
    let offset =
        Pattern::new(extents).bytes().nth((extents - each) as usize).context("an extent")?.0;
    let mut request = rig.delta(&rig.token(), &rig.base, "target");
    (request.starting_offset, request.max_results) = (offset as i64, 4096);
    let request = RawMessage::of(&request);
    kernel::reset_peak(sidecar.pid())?;
    rig.driver.runtime.block_on(async {
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..count {
            let Door::Tls(trusting, port) = &way.door else { continue };
            let (trusting, port, request) = (trusting.clone(), *port, request.clone());
            all.spawn(async move {
                let stream = connect(&trusting, port).await?;
                raw::take_from(stream, DELTA, &request, drop).await
            });
        }
        all.join_all().await.into_iter().try_for_each(|taken| taken.map(drop))
    })?;
    kernel::memory(sidecar.pid(), "status", "VmHWM")
}
