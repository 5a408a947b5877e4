//! fio on a published raw block volume and on a plain loop device beside it, in turn.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::calls::Capability;
use crate::harness::{Driver, run, text};
use crate::report::{Report, Row};
use crate::stats::{Samples, bytes, digits};
use crate::{Options, writer};

const PATTERNS: [&str; 4] = ["randread", "randwrite", "read", "write"];
const BLOCK_SIZES: [&str; 2] = ["4k", "128k"];

/// A plain loop device; it is detached when this goes.
struct PlainLoop(String);

impl PlainLoop {
    fn attach(file: &Path) -> Result<Self> {
        let flags = ["--find", "--show", "--sector-size", "4096", "--direct-io=on", text(file)];
        run("losetup", &flags).map(Self)
    }
}

impl Drop for PlainLoop {
    fn drop(&mut self) {
        if let Err(error) = run("losetup", &["--detach", &self.0]) {
            eprintln!("detaching {}: {error:#}", self.0);
        }
    }
}

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    if Command::new("fio").arg("--version").output().is_err() {
        let row =
            Row::said("fio", "fio: volume against plain loop device", "not available: no fio");
        report.row(row.must("0.97 or better", None));
        return Ok(());
    }
    let size: u64 = options.pick(1 << 30, 64 << 20);
    let driver = Driver::start(64 << 30)?;
    let volume = driver.volume("fio", size, Capability::Block)?;
    writer::fill(&driver.pool.volume(&volume), size)?;
    let plain = driver.pool.path().join("plain");
    std::fs::File::create_new(&plain)?;
    writer::fill(&plain, size)?;
    let published = driver.publish(&volume, Capability::Block)?;
    let plain = PlainLoop::attach(&plain)?;
    let direct = |device: &str| {
        let shown = run("losetup", &["--noheadings", "--output", "DIO,LOG-SEC", device]);
        shown.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let ours = run(
        "losetup",
        &["--noheadings", "--output", "NAME", "-j", text(&driver.pool.volume(&volume))],
    )?;
    let (ours, theirs) = (direct(ours.trim())?, direct(&plain.0)?);
    ensure!(
        ours == theirs,
        "the devices are not alike: {ours}, {theirs} (direct I/O, sector size)"
    );

    let mut points = Vec::new();
    for block_size in BLOCK_SIZES {
        for pattern in PATTERNS.into_iter().step_by(options.pick(1, 3)) {
            let job = Job { pattern, block_size, seconds: options.pick("1500ms", "200ms") };
            let row = job.compare(options, &published, Path::new(&plain.0), size)?;
            points.push((points.len() as f64 + 1.0, row.ratio.unwrap_or_default()));
            report.row(row);
        }
    }
    report.line("fio", "volume / plain", points);
    report.note("fio: queue depth 16, libaio, direct I/O, both devices with 4096-byte sectors and direct I/O");
    Ok(())
}

struct Job {
    pattern: &'static str,
    block_size: &'static str,
    seconds: &'static str,
}

impl Job {
    fn compare(&self, options: Options, ours: &Path, plain: &Path, size: u64) -> Result<Row> {
        let (mut volume, mut beside, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        if !options.quick {
            self.run(ours)?;
        }
        for round in 0..options.pick(5, 1) {
            // Who comes first changes with the round.
            let (a, b) = match round % 2 {
                0 => (self.run(ours)?, self.run(plain)?),
                _ => {
                    let b = self.run(plain)?;
                    (self.run(ours)?, b)
                }
            };
            volume.push(a);
            beside.push(b);
            ratios.push(a / b);
        }
        let ratios: Samples = ratios.into_iter().collect();
        let volume: Samples = volume.into_iter().collect();
        let beside: Samples = beside.into_iter().collect();
        let rate = |rate: f64| format!("{}/s", bytes(rate as u64));
        let what =
            format!("fio {} {}, {} raw block volume", self.pattern, self.block_size, bytes(size));
        let row = Row::samples("fio", what, &volume, "bytes per second", rate).against(
            format!(
                "plain loop device on the same pool: {}; ratios {} … {}",
                beside.text(rate),
                digits(ratios.min()),
                digits(ratios.max())
            ),
            ratios.median(),
        );
        Ok(row.must("0.97 or better", ratios.median() >= 0.97))
    }

    /// Bytes per second.
    fn run(&self, device: &Path) -> Result<f64> {
        let device = format!("--filename={}", device.display());
        let (pattern, size) =
            (format!("--rw={}", self.pattern), format!("--bs={}", self.block_size));
        let seconds = format!("--runtime={}", self.seconds);
        let said = run(
            "fio",
            &[
                "--name=figure",
                &device,
                &pattern,
                &size,
                &seconds,
                "--time_based",
                "--ioengine=libaio",
                "--iodepth=16",
                "--direct=1",
                "--randrepeat=1",
                "--output-format=json",
            ],
        )?;
        let json = said.find('{').map(|start| &said[start..]).context("fio said nothing")?;
        let said: serde_json::Value =
            serde_json::from_str(json).context("reading what fio said")?;
        let job = &said["jobs"][0];
        let rate = |side: &str| job[side]["bw_bytes"].as_f64().unwrap_or_default();
        let rate = rate("read") + rate("write");
        ensure!(rate > 0.0, "fio moved nothing");
        Ok(rate)
    }
}
