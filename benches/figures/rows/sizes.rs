//! The same number of changes on volumes of different sizes.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::harness::{Cost, Driver};
use crate::report::{Report, Row};
use crate::stats::{bytes, digits, grouped, time};
use crate::{Options, writer};

/// One volume with two snapshots, and the blocks that changed between them.
struct Subject {
    size: u64,
    volume: String,
    base: String,
    target: String,
    blocks: Vec<u64>,
}

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    let sizes: &[u64] = options
        .pick(&[1 << 30, 16 << 30, 256 << 30, 1 << 40, 4 << 40, 16 << 40], &[1 << 30, 1 << 40]);
    let changes = options.pick(1000, 100);
    let driver = Driver::start(64 << 30)?;
    // Changes spread over the whole volume use more parts of its record, in proportion to the
    // volume's size.
    for (spread, place) in [(false, "within 1 GiB"), (true, "spread over the volume")] {
        let mut subjects = Vec::new();
        for size in sizes {
            subjects.push(subject(&driver, *size, spread, changes)?);
        }
        let cost = rounds(options, &driver, &subjects)?;
        report_costs(report, place, changes, &subjects, &cost);
    }
    Ok(())
}

fn subject(driver: &Driver, size: u64, spread: bool, changes: usize) -> Result<Subject> {
    let name = format!("size-{size}-{spread}");
    let volume = driver.volume(&name, size)?;
    let limit = if spread { size } else { 1 << 30 };
    let blocks = writer::scattered(changes, limit / 4096, 31);
    writer::scatter(&driver.pool.volume(&volume), &blocks)?;
    let base = driver.snapshot(&format!("{name}-base"), &volume)?;
    writer::change(&driver.pool.volume(&volume), &blocks, 32)?;
    let target = driver.snapshot(&format!("{name}-target"), &volume)?;
    Ok(Subject { size, volume, base, target, blocks })
}

/// Runs of one call in a round, and how long each took.
type Call<'a> = &'a dyn Fn(&Subject, usize) -> Result<Vec<Duration>>;

/// Measures all sizes in each round, so that other load on the machine disturbs all of them.
fn rounds(options: Options, driver: &Driver, subjects: &[Subject]) -> Result<Vec<[Cost; 3]>> {
    let queries = options.pick(8, 2);
    let delta = |subject: &Subject, _: usize| -> Result<Vec<Duration>> {
        let one = |_| {
            let delta = driver.get_metadata(Some(&subject.base), &subject.target)?;
            let is_exact = delta.blocks() == subject.blocks;
            ensure!(is_exact, "the delta differs from the written blocks");
            Ok(delta.whole)
        };
        (0..queries).map(one).collect()
    };
    let allocated = |subject: &Subject, _: usize| -> Result<Vec<Duration>> {
        let one = |_| Ok(driver.get_metadata(None, &subject.target)?.whole);
        (0..queries).map(one).collect()
    };
    let snapshot = |subject: &Subject, round: usize| -> Result<Vec<Duration>> {
        writer::change(&driver.pool.volume(&subject.volume), &subject.blocks, round as u64)?;
        let begun = Instant::now();
        driver.snapshot(&format!("{}-{round}", subject.volume), &subject.volume)?;
        Ok(vec![begun.elapsed()])
    };
    let calls: [Call; 3] = [&delta, &allocated, &snapshot];
    // Of each subject and call: the durations of all runs, and the driver's processor time.
    let mut found: Vec<[(Vec<Duration>, f64); 3]> =
        subjects.iter().map(|_| Default::default()).collect();
    for round in 0..=options.pick(9, 2) {
        for (subject, found) in subjects.iter().zip(&mut found) {
            for (call, (times, spent)) in calls.iter().zip(found) {
                let clock = driver.cpu()?;
                let took = call(subject, round)?;
                // The first round warms up.
                if round > 0 {
                    *spent += clock.spent().as_secs_f64();
                    times.extend(took);
                }
            }
        }
    }
    let peak = crate::kernel::memory(driver.pid(), "status", "VmHWM")?;
    let cost = |(times, spent): (Vec<Duration>, f64)| {
        let runs = times.len() as f64;
        Cost { times: times.into_iter().collect(), cpu: spent / runs, peak }
    };
    Ok(found.into_iter().map(|calls| calls.map(cost)).collect())
}

fn report_costs(
    report: &mut Report,
    place: &str,
    changes: usize,
    subjects: &[Subject],
    costs: &[[Cost; 3]],
) {
    for (number, what) in ["delta", "allocated", "CreateSnapshot"].into_iter().enumerate() {
        let line = subjects
            .iter()
            .zip(costs)
            .map(|(subject, cost)| (subject.size as f64, cost[number].times.median()));
        let points: Vec<(f64, f64)> = line.collect();
        let (Some(first), Some(last)) = (costs.first(), costs.last()) else { continue };
        let (smallest, largest) = (&first[number], &last[number]);
        let ratio = largest.times.median() / smallest.times.median();
        // Flat: the sizes differ by at most a quarter, or by the spread of runs with one size.
        let noise = smallest.times.spread() + largest.times.spread();
        let flat = ratio < 1.25 || largest.times.median() - smallest.times.median() <= noise;
        let between: Vec<String> = points.iter().map(|(_, y)| time(*y)).collect();
        let row = Row::times(
            "sizes",
            format!(
                "{what}, {} changes {place}, {}",
                grouped(changes as i64),
                subjects.last().map(|subject| bytes(subject.size)).unwrap_or_default()
            ),
            largest,
        );
        let sizes: Vec<String> = subjects.iter().map(|subject| bytes(subject.size)).collect();
        let peer = format!(
            "{}: {}; slope {} % per doubling",
            sizes.join(", "),
            between.join(", "),
            digits(slope(&points) * 100.0)
        );
        report.row(row.against(peer, ratio).must("flat within noise", flat));
        report.line("sizes", format!("{what}, {place}"), points);
    }
}

/// The slope of the regression line per doubling of x, as a fraction of the mean.
fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let x_mean = points.iter().map(|(x, _)| x.log2()).sum::<f64>() / count;
    let y_mean = points.iter().map(|(_, y)| y).sum::<f64>() / count;
    let above: f64 = points.iter().map(|(x, y)| (x.log2() - x_mean) * (y - y_mean)).sum();
    let below: f64 = points.iter().map(|(x, _)| (x.log2() - x_mean).powi(2)).sum();
    above / below / y_mean
}
