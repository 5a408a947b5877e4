//! CreateSnapshot against the number of extents: the time of its steps, and the stall of a writer,
//! compared with one plain FICLONE of the same file.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use csi_loopback::backend::sys::clone_file;

use crate::harness::{Cost, Driver, SnapshotSteps};
use crate::report::{Report, Row};
use crate::stats::{Samples, digits, grouped, time};
use crate::{Options, kernel, writer};

/// Bytes of the volume, which is sparse, so that extents are single blocks.
const SIZE: u64 = 64 << 30;

/// Rounds with a writer end after this time: with half a million extents, a call takes several
/// seconds.
const ENOUGH: Duration = Duration::from_secs(50);

/// Steps of the driver that grow with the number of extents, and their names in the table.
const STEPS: [(&str, &str); 3] =
    [("pre_clone", "pre-clone"), ("clone", "final FICLONE"), ("compare", "FIEMAP compare")];

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    // Extents and rounds.
    let sizes: &[(usize, usize)] = options.pick(
        &[(1_000, 7), (10_000, 7), (100_000, 5), (500_000, 3), (1_000_000, 2)],
        &[(1_000, 1), (5_000, 1)],
    );
    let mut charts = Charts::default();
    for (extents, rounds) in sizes {
        measure_extents(report, *extents, *rounds, &mut charts)?;
    }
    report.line("snapshot", "CreateSnapshot without a writer", charts.whole);
    for ((_, name), points) in STEPS.iter().zip(charts.steps) {
        report.line("snapshot", *name, points);
    }
    report.line("snapshot", "other steps", charts.rest);
    report.line("snapshot", "one plain FICLONE", charts.plain);
    report.line("stall", "CreateSnapshot", charts.stall);
    report.line("stall", "one plain FICLONE", charts.plain_stall);
    Ok(())
}

#[derive(Default)]
struct Charts {
    whole: Vec<(f64, f64)>,
    steps: [Vec<(f64, f64)>; 3],
    rest: Vec<(f64, f64)>,
    plain: Vec<(f64, f64)>,
    stall: Vec<(f64, f64)>,
    plain_stall: Vec<(f64, f64)>,
}

/// Results of all rounds with one number of extents.
#[derive(Default)]
struct Rounds {
    steps: Vec<SnapshotSteps>,
    plain: Vec<Duration>,
    plain_stalls: Vec<Duration>,
    stalls: Vec<Duration>,
    /// Duration of CreateSnapshot with a writer.
    busy: Vec<Duration>,
    writes: Vec<f64>,
}

fn measure_extents(
    report: &mut Report,
    extents: usize,
    rounds: usize,
    charts: &mut Charts,
) -> Result<()> {
    let driver = Driver::start(64 << 30)?;
    let volume = driver.volume("extents", SIZE)?;
    let blocks = writer::scattered(extents, SIZE / 4096, 41);
    let file = driver.pool.volume(&volume);
    writer::scatter(&file, &blocks)?;
    let device = driver.publish(&volume)?;

    let mut found = Rounds::default();
    // Without a writer: the time of each step. Between two snapshots, one in a hundred blocks
    // changes.
    let few: Vec<u64> = blocks.iter().copied().step_by(100).collect();
    let cost = driver.measure(1, rounds, |run| {
        writer::change(&device, &few, run as u64)?;
        let begun = Instant::now();
        driver.snapshot(&format!("quiet-{run}"), &volume)?;
        let took = begun.elapsed();
        if run > 0 {
            found.steps.push(driver.last_snapshot_steps()?);
        }
        Ok(took)
    })?;
    let begun = Instant::now();
    for round in 0..rounds {
        if round > 0 && begun.elapsed() > ENOUGH {
            break;
        }
        found.plain.push(plain_clone(&driver, &file)?);
        // A continuous writer during FICLONE, and then during CreateSnapshot.
        let plain =
            writer::write_during(&device, &blocks, round as u64, || plain_clone(&driver, &file))?;
        found.plain_stalls.push(plain.longest);
        let snapshot = writer::write_during(&device, &blocks, round as u64 + 100, || {
            let begun = Instant::now();
            driver.snapshot(&format!("busy-{round}"), &volume)?;
            Ok(begun.elapsed())
        })?;
        found.stalls.push(snapshot.longest);
        found.busy.push(snapshot.result);
        found.writes.push(snapshot.writes as f64);
    }
    report_rounds(report, extents, &cost, found, charts);
    Ok(())
}

/// One FICLONE of the backing file into a new file of the pool, which is then deleted.
fn plain_clone(driver: &Driver, file: &Path) -> Result<Duration> {
    let path = driver.pool.path().join("plain-clone");
    let (source, target) = (File::open(file)?, File::create(&path)?);
    let begun = Instant::now();
    clone_file(&target, &source)?;
    let took = begun.elapsed();
    drop(target);
    fs::remove_file(&path)?;
    // Wait for the deletion in the background, so that it does not disturb the next measurement.
    kernel::free_bytes(&driver.pool.path())?;
    Ok(took)
}

fn report_rounds(
    report: &mut Report,
    extents: usize,
    cost: &Cost,
    found: Rounds,
    charts: &mut Charts,
) {
    let x = extents as f64;
    let count = grouped(extents as i64);
    let median = |values: &dyn Fn(&SnapshotSteps) -> f64| {
        found.steps.iter().map(values).collect::<Samples>().median()
    };
    let whole = cost.times.median();
    let mut shares = Vec::new();
    let mut sum = 0.0;
    for ((step, name), points) in STEPS.iter().zip(&mut charts.steps) {
        let took = median(&|steps| steps.get(*step).copied().unwrap_or_default());
        points.push((x, took));
        shares.push(format!("{name} {} ({} %)", time(took), (took / whole * 100.0).round()));
        sum += took;
    }
    let rest = (whole - sum).max(0.0);
    shares.push(format!("other steps {}", time(rest)));
    charts.whole.push((x, whole));
    charts.rest.push((x, rest));
    let plain: Samples = found.plain.into_iter().collect();
    charts.plain.push((x, plain.median()));
    let others = ["flush", "seal", "record", "commit"].map(|step| {
        format!("{step} {}", time(median(&|steps| steps.get(step).copied().unwrap_or_default())))
    });
    report.note(format!("extents: other steps at {count} extents: {}", others.join(", ")));
    let row = Row::times("extents", format!("CreateSnapshot, {count} extents"), cost);
    let peer = format!("{}; one plain FICLONE {}", shares.join(", "), plain.times());
    report.row(row.against(peer, None));

    let stalls: Samples = found.stalls.into_iter().collect();
    let plain_stalls: Samples = found.plain_stalls.into_iter().collect();
    charts.stall.push((x, stalls.median()));
    charts.plain_stall.push((x, plain_stalls.median()));
    let busy: Samples = found.busy.into_iter().collect();
    let writes: Samples = found.writes.into_iter().collect();
    let ratio = plain_stalls.median() / stalls.median();
    let what = format!("longest stall of a 4 KiB writer during CreateSnapshot, {count} extents");
    let row = Row::samples("extents", what, &stalls, "seconds", time).against(
        format!(
            "during one plain FICLONE: {}; CreateSnapshot took {} during {} writes",
            plain_stalls.times(),
            time(busy.median()),
            digits(writes.median())
        ),
        ratio,
    );
    report.row(match extents {
        100_000 => row.must("1/10 of a plain FICLONE", ratio >= 10.0),
        500_000 => row.must("1/12 of a plain FICLONE", ratio >= 12.0),
        _ => row,
    });
}
