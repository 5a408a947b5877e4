//! `snapshot verify`: every byte outside of a listing compared with the base, or with zeros.
//! Without devices it restores the snapshots to temporary volumes through CSI, on the driver's
//! node, as root. With `--target` and `--source` it reads devices that hold the data already, which
//! works with every driver, through its socket or through Kubernetes.

mod report;

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use tokio::sync::mpsc;

use super::block_map::{BlockMap, Consumer, Query, Source, Window, clip};
use super::cluster::{self, ClusterArgs};
use super::compare::{Comparison, Sample, Side, compare};
use super::connection::Connection;
use super::scratch::{self, Scratch};
use super::stop::Stop;
use super::{Options, format, names, progress};
use grpc::proto::csi::v1 as csi;
use report::Report;
use storage::Extent;
use telemetry::task;

/// Messages of the listing to buffer while the devices are read.
const MESSAGES: usize = 4;

/// Heading of these flags in `--help`.
const HEADING: &str = "Comparison";

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Snapshot to verify, or the earlier one if TARGET follows
    #[arg(value_name = "BASE")]
    first: String,
    /// Later snapshot, whose changes since BASE are verified
    target: Option<String>,
    /// Compare this share of the volume, in percent, chosen at random
    #[arg(long, value_parser = percent, value_name = "PERCENT", help_heading = HEADING)]
    sample: Option<u16>,
    /// Device with the data of BASE, instead of a temporary volume
    #[arg(long = "source", requires = "target_device", value_name = "DEV", help_heading = HEADING)]
    source_device: Option<PathBuf>,
    /// Device with the data of TARGET, instead of a temporary volume
    #[arg(long = "target", id = "target_device", value_name = "DEV", help_heading = HEADING)]
    target_device: Option<PathBuf>,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// A percentage above 0, in hundredths of a percent.
fn percent(text: &str) -> Result<u16, String> {
    let wrong = || format!("{text:?} is not a percentage from 0.01 to 100");
    let value: f64 = text.strip_suffix('%').unwrap_or(text).parse().map_err(|_| wrong())?;
    let hundredths = (value * 100.0).round();
    if !(1.0..=10_000.0).contains(&hundredths) {
        return Err(wrong());
    }
    // Within the range of u16.
    Ok(hundredths as u16)
}

/// The snapshots to verify, by name or id.
#[derive(Debug, Clone)]
struct Subject {
    /// `None`: the allocated blocks of the target are verified.
    base: Option<String>,
    target: String,
}

impl Subject {
    fn query(&self) -> Query {
        match &self.base {
            Some(base) => Query::Delta { base: base.clone(), target: self.target.clone() },
            None => Query::Allocated { snapshot: self.target.clone() },
        }
    }
}

pub async fn run(options: &Options, args: VerifyArgs) -> Result<ExitCode> {
    let start = Instant::now();
    let VerifyArgs { first, target, sample, source_device, target_device, cluster } = args;
    let subject = match target {
        Some(target) => Subject { base: Some(first), target },
        None => Subject { base: None, target: first },
    };
    let seed = getrandom::u64().map_err(|error| anyhow!("{error}"))?;
    let sample = Sample { share: sample, seed };
    // A volume of any size may be verified.
    let options = &options.per_call();
    let devices = Devices::of(source_device, target_device, &subject)?;
    let verified = match devices {
        Some(devices) => {
            // Nothing needs to be undone, so a signal ends the process.
            let stop = Stop::without_signals(options);
            let proof = Proof { devices, sample, stop, size: None };
            let _shown = progress::start("comparing", options.print.quiet);
            with_devices(options, cluster, subject, proof).await?
        }
        None => {
            ensure!(
                !cluster.is_requested(),
                "--namespace needs the data of the snapshots: restore each to a PersistentVolumeClaim in Block mode, and \
                 set --target DEV, and --source DEV for BASE"
            );
            let stop = Stop::listen(options)?;
            let _shown = progress::start("comparing", options.print.quiet);
            let connection = stop.wait(options.connect(stop.deadline())).await?;
            verify(&connection, &stop, &subject, sample).await?
        }
    };
    let result = Report::new(&verified, sample, start.elapsed());
    format::print_one(options.print.output, &result, Report::text)?;
    verified.cleaned?;
    Ok(if verified.comparison.proven() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A complete comparison.
struct Verified {
    subject: Subject,
    comparison: Comparison,
    /// The error names what remains.
    cleaned: Result<()>,
}

/// Devices that hold the data of the snapshots.
#[derive(Debug, Clone)]
struct Devices {
    /// `None` for zeros.
    base: Option<PathBuf>,
    target: PathBuf,
}

impl Devices {
    fn of(
        source: Option<PathBuf>,
        target: Option<PathBuf>,
        subject: &Subject,
    ) -> Result<Option<Self>> {
        let Some(target) = target else { return Ok(None) };
        match (&subject.base, &source) {
            (Some(base), None) => {
                bail!("--source DEV is missing: the device with the data of {base:?}")
            }
            (None, Some(_)) => {
                bail!("--source requires BASE: without it, TARGET is compared with zeros")
            }
            _ => Ok(Some(Self { base: source, target })),
        }
    }
}

async fn with_devices(
    options: &Options,
    cluster: ClusterArgs,
    mut subject: Subject,
    proof: Proof,
) -> Result<Verified> {
    let comparison = match cluster.is_requested() {
        true => cluster::list(options, cluster, subject.query(), Window::default(), proof).await?,
        false => {
            let connection = options.connect(options.deadline()).await?;
            let base = match &subject.base {
                Some(base) => Some(names::subject(&connection, base).await?),
                None => None,
            };
            let target = names::subject(&connection, &subject.target).await?;
            subject.base = base.as_ref().map(|base| base.id().to_owned());
            subject.target = target.id().to_owned();
            let window = Window::default();
            let map = names::listing(&connection, base.as_ref(), &target, window).await?;
            proof.consume(map).await?
        }
    };
    Ok(Verified { subject, comparison, cleaned: Ok(()) })
}

/// Verifies by temporary volumes. The clean-up is complete when this returns, whatever the outcome.
async fn verify(
    connection: &Connection,
    stop: &Stop,
    subject: &Subject,
    sample: Sample,
) -> Result<Verified> {
    for leftover in scratch::remove_leftovers(connection, &std::env::temp_dir()).await? {
        progress::note(&leftover);
    }
    let base = match &subject.base {
        Some(base) => Some(stop.wait(snapshot(connection, base)).await?),
        None => None,
    };
    let target = stop.wait(snapshot(connection, &subject.target)).await?;
    let subject = Subject {
        base: base.as_ref().map(|base| base.snapshot_id.clone()),
        target: target.snapshot_id.clone(),
    };
    // First: what the driver refuses to list needs no volumes.
    let (from, to) = (base.as_ref().map(names::Subject::of), names::Subject::of(&target));
    let map = names::listing(connection, from.as_ref(), &to, Window::default());
    let map = stop.wait(map).await?;

    let mut scratch = Scratch::new(&std::env::temp_dir())?;
    let snapshots = (base.as_ref(), &target);
    let outcome = prove(connection, stop, &mut scratch, snapshots, map, sample).await;
    match (outcome, scratch.clean(connection).await) {
        (Ok(comparison), cleaned) => Ok(Verified { subject, comparison, cleaned }),
        (Err(error), Ok(())) => Err(error),
        (Err(error), Err(remaining)) => Err(anyhow!("{error:#}; {remaining:#}")),
    }
}

async fn snapshot(connection: &Connection, reference: &str) -> Result<csi::Snapshot> {
    names::find_snapshot(connection, reference).await?.with_context(|| {
        format!(
            "no snapshot {reference:?}: the comparison reads its data, so it must exist; --source and --target \
             accept devices instead"
        )
    })
}

async fn prove<S: Source>(
    connection: &Connection,
    stop: &Stop,
    scratch: &mut Scratch,
    (base, target): (Option<&csi::Snapshot>, &csi::Snapshot),
    map: BlockMap<S>,
    sample: Sample,
) -> Result<Comparison> {
    let size = names::size(target);
    if size.is_some() && base.is_some_and(|base| base.size_bytes > target.size_bytes) {
        bail!("BASE is larger than TARGET, but volumes only grow: swap the two");
    }
    let base = match base {
        Some(base) => Some(scratch.attach(connection, stop, base).await?),
        None => None,
    };
    let target = scratch.attach(connection, stop, target).await?;
    let devices = Devices { base, target };
    Proof { devices, sample, stop: stop.clone(), size }.consume(map).await
}

/// Compares devices while a listing arrives.
struct Proof {
    devices: Devices,
    sample: Sample,
    stop: Stop,
    /// Bytes of the target, if known; the listing must not be of a smaller volume.
    size: Option<u64>,
}

impl Consumer for Proof {
    type Output = Comparison;

    async fn consume<S: Source>(self, mut map: BlockMap<S>) -> Result<Comparison> {
        let Self { devices, sample, stop, size } = self;
        let first = stop.wait(map.next()).await?;
        let size = size.or(map.size());
        let listed = map.shape().and_then(|shape| shape.capacity_bytes);
        let capacity = match size.or(listed) {
            Some(capacity) => capacity,
            // Of an empty listing; the device has the data of the snapshot.
            None => open(&devices.target)?.1,
        };
        // A volume may have grown after the snapshot, and some drivers list its capacity.
        if let Some(listed) = listed.filter(|listed| *listed < capacity) {
            bail!(
                "the listing has a capacity of {listed} bytes, which is not the target's size, {capacity} bytes"
            );
        }
        let (sender, receiver) = mpsc::channel(MESSAGES);
        let reading = task::blocking({
            let stop = stop.clone();
            move || read(&devices, capacity, Received::new(receiver), sample, &stop)
        });
        let sent = send(first, &mut map, capacity, &stop, sender).await;
        // Awaited in any case: the devices must be closed before the volumes are removed.
        let compared = reading.await.context("the comparison panicked")?;
        sent?;
        compared
    }
}

fn read(
    devices: &Devices,
    capacity: u64,
    listing: Received,
    sample: Sample,
    stop: &Stop,
) -> Result<Comparison> {
    let (target, size) = open(&devices.target)?;
    ensure!(
        size >= capacity,
        "{} has {size} bytes, but the snapshot has {capacity}: it holds other data",
        devices.target.display()
    );
    let target = Side::new(target, capacity);
    let base = match &devices.base {
        Some(path) => {
            let (file, size) = open(path)?;
            // A device may be larger than the snapshot that was restored to it.
            Side::new(file, size.min(capacity))
        }
        None => Side::zeros(),
    };
    let found = compare(&base, &target, listing, sample, |offset, compared| {
        progress::report_data(compared, offset, capacity);
        stop.check()
    })?;
    Ok(found)
}

fn open(path: &Path) -> Result<(File, u64)> {
    let named = || format!("open {}", path.display());
    let mut file = File::open(path).with_context(named)?;
    let size = file.seek(SeekFrom::End(0)).with_context(named)?;
    Ok((file, size))
}

/// A part of the listing on its way to the comparison.
enum Part {
    Extents(Vec<Extent>),
    /// Explicit, because a channel that closes means a broken listing.
    End,
}

/// Sends the listing as fast as it is used. A receiver that has ended reports its own error.
async fn send<S: Source>(
    first: Option<Vec<Extent>>,
    map: &mut BlockMap<S>,
    capacity: u64,
    stop: &Stop,
    sender: mpsc::Sender<Part>,
) -> Result<()> {
    let mut next = first;
    loop {
        let part = next.map_or(Part::End, |extents| Part::Extents(clip(extents, capacity)));
        let last = matches!(part, Part::End);
        // Without a time limit: the receiver reads devices meanwhile.
        let sent = stop.whole(async { Ok(sender.send(part).await) }).await?;
        if last || sent.is_err() {
            return Ok(());
        }
        next = stop.wait(map.next()).await?;
    }
}

/// The listing as an iterator, for the thread of the comparison.
struct Received {
    receiver: mpsc::Receiver<Part>,
    extents: std::vec::IntoIter<Extent>,
    ended: bool,
}

impl Received {
    fn new(receiver: mpsc::Receiver<Part>) -> Self {
        Self { receiver, extents: Vec::new().into_iter(), ended: false }
    }
}

impl Iterator for Received {
    type Item = Result<Extent>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(extent) = self.extents.next() {
                return Some(Ok(extent));
            }
            if self.ended {
                return None;
            }
            match self.receiver.blocking_recv() {
                Some(Part::Extents(extents)) => self.extents = extents.into_iter(),
                Some(Part::End) => self.ended = true,
                None => return Some(Err(anyhow!("the listing broke"))),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tonic::Code;

    use super::super::fake_driver::Fake;
    use super::*;

    #[test]
    fn a_listing_that_breaks_is_an_error_of_the_comparison() {
        let extent = Extent { offset: 0, length: 4096 };
        let (sender, receiver) = mpsc::channel(2);
        sender.try_send(Part::Extents(vec![extent])).ok().unwrap();
        drop(sender);
        let mut received = Received::new(receiver);
        assert_eq!(received.next().unwrap().unwrap(), extent);
        assert!(received.next().unwrap().is_err());

        let (sender, receiver) = mpsc::channel(2);
        sender.try_send(Part::Extents(vec![extent])).ok().unwrap();
        sender.try_send(Part::End).ok().unwrap();
        let received: Result<Vec<_>> = Received::new(receiver).collect();
        assert_eq!(received.unwrap(), [extent]);
    }

    #[test]
    fn a_percentage_has_two_decimals() {
        assert_eq!((percent("5"), percent("0.01"), percent("100%")), (Ok(500), Ok(1), Ok(10_000)));
        for wrong in ["", "0", "0.001", "100.1", "-1", "NaN", "inf", "x"] {
            assert!(percent(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn devices_must_match_the_snapshots() {
        let device = || Some(PathBuf::from("/dev/x"));
        let subject =
            |base: Option<&str>| Subject { base: base.map(str::to_owned), target: "t".to_owned() };
        let of = |source, target, base| Devices::of(source, target, &subject(base));
        assert!(of(None, None, Some("b")).unwrap().is_none());
        assert!(of(device(), device(), Some("b")).unwrap().is_some());
        assert!(of(None, device(), None).unwrap().is_some());
        let error = of(None, device(), Some("b")).unwrap_err().to_string();
        assert!(error.contains("--source DEV is missing"), "{error}");
        assert!(of(device(), device(), None).is_err());
    }

    /// A driver with the images of snapshots `a` and `b`, in blocks, and the delta that it reports.
    fn driver(a: &[u8], b: &[u8], delta: &[(i64, i64)]) -> Fake {
        let image = |blocks: &[u8]| blocks.iter().map(|value| [*value; 4096]).collect::<Vec<_>>();
        Fake::new([("a", image(a).concat()), ("b", image(b).concat())], delta)
    }

    async fn check(fake: &Fake, stop: &Stop) -> Result<Verified> {
        let server = fake.serve();
        let subject = Subject { base: Some("a".to_owned()), target: "b".to_owned() };
        let connection = Connection::open(&server.endpoint, stop.deadline()).await?;
        let verified = verify(&connection, stop, &subject, Sample::default()).await;
        fake.assert_nothing_left();
        verified
    }

    fn minutes() -> Stop {
        Stop::unsignalled(Duration::from_secs(120))
    }

    #[tokio::test]
    async fn a_true_delta_is_proven_and_a_false_one_refuted() {
        let fake = driver(&[1, 1, 1], &[1, 2, 1, 3], &[(4096, 8192), (12288, 4096)]);
        let found = check(&fake, &minutes()).await.unwrap();
        found.cleaned.unwrap();
        assert!(found.comparison.proven());
        assert_eq!((found.comparison.reported, found.comparison.differing), (3, 2));

        let fake = driver(&[1, 1, 1], &[1, 2, 1, 3], &[(4096, 8192)]);
        let found = check(&fake, &minutes()).await.unwrap().comparison;
        assert_eq!((found.proven(), found.missed_at), (false, vec![12288]));
    }

    #[tokio::test]
    async fn whichever_call_fails_or_is_interrupted_nothing_remains() {
        for call in ["create_volume", "node_stage_volume", "node_publish_volume"] {
            for nth in [1, 2] {
                // The call succeeds and its response is lost; the call is refused.
                for code in [Code::Unavailable, Code::FailedPrecondition] {
                    let fake = driver(&[1], &[2], &[(0, 4096)]);
                    fake.fail(call, nth, code);
                    let error = check(&fake, &minutes()).await.err().unwrap();
                    assert!(format!("{error:#}").contains("injected"), "{call} {nth}: {error:#}");
                }
                let (signal, stop) = Stop::by_hand(Duration::from_secs(120));
                let fake = driver(&[1], &[2], &[(0, 4096)]);
                fake.signal_at(call, nth, signal);
                let error = check(&fake, &stop).await.err().unwrap();
                assert_eq!(error.to_string(), "interrupted", "{call} {nth}");
            }
        }
    }

    #[tokio::test]
    async fn an_undo_that_fails_at_first_is_retried() {
        for call in ["node_unpublish_volume", "node_unstage_volume", "delete_volume"] {
            let fake = driver(&[1], &[2], &[(0, 4096)]);
            fake.fail(call, 1, Code::Aborted);
            check(&fake, &minutes()).await.unwrap().cleaned.unwrap();
        }
    }

    #[tokio::test]
    async fn a_broken_delta_and_one_of_another_size_prove_nothing() {
        let broken = driver(&[1], &[2], &[(0, 4096)]);
        broken.fail("stream", 1, Code::Internal);
        let short = driver(&[1, 1], &[1, 1], &[(0, 4096)]);
        short.claim_capacity(4096);
        for (fake, why) in [(broken, "INTERNAL: injected"), (short, "not the target's size")] {
            let error = check(&fake, &minutes()).await.err().unwrap();
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
