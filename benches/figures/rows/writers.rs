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
struct Phase {
    /// Number of snapshots before the phase. Missing ones are taken at its start.
    snapshots: usize,
    what: &'static str,
    sequential: bool,
    /// A flush after every 16 writes.
    flushes: bool,
    target: Option<Target>,
}

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

impl Phase {
    fn load(&self, options: Options) -> Load {
        let (pattern, block_size) =
            if self.sequential { ("write", "128k") } else { ("randwrite", "4k") };
        let flush_every = if self.flushes { 16 } else { 0 };
        let milliseconds = options.pick(10_000, 200);
        Load { pattern, block_size, milliseconds, flush_every, repeats: false }
    }

    fn name(&self) -> String {
        let load = if self.sequential { "128 KiB sequential" } else { "4 KiB random" };
        format!("{load} writes, {}", self.what)
    }
}

/// The result of each phase.
type Life = Vec<LoadResult>;

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    if !load::is_available() {
        let row = Row::value("writers", "writes after snapshots", "fio is not installed");
        report.row(row.must("0.6 of before", None));
        return Ok(());
    }
    let size = options.pick(2 << 30, 64 << 20);
    let large = ours(options, size, 64 << 10)?;
    let small = ours(options, size, 4096)?;
    let plain = plain(options, size)?;
    let host_path = host_path(options, size);
    if let Err(reason) = &host_path {
        report.note(format!("writers: {}", host_path::missing(reason)));
    }
    let lives = Lives { large, small, plain, host_path: host_path.ok() };
    for (number, phase) in PHASES.iter().enumerate() {
        report.row(lives.row(number, phase, size));
    }
    report.note(
        "writers: measured is a volume on a pool with blocks of 64 KiB; queue depth 16, libaio, direct I/O; flushed: a \
         flush after every 16 writes; a plain loop device has no snapshots",
    );
    Ok(())
}

struct Lives {
    large: Life,
    small: Life,
    plain: Life,
    host_path: Option<Life>,
}

impl Lives {
    fn row(&self, number: usize, phase: &Phase, size: u64) -> Row {
        let result = self.large[number];
        let what = format!("{}, {} raw block volume", phase.name(), bytes(size));
        let mut peers = vec![
            format!("on blocks of 4 KiB: {}", describe(self.small[number])),
            format!("plain loop device: {}", describe(self.plain[number])),
        ];
        peers.extend(
            self.host_path.as_ref().map(|life| format!("host-path: {}", describe(life[number]))),
        );
        let row = Row::value("writers", what, describe(result));
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

/// Runs the phases on a device, which is filled sequentially after the first phase.
fn live(
    options: Options,
    device: &Path,
    size: u64,
    mut snapshot: impl FnMut(usize) -> Result<()>,
) -> Result<Life> {
    let mut snapshots = 0;
    let mut life = Life::new();
    for (number, phase) in PHASES.iter().enumerate() {
        if number == HOLES + 1 {
            writer::fill(device, size)?;
        }
        while snapshots < phase.snapshots {
            snapshots += 1;
            snapshot(snapshots)?;
        }
        let result = phase.load(options).run(device)?;
        let rate = bytes(result.bytes_per_second as u64);
        println!("    {}: {}, {rate}/s", phase.name(), describe(result));
        life.push(result);
    }
    Ok(life)
}

/// A volume of the driver on an allocated image, as in an image pool.
fn ours(options: Options, size: u64, block_size: u64) -> Result<Life> {
    println!("    -- blocks of {}", bytes(block_size));
    let driver =
        Driver::start_on(Layout { bytes: 6 * size + (1 << 30), block_size, is_allocated: true })?;
    let volume = driver.volume("writers", size, Capability::Block)?;
    let device = driver.publish(&volume, Capability::Block)?;
    let file = File::open(driver.pool.volume(&volume))?;
    live(options, &device, size, |number| {
        let begun = Instant::now();
        driver.snapshot(&format!("after-{number}"), &volume)?;
        let took = begun.elapsed().as_secs_f64();
        let extents = kernel::extents(&file)?;
        println!("    snapshot {number}: {}, {} extents", time(took), digits(f64::from(extents)));
        Ok(())
    })
}

fn plain(options: Options, size: u64) -> Result<Life> {
    println!("    -- plain loop device");
    let directory = tempfile::TempDir::with_prefix("figures-")?;
    let file = directory.path().join("plain");
    File::create_new(&file)?.set_len(size)?;
    let device = PlainLoop::attach(&file)?;
    live(options, device.path(), size, |_| Ok(()))
}

fn host_path(options: Options, size: u64) -> Result<Life> {
    let driver = HostPath::start(5 * size)?;
    println!("    -- csi-driver-host-path");
    let volume = driver.volume("writers", size)?;
    let device = driver.device(&volume)?;
    live(options, &device, size, |number| {
        driver.snapshot(&format!("after-{number}"), &volume.id).map(drop)
    })
}
