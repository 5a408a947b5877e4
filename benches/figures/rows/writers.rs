//! The cost of snapshots for writers: fio on a raw block volume before, right after and long after
//! snapshots, on pools with blocks of 64 KiB and 4 KiB, compared with a plain loop device on the
//! filesystem of TMPDIR and with csi-driver-host-path.

use std::fs::File;
use std::path::Path;
use std::time::Instant;

use anyhow::Result;

use crate::calls::Capability;
use crate::harness::{Driver, Layout};
use crate::host_path::{self, HostPath};
use crate::load::{self, Load, LoadResult, PlainLoop};
use crate::report::{Report, Row};
use crate::stats::{bytes, digits, grouped, time};
use crate::{Options, kernel, writer};

/// A load in the life of a volume, and its target.
#[derive(Clone, Copy)]
struct Phase {
    /// Number of snapshots before the phase. Missing ones are taken at its start.
    snapshots: usize,
    what: &'static str,
    sequential: bool,
    /// A flush after every 16 writes.
    flushes: bool,
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
    /// The same phase on blocks of 4 KiB.
    SmallBlocks,
    PlainLoop,
}

const HOLES: usize = 0;
const BEFORE: usize = 1;

const fn random(snapshots: usize, what: &'static str) -> Phase {
    Phase { snapshots, what, sequential: false, flushes: false, target: None }
}

const fn flushed(snapshots: usize, what: &'static str) -> Phase {
    Phase { flushes: true, ..random(snapshots, what) }
}

const PHASES: [Phase; 8] = [
    Phase {
        target: Some(Target { what: "0.8 of blocks of 4 KiB", least: 0.8, of: Of::SmallBlocks }),
        ..random(0, "first writes into a sparse volume")
    },
    random(0, "full volume, no snapshot"),
    flushed(0, "the same, flushed"),
    Phase {
        target: Some(Target { what: "0.6 of before", least: 0.6, of: Of::Phase(BEFORE) }),
        ..random(1, "10 s after a snapshot")
    },
    random(1, "the next 10 s"),
    flushed(2, "10 s after a second snapshot, flushed"),
    flushed(2, "the next 10 s, flushed"),
    Phase {
        sequential: true,
        target: Some(Target { what: "0.5 of a plain loop device", least: 0.5, of: Of::PlainLoop }),
        ..random(3, "after a third snapshot")
    },
];

/// The phases of a large volume: all blocks are written once, and one
/// snapshot is taken.
const LARGE: [Phase; 4] = [PHASES[HOLES], PHASES[BEFORE], PHASES[3], PHASES[4]];

/// Most writes into a volume that its pool cannot hold as a whole.
const SPARSE_WRITES: u64 = 200_000;

impl Phase {
    fn load(&self, options: Options, operations: u64) -> Load {
        let (pattern, block_size) =
            if self.sequential { ("write", "128k") } else { ("randwrite", "4k") };
        let flush_every = if self.flushes { 16 } else { 0 };
        let milliseconds = options.pick(10_000, 200);
        Load { pattern, block_size, milliseconds, operations, flush_every, repeats: false }
    }

    fn name(&self) -> String {
        let load = if self.sequential { "128 KiB sequential" } else { "4 KiB random" };
        format!("{load} writes, {}", self.what)
    }
}

/// The result of each phase.
type Life = Vec<LoadResult>;

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    let size = options.pick(2 << 30, 64 << 20);
    let course = Course { options, phases: &PHASES, size, pool: 6 * size + (1 << 30), most: 0 };
    let host_path = course.host_path();
    if let Err(reason) = &host_path {
        report.note(format!("writers: {}", host_path::missing(reason)));
    }
    course.report("writers", host_path.ok(), report)?;
    report.note(
        "writers, volumes: measured is a volume on a pool with blocks of 64 KiB; queue depth 16, libaio, direct I/O; \
         flushed: a flush after every 16 writes; a plain loop device has no snapshots",
    );
    Ok(())
}

/// A volume of 20 GiB, which does not fit into the dirty part of the page cache, and a sparse volume of
/// 200 GiB.
pub fn volumes(options: Options, report: &mut Report) -> Result<()> {
    let size = options.pick(20 << 30, 128 << 20);
    let pool = 2 * size + options.pick(4 << 30, 1 << 30);
    let course = Course { options, phases: &LARGE, size, pool, most: 0 };
    course.report("volumes", None, report)?;
    let sparse = Course { phases: &LARGE[..1], size: 10 * size, most: SPARSE_WRITES, ..course };
    sparse.report("volumes", None, report)
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

/// The results of the same course on each kind of volume.
struct Lives {
    large: Life,
    small: Life,
    plain: Life,
    host_path: Option<Life>,
}

impl Course {
    fn report(self, row: &'static str, host_path: Option<Life>, report: &mut Report) -> Result<()> {
        if !load::is_available() {
            report.row(Row::value(row, "writes after snapshots", "fio is not installed"));
            return Ok(());
        }
        let lives = Lives {
            large: self.ours(64 << 10)?,
            small: self.ours(4096)?,
            plain: self.plain()?,
            host_path,
        };
        for (number, phase) in self.phases.iter().enumerate() {
            report.row(lives.row(row, number, phase, self.size));
        }
        Ok(())
    }

    /// Runs the phases on a device, which is filled sequentially after the first phase.
    fn live(self, device: &Path, mut snapshot: impl FnMut(usize) -> Result<()>) -> Result<Life> {
        let mut snapshots = 0;
        let mut life = Life::new();
        for (number, phase) in self.phases.iter().enumerate() {
            if number == HOLES + 1 {
                writer::fill(device, self.size)?;
            }
            while snapshots < phase.snapshots {
                snapshots += 1;
                snapshot(snapshots)?;
            }
            let result = phase.load(self.options, self.most).run(device)?;
            let rate = bytes(result.bytes_per_second as u64);
            println!("    {}: {}, {rate}/s", phase.name(), describe(result));
            life.push(result);
        }
        Ok(life)
    }

    /// A volume of the driver on an allocated image, as in an image pool.
    fn ours(self, block_size: u64) -> Result<Life> {
        println!("    -- {}, blocks of {}", bytes(self.size), bytes(block_size));
        let layout = Layout { bytes: self.pool, block_size, is_allocated: true };
        let driver = Driver::start_on(layout)?;
        let volume = driver.volume("writers", self.size, Capability::Block)?;
        let device = driver.publish(&volume, Capability::Block)?;
        let file = File::open(driver.pool.volume(&volume))?;
        self.live(&device, |number| {
            let begun = Instant::now();
            driver.snapshot(&format!("after-{number}"), &volume)?;
            let took = begun.elapsed().as_secs_f64();
            let extents = kernel::extents(&file)?;
            println!("    snapshot {number}: {}, {} extents", time(took), digits(extents.into()));
            Ok(())
        })
    }

    fn plain(self) -> Result<Life> {
        println!("    -- plain loop device of {}", bytes(self.size));
        let directory = tempfile::TempDir::with_prefix("figures-")?;
        let file = directory.path().join("plain");
        File::create_new(&file)?.set_len(self.size)?;
        let device = PlainLoop::attach(&file)?;
        self.live(device.path(), |_| Ok(()))
    }

    fn host_path(self) -> Result<Life> {
        let driver = HostPath::start(5 * self.size)?;
        println!("    -- csi-driver-host-path");
        let volume = driver.volume("writers", self.size)?;
        let device = driver.device(&volume)?;
        self.live(&device, |number| {
            driver.snapshot(&format!("after-{number}"), &volume.id).map(drop)
        })
    }
}

impl Lives {
    fn row(&self, row: &'static str, number: usize, phase: &Phase, size: u64) -> Row {
        let result = self.large[number];
        let what = format!("{}, {} raw block volume", phase.name(), bytes(size));
        let mut peers = vec![
            format!("on blocks of 4 KiB: {}", describe(self.small[number])),
            format!("plain loop device: {}", describe(self.plain[number])),
        ];
        peers.extend(
            self.host_path.as_ref().map(|life| format!("host-path: {}", describe(life[number]))),
        );
        let row = Row::value(row, what, describe(result));
        let Some(Target { what, least, of }) = &phase.target else {
            return row.against(peers.join("; "), None);
        };
        let other = match of {
            Of::Phase(number) => self.large[*number],
            Of::SmallBlocks => self.small[number],
            Of::PlainLoop => self.plain[number],
        };
        let ratio = result.iops / other.iops;
        row.against(peers.join("; "), ratio).must(what, ratio >= *least)
    }
}

fn describe(result: LoadResult) -> String {
    format!("{} IOPS, p99 {}", grouped(result.iops.round() as i64), time(result.p99))
}
