//! fio alternately on a published raw block volume and on a plain loop device.

use std::path::Path;

use anyhow::{Result, ensure};

use crate::harness::{Driver, run, text};
use crate::load::{self, Load, plain_loop};
use crate::report::{Report, Row};
use crate::stats::{Samples, bytes, digits};
use crate::{Options, writer};

const PATTERNS: [&str; 4] = ["randread", "randwrite", "read", "write"];
const BLOCK_SIZES: [&str; 2] = ["4k", "128k"];

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    if !load::is_available() {
        let row =
            Row::value("fio", "fio: volume against plain loop device", "fio is not installed");
        report.row(row.must("0.97 or better", None));
        return Ok(());
    }
    let size: u64 = options.pick(1 << 30, 64 << 20);
    let driver = Driver::start(64 << 30)?;
    let volume = driver.volume("fio", size)?;
    writer::fill(&driver.pool.volume(&volume), size)?;
    let plain = driver.pool.path().join("plain");
    std::fs::File::create_new(&plain)?;
    writer::fill(&plain, size)?;
    let published = driver.publish(&volume)?;
    let plain = plain_loop(&plain);
    let direct = |device: &str| {
        let columns = run("losetup", &["--noheadings", "--output", "DIO,LOG-SEC", device]);
        columns.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let ours = run(
        "losetup",
        &["--noheadings", "--output", "NAME", "-j", text(&driver.pool.volume(&volume))],
    )?;
    let (ours, peer) = (direct(ours.trim())?, direct(plain.path())?);
    ensure!(ours == peer, "the devices differ: {ours}, {peer} (direct I/O, sector size)");

    let mut points = Vec::new();
    for block_size in BLOCK_SIZES {
        for pattern in PATTERNS.into_iter().step_by(options.pick(1, 3)) {
            let milliseconds = options.pick(1500, 200);
            let load = Load { pattern, block_size, milliseconds, repeats: true, ..Load::default() };
            let row = compare(load, options, &published, Path::new(plain.path()), size)?;
            points.push((points.len() as f64 + 1.0, row.ratio.unwrap_or_default()));
            report.row(row);
        }
    }
    report.line("fio", "volume / plain", points);
    report.note("fio: queue depth 16, libaio, direct I/O, both devices with 4096-byte sectors and direct I/O");
    Ok(())
}

fn compare(load: Load, options: Options, ours: &Path, plain: &Path, size: u64) -> Result<Row> {
    let rate = |device: &Path| load.run(device).map(|result| result.bytes_per_second);
    let (mut volume, mut peer, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    if !options.quick {
        rate(ours)?;
    }
    for round in 0..options.pick(5, 1) {
        // The order changes with each round.
        let (a, b) = match round % 2 {
            0 => (rate(ours)?, rate(plain)?),
            _ => {
                let b = rate(plain)?;
                (rate(ours)?, b)
            }
        };
        volume.push(a);
        peer.push(b);
        ratios.push(a / b);
    }
    let ratios: Samples = ratios.into_iter().collect();
    let volume: Samples = volume.into_iter().collect();
    let peer: Samples = peer.into_iter().collect();
    let rate = |rate: f64| format!("{}/s", bytes(rate as u64));
    let Load { pattern, block_size, .. } = load;
    let what = format!("fio {pattern} {block_size}, {} raw block volume", bytes(size));
    let row = Row::samples("fio", what, &volume, "bytes per second", rate).against(
        format!(
            "plain loop device on the same pool: {}; ratios {} … {}",
            peer.text(rate),
            digits(ratios.min()),
            digits(ratios.max())
        ),
        ratios.median(),
    );
    Ok(row.must("0.97 or better", ratios.median() >= 0.97))
}
