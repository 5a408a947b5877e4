//! `snapshot verify`: both snapshots restored to temporary volumes through CSI alone, and every byte
//! of them compared beside the delta that the driver reports. It runs on the driver's node, in its
//! mount namespace, as root.

use std::fs::File;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::json;
use tokio::sync::mpsc;

use super::block_map::{BlockMap, Driver, Query, Window};
use super::compare::{Comparison, Side, compare};
use super::connection::Connection;
use super::scratch::Scratch;
use super::stop::Stop;
use super::{Options, Output, format, names};
use crate::backend::{BLOCK_SIZE, Extent};
use crate::grpc::SocketPath;
use crate::proto::csi::v1 as csi;
use crate::quantity;

/// How long the clean-up may take, whatever is left of `--timeout`.
const CLEAN_UP: Duration = Duration::from_secs(60);

/// Messages of the delta to hold while the devices are being read.
const MESSAGES: usize = 4;

pub async fn run(options: &Options, base: &str, target: &str) -> Result<ExitCode> {
    let start = Instant::now();
    let stop = Stop::listen(options.timeout)?;
    let verified = verify(&options.endpoint()?, &stop, base, target).await?;
    report(options.output, &verified, start.elapsed())?;
    verified.cleaned?;
    Ok(if verified.comparison.proven() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A comparison that was carried through.
struct Verified {
    base_id: String,
    target_id: String,
    comparison: Comparison,
    /// The error says what is left behind.
    cleaned: Result<()>,
}

/// Whatever the outcome, the clean-up has been done when this returns.
async fn verify(endpoint: &SocketPath, stop: &Stop, base: &str, target: &str) -> Result<Verified> {
    let connection = stop.wait(Connection::open(endpoint, stop.deadline())).await?;
    let base = stop.wait(snapshot(&connection, base)).await?;
    let target = stop.wait(snapshot(&connection, target)).await?;
    let query = Query::Delta { base: base.snapshot_id.clone(), target: target.snapshot_id.clone() };
    // First of all: what the driver refuses to answer needs no volumes.
    let delta = stop.wait(BlockMap::open(&connection, query, Window::default())).await?;

    let mut scratch = Scratch::new()?;
    let outcome = prove(&connection, stop, &mut scratch, [&base, &target], delta).await;
    let bounded = connection.until(tokio::time::Instant::now() + CLEAN_UP);
    match (outcome, scratch.clean(&bounded).await) {
        (Ok(comparison), cleaned) => Ok(Verified {
            base_id: base.snapshot_id,
            target_id: target.snapshot_id,
            comparison,
            cleaned,
        }),
        (Err(error), Ok(())) => Err(error),
        (Err(error), Err(left)) => Err(anyhow!("{error:#}; {left:#}")),
    }
}

async fn snapshot(connection: &Connection, reference: &str) -> Result<csi::Snapshot> {
    names::find_snapshot(connection, reference).await?.with_context(|| {
        format!("no snapshot {reference:?}; the data of both is needed, so neither may be deleted")
    })
}

async fn prove(
    connection: &Connection,
    stop: &Stop,
    scratch: &mut Scratch,
    [base, target]: [&csi::Snapshot; 2],
    mut delta: BlockMap<Driver>,
) -> Result<Comparison> {
    let sizes = [u64::try_from(base.size_bytes)?, u64::try_from(target.size_bytes)?];
    if sizes[0] > sizes[1] {
        bail!("the base is larger than the target, and volumes only grow");
    }
    let base = scratch.attach(connection, stop, base).await?;
    let target = scratch.attach(connection, stop, target).await?;

    let (sender, receiver) = mpsc::channel(MESSAGES);
    let reading = tokio::task::spawn_blocking({
        let stop = stop.clone();
        move || {
            let open = |path| File::open(path).context("open the device of a temporary volume");
            let base = Side { source: open(base)?, bytes: sizes[0] };
            let target = Side { source: open(target)?, bytes: sizes[1] };
            compare(base, target, Received::new(receiver), || stop.check())
        }
    });
    let sent = send(&mut delta, stop, sender).await;
    // Awaited in any case: the devices must be closed before the volumes can be taken away.
    let compared = reading.await.context("the comparison panicked")?;
    sent?;
    let comparison = compared?;
    match delta.shape() {
        Some(shape) if shape.capacity_bytes == Some(sizes[1]) => Ok(comparison),
        _ => bail!("the delta is not of the target's size, {} bytes", sizes[1]),
    }
}

/// A part of the delta on its way to the comparison.
enum Part {
    Extents(Vec<Extent>),
    /// Said, not implied: a channel that just closes is a delta that broke.
    End,
}

/// Passes the delta on as fast as it is used. A receiver that is gone has an error of its own.
async fn send(delta: &mut BlockMap<Driver>, stop: &Stop, sender: mpsc::Sender<Part>) -> Result<()> {
    loop {
        let part = match stop.wait(delta.next()).await? {
            Some(extents) => Part::Extents(extents),
            None => Part::End,
        };
        let last = matches!(part, Part::End);
        let sent = stop.wait(async { Ok(sender.send(part).await) }).await?;
        if last || sent.is_err() {
            return Ok(());
        }
    }
}

/// The delta as the comparison takes it, on its own thread.
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
                None => return Some(Err(anyhow!("the delta broke off"))),
            }
        }
    }
}

fn report(output: Output, verified: &Verified, time: Duration) -> Result<()> {
    let Verified { base_id, target_id, comparison, cleaned: _ } = verified;
    match output {
        Output::Table => Ok(format::print(&shown(comparison, time))?),
        Output::Json => format::print_json(&json!({
            "base_snapshot_id": base_id,
            "target_snapshot_id": target_id,
            "proven": comparison.proven(),
            "compared_bytes": comparison.bytes,
            "reported_blocks": comparison.reported,
            "differing_blocks": comparison.differing,
            "missed_blocks": comparison.missed,
            "first_missed_offsets": comparison.missed_at,
            "block_bytes": BLOCK_SIZE,
            "seconds": time.as_secs_f64(),
        })),
    }
}

fn shown(comparison: &Comparison, time: Duration) -> String {
    let Comparison { bytes, reported, differing, missed, missed_at } = comparison;
    let blocks = |count: u64| {
        format!(
            "{} blocks of 4 KiB ({})",
            format::grouped(count),
            quantity::format(count * BLOCK_SIZE)
        )
    };
    let precision = match reported {
        0 => "nothing was reported".to_owned(),
        _ => format!("{} of what was reported differs", format::percent(*differing, *reported)),
    };
    let result = if comparison.proven() {
        "proven: the base plus the delta is the target, byte for byte".to_owned()
    } else {
        format!("WRONG: {} differ outside the delta", blocks(*missed))
    };
    let mut text = format::facts(&[
        ("compared", format::bytes(*bytes)),
        ("reported", blocks(*reported)),
        ("differing", blocks(*differing)),
        ("precision", precision),
        ("time", format::took(time)),
        ("result", result),
    ]);
    if !comparison.proven() {
        let offsets: Vec<_> = missed_at.iter().map(u64::to_string).collect();
        text.push_str(&format!("\n\nfirst missed blocks, at byte: {}", offsets.join(", ")));
    }
    text
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::super::fake_driver::Fake;
    use super::*;

    #[test]
    fn a_delta_that_breaks_off_is_an_error_to_the_comparison() {
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
    fn the_report_says_proven_only_when_nothing_was_missed() {
        let mut comparison =
            Comparison { bytes: 1 << 30, reported: 1000, differing: 998, ..Comparison::default() };
        let expected = "\
compared   1Gi (1,073,741,824 bytes)
reported   1,000 blocks of 4 KiB (3.9Mi)
differing  998 blocks of 4 KiB (3.89Mi)
precision  99.8 % of what was reported differs
time       1.500 s
result     proven: the base plus the delta is the target, byte for byte";
        assert_eq!(shown(&comparison, Duration::from_millis(1500)), expected);

        comparison.missed = 2;
        comparison.missed_at = vec![4096, 12288];
        let text = shown(&comparison, Duration::ZERO);
        assert!(!text.contains("proven") && text.ends_with("at byte: 4096, 12288"), "{text}");
    }

    /// The images of snapshots `a` and `b` in blocks, and the delta that the driver reports.
    fn driver(a: &[u8], b: &[u8], delta: &[(i64, i64)]) -> Fake {
        let image = |blocks: &[u8]| blocks.iter().map(|value| [*value; 4096]).collect::<Vec<_>>();
        Fake::new([("a", image(a).concat()), ("b", image(b).concat())], delta)
    }

    async fn check(fake: &Fake, stop: &Stop) -> Result<Verified> {
        let server = fake.serve();
        let verified = verify(&server.endpoint, stop, "a", "b").await;
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
    async fn whatever_call_fails_nothing_is_left() {
        for call in ["create_volume", "node_stage_volume", "node_publish_volume"] {
            for nth in [1, 2] {
                // Done, and the answer lost; and refused.
                for code in [Code::Unavailable, Code::FailedPrecondition] {
                    let fake = driver(&[1], &[2], &[(0, 4096)]);
                    fake.fail(call, nth, code);
                    let error = check(&fake, &minutes()).await.err().unwrap();
                    assert!(format!("{error:#}").contains("injected"), "{call} {nth}: {error:#}");
                }
            }
        }
    }

    #[tokio::test]
    async fn an_undo_that_fails_at_first_is_tried_again() {
        for call in ["node_unpublish_volume", "node_unstage_volume", "delete_volume"] {
            let fake = driver(&[1], &[2], &[(0, 4096)]);
            fake.fail(call, 1, Code::Aborted);
            check(&fake, &minutes()).await.unwrap().cleaned.unwrap();
        }
    }

    #[tokio::test]
    async fn a_delta_that_ends_with_an_error_proves_nothing() {
        let fake = driver(&[1], &[2], &[(0, 4096)]);
        fake.fail("stream", 1, Code::Internal);
        let error = check(&fake, &minutes()).await.err().unwrap();
        assert_eq!(error.to_string(), "INTERNAL: injected");
    }

    #[tokio::test]
    async fn a_delta_of_another_size_proves_nothing() {
        let fake = driver(&[1, 1], &[1, 1], &[(0, 4096)]);
        fake.claim_capacity(4096);
        let error = check(&fake, &minutes()).await.err().unwrap();
        assert!(error.to_string().contains("not of the target's size"), "{error}");
    }

    #[tokio::test]
    async fn an_interrupt_at_any_call_leaves_nothing() {
        for call in ["create_volume", "node_stage_volume", "node_publish_volume"] {
            for nth in [1, 2] {
                let (signal, stop) = Stop::by_hand(Duration::from_secs(120));
                let fake = driver(&[1], &[2], &[(0, 4096)]);
                fake.signal_at(call, nth, signal);
                let error = check(&fake, &stop).await.err().unwrap();
                assert_eq!(error.to_string(), "interrupted", "{call} {nth}");
            }
        }
    }
}
