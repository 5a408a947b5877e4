//! The cost of snapshots for writers: fio on a raw block volume before, right after and a minute
//! after snapshots, on pools with blocks of each size, compared with a plain loop device on the
//! filesystem of TMPDIR and with csi-driver-host-path.

use std::fs::File;
use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use support::random::Random;

use crate::kernel;
use crate::load::{self, Load, LoadResult};
use crate::report::{Report, Row};
use crate::stats::{bytes, digits, grouped, time};
use crate::subject::{KINDS, Kind, Subject};
use crate::{Options, writer};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Pattern {
    /// 4 KiB at random, uniformly distributed.
    Random,
    /// 4 KiB at random, with a hot set.
    Skewed,
    /// The same, with 7 reads to 3 writes.
    Mixed,
    /// 128 KiB in order, with a flush at the end.
    Sequential,
}

/// A load in the life of a volume, and its target.
#[derive(Clone, Copy)]
struct Phase {
    /// Number of snapshots before the phase. Missing ones are taken at its start.
    snapshots: usize,
    what: &'static str,
    pattern: Pattern,
    /// A flush after every 16 writes.
    flushes: bool,
    seconds: u64,
    target: Option<Target>,
}

#[derive(Clone, Copy)]
struct Target {
    what: &'static str,
    least: f64,
    of: Of,
}

/// The reference of a target.
#[derive(Clone, Copy)]
enum Of {
    /// Another phase of the same volume, by number.
    Phase(usize),
    /// The same phase.
    PlainLoop,
}

/// The first phase writes into holes. After it, the volume is filled.
const HOLES: usize = 0;
const BEFORE: usize = 1;
const SKEWED: usize = 3;

const fn cached(snapshots: usize, what: &'static str) -> Phase {
    Phase { snapshots, what, pattern: Pattern::Random, flushes: false, seconds: 5, target: None }
}

const fn flushed(snapshots: usize, pattern: Pattern, what: &'static str) -> Phase {
    Phase { flushes: true, pattern, seconds: 10, ..cached(snapshots, what) }
}

impl Phase {
    const fn must(self, what: &'static str, least: f64, of: Of) -> Self {
        Self { target: Some(Target { what, least, of }), ..self }
    }

    const fn lasting(self, seconds: u64) -> Self {
        Self { seconds, ..self }
    }
}

const PHASES: [Phase; 11] = [
    cached(0, "first writes into a sparse volume"),
    cached(0, "full volume, no snapshot"),
    flushed(0, Pattern::Random, "no snapshot").must(
        "0.8 of a plain loop device",
        0.8,
        Of::PlainLoop,
    ),
    flushed(0, Pattern::Skewed, "no snapshot"),
    flushed(0, Pattern::Mixed, "no snapshot").lasting(5),
    flushed(1, Pattern::Skewed, "10 s after a snapshot").must(
        "0.6 of before",
        0.6,
        Of::Phase(SKEWED),
    ),
    flushed(1, Pattern::Skewed, "the next 50 s").lasting(50),
    flushed(1, Pattern::Skewed, "a minute after").must("0.85 of before", 0.85, Of::Phase(SKEWED)),
    flushed(2, Pattern::Random, "10 s after a second snapshot"),
    flushed(2, Pattern::Mixed, "the next 5 s").lasting(5),
    Phase { pattern: Pattern::Sequential, ..cached(3, "after a third snapshot") }
        .must("0.5 of a plain loop device", 0.5, Of::PlainLoop)
        .lasting(10),
];

/// The phases of a large volume: all blocks are written once, and one
/// snapshot is taken.
const LARGE: [Phase; 4] =
    [PHASES[HOLES], PHASES[BEFORE], cached(1, "10 s after a snapshot"), cached(1, "the next 10 s")];

/// Most writes into a volume that its pool cannot hold as a whole.
const SPARSE_WRITES: u64 = 200_000;

/// Blocks of the writer whose longest stall is measured.
const STALL_BLOCKS: usize = 10_000;

impl Phase {
    fn load(&self, options: Options, operations: u64) -> Load {
        let is_sequential = self.pattern == Pattern::Sequential;
        let (pattern, block_size) = match self.pattern {
            Pattern::Random | Pattern::Skewed => ("randwrite", "4k"),
            Pattern::Mixed => ("randrw", "4k"),
            Pattern::Sequential => ("write", "128k"),
        };
        Load {
            pattern,
            block_size,
            milliseconds: options.pick(1000 * self.seconds, 200),
            operations,
            flush_every: if self.flushes { 16 } else { 0 },
            flushes_at_end: is_sequential,
            is_skewed: matches!(self.pattern, Pattern::Skewed | Pattern::Mixed),
            repeats: false,
        }
    }

    fn name(&self) -> String {
        let load = match self.pattern {
            Pattern::Random => "4 KiB random writes",
            Pattern::Skewed => "4 KiB skewed writes",
            Pattern::Mixed => "4 KiB skewed reads and writes, 7 to 3",
            Pattern::Sequential => "128 KiB sequential writes",
        };
        let flushes = match (self.flushes, self.pattern) {
            (true, _) => "a flush every 16",
            (false, Pattern::Sequential) => "flushed at the end",
            (false, _) => "no flush: a rate of the page cache if the volume uses it",
        };
        format!("{load}, {}, {flushes}", self.what)
    }
}

/// The result of each phase, and of each snapshot.
#[derive(Default)]
struct Life {
    results: Vec<LoadResult>,
    snapshots: Vec<Taken>,
}

/// A snapshot under a writer.
#[derive(Clone, Copy)]
struct Taken {
    /// In seconds.
    took: f64,
    /// The longest write of 4 KiB that overlapped with it, in seconds.
    stall: f64,
}

impl Taken {
    fn text(self) -> String {
        format!("{}, longest stall {}", time(self.took), time(self.stall))
    }
}

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    let size = options.pick(2 << 30, 64 << 20);
    let course = Course { options, phases: &PHASES, size, pool: 6 * size + (1 << 30), most: 0 };
    course.report("writers", &KINDS, report)?;
    report.note(
        "writers, volumes: measured is a volume on a pool with the default block size; queue depth 16, libaio, \
         direct I/O; skewed: zipf 1.1; written: bytes written to the disk per byte of the load; a plain loop device \
         has no snapshots",
    );
    Ok(())
}

/// A volume of 20 GiB, which does not fit into the dirty part of the page cache, and a sparse volume of
/// 200 GiB.
pub fn volumes(options: Options, report: &mut Report) -> Result<()> {
    let size = options.pick(20 << 30, 128 << 20);
    let pool = 2 * size + options.pick(4 << 30, 1 << 30);
    let course = Course { options, phases: &LARGE, size, pool, most: 0 };
    course.report("volumes", &KINDS[..3], report)?;
    let sparse = Course { phases: &LARGE[..1], size: 10 * size, most: SPARSE_WRITES, ..course };
    sparse.report("volumes", &KINDS[..3], report)
}

/// What is measured: the phases of a volume.
#[derive(Clone, Copy)]
struct Course {
    options: Options,
    phases: &'static [Phase],
    /// Size of the volume.
    size: u64,
    /// Size of the pool.
    pool: u64,
    /// Most writes of a phase; 0: no limit.
    most: u64,
}

impl Course {
    fn report(self, row: &'static str, kinds: &[Kind], report: &mut Report) -> Result<()> {
        if !load::is_available() {
            report.row(Row::value(row, "writes after snapshots", "fio is not installed"));
            return Ok(());
        }
        let mut lives = Vec::new();
        for kind in kinds {
            if let Some(subject) = kind.open(self.size, self.pool)? {
                lives.push((*kind, self.live(&subject)?));
            }
        }
        for (number, phase) in self.phases.iter().enumerate() {
            report.row(phase_row(row, number, phase, self.size, &lives));
        }
        for number in 0..lives[0].1.snapshots.len() {
            report.row(snapshot_row(row, number, self.size, &lives));
        }
        Ok(())
    }

    /// Runs the phases on a device, which is filled sequentially after the first phase.
    fn live(self, subject: &Subject) -> Result<Life> {
        let mut life = Life::default();
        for (number, phase) in self.phases.iter().enumerate() {
            if number == HOLES + 1 {
                writer::fill(subject.device(), self.size)?;
            }
            while subject.has_snapshots() && life.snapshots.len() < phase.snapshots {
                let number = life.snapshots.len() + 1;
                life.snapshots.push(self.snapshot(subject, number)?);
            }
            let result = phase.load(self.options, self.most).run(subject.device())?;
            let rate = bytes(result.bytes_per_second as u64);
            println!("    {}: {}, {rate}/s", phase.name(), describe(result));
            life.results.push(result);
        }
        Ok(life)
    }

    fn snapshot(self, subject: &Subject, number: usize) -> Result<Taken> {
        let blocks = Random::new(number as u64).distinct(STALL_BLOCKS, self.size / 4096);
        let stalled = writer::write_during(subject.device(), &blocks, number as u64, || {
            let begun = Instant::now();
            subject.snapshot(&format!("after-{number}"))?;
            Ok(begun.elapsed().as_secs_f64())
        })?;
        let taken = Taken { took: stalled.result, stall: stalled.longest.as_secs_f64() };
        let extents = subject.volume().map(|file| extents(&file)).transpose()?;
        println!("    snapshot {number}: {}, {}", taken.text(), extents.unwrap_or_default());
        Ok(taken)
    }
}

fn extents(file: &Path) -> Result<String> {
    Ok(format!("{} extents", digits(kernel::extents(&File::open(file)?)?.into())))
}

fn phase_row(
    row: &'static str,
    number: usize,
    phase: &Phase,
    size: u64,
    lives: &[(Kind, Life)],
) -> Row {
    let (_, life) = &lives[0];
    let result = life.results[number];
    let what = format!("{}, {} raw block volume", phase.name(), bytes(size));
    let peers = lives[1..]
        .iter()
        .map(|(kind, life)| format!("{}: {}", kind.name(), describe(life.results[number])));
    let row = Row::value(row, what, describe(result));
    let peers = peers.collect::<Vec<_>>().join("; ");
    let Some(Target { what, least, of }) = &phase.target else { return row.against(peers, None) };
    let other = match of {
        Of::Phase(number) => Some(life.results[*number]),
        Of::PlainLoop => lives
            .iter()
            .find(|(kind, _)| *kind == Kind::Plain)
            .map(|(_, life)| life.results[number]),
    };
    let ratio = other.map(|other| result.iops / other.iops);
    row.against(peers, ratio).must(what, ratio.map(|ratio| ratio >= *least))
}

fn snapshot_row(row: &'static str, number: usize, size: u64, lives: &[(Kind, Life)]) -> Row {
    let taken = lives[0].1.snapshots[number];
    let peers = lives[1..].iter().filter_map(|(kind, life)| {
        Some(format!("{}: {}", kind.name(), life.snapshots.get(number)?.text()))
    });
    let what = format!("CreateSnapshot {} of the {} raw block volume", number + 1, bytes(size));
    Row::value(row, what, taken.text())
        .against(peers.collect::<Vec<_>>().join("; "), None)
        .must("longest stall 250 ms", taken.stall <= 0.25)
}

fn describe(LoadResult { iops, p99, longest, written, .. }: LoadResult) -> String {
    let written = written.map_or_else(String::new, |ratio| format!(", written {}", digits(ratio)));
    let iops = grouped(iops.round() as i64);
    format!("{iops} IOPS, p99 {}, longest {}{written}", time(p99), time(longest))
}
