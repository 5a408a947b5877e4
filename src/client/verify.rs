//! `snapshot verify`: both snapshots restored to temporary volumes through CSI alone, and every byte
//! of them compared beside the delta that the driver reports. It runs on the driver's node, in its
//! mount namespace, as root.

use std::fs::File;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::json;
use tokio::sync::mpsc;

use super::block_map::{BlockMap, Query, Window};
use super::compare::{Comparison, Side, compare};
use super::connection::Connection;
use super::scratch::Scratch;
use super::stop::Stop;
use super::{Options, Output, format, names};
use crate::backend::{BLOCK_SIZE, Extent};
use crate::proto::csi::v1 as csi;
use crate::quantity;

/// How long the clean-up may take, whatever is left of `--timeout`.
const CLEAN_UP: Duration = Duration::from_secs(60);

/// Messages of the delta to hold while the devices are being read.
const MESSAGES: usize = 4;

pub async fn run(options: &Options, base: &str, target: &str) -> Result<ExitCode> {
    let start = Instant::now();
    let stop = Stop::listen(options.timeout)?;
    let connection = stop.wait(Connection::open(&options.endpoint, stop.deadline())).await?;
    let base = stop.wait(snapshot(&connection, base)).await?;
    let target = stop.wait(snapshot(&connection, target)).await?;
    let query = Query::Delta { base: base.snapshot_id.clone(), target: target.snapshot_id.clone() };
    // First of all: what the driver refuses to answer needs no volumes.
    let delta = stop.wait(BlockMap::open(&connection, query, Window::default())).await?;

    let mut scratch = Scratch::new()?;
    let outcome = prove(&connection, &stop, &mut scratch, [&base, &target], delta).await;
    let bounded = connection.until(tokio::time::Instant::now() + CLEAN_UP);
    let cleaned = scratch.clean(&bounded).await;
    let comparison = match (outcome, cleaned) {
        (Ok(comparison), cleaned) => {
            report(options.output, [&base, &target], &comparison, start.elapsed())?;
            cleaned?;
            comparison
        }
        (Err(error), Ok(())) => return Err(error),
        (Err(error), Err(left)) => return Err(anyhow!("{error:#}; {left:#}")),
    };
    Ok(if comparison.proven() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
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
    mut delta: BlockMap,
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
        Some(shape) if shape.capacity_bytes == sizes[1] => Ok(comparison),
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
async fn send(delta: &mut BlockMap, stop: &Stop, sender: mpsc::Sender<Part>) -> Result<()> {
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

fn report(
    output: Output,
    [base, target]: [&csi::Snapshot; 2],
    comparison: &Comparison,
    time: Duration,
) -> Result<()> {
    match output {
        Output::Table => Ok(format::print(&shown(comparison, time))?),
        Output::Json => format::print_json(&json!({
            "base_snapshot_id": base.snapshot_id,
            "target_snapshot_id": target.snapshot_id,
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
}
