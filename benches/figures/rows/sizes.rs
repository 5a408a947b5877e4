//! The same number of changes on volumes of different sizes.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::calls::Capability;
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

/// Durations of all runs of each call.
#[derive(Default)]
struct Times {
    delta: Vec<Duration>,
    allocated: Vec<Duration>,
    snapshot: Vec<Duration>,
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
    let volume = driver.volume(&name, size, Capability::Block)?;
    let limit = if spread { size } else { 1 << 30 };
    let blocks = writer::scattered(changes, limit / 4096, 31);
    writer::scatter(&driver.pool.volume(&volume), &blocks)?;
    let base = driver.snapshot(&format!("{name}-base"), &volume)?;
    writer::change(&driver.pool.volume(&volume), &blocks, 32)?;
    let target = driver.snapshot(&format!("{name}-target"), &volume)?;
    Ok(Subject { size, volume, base, target, blocks })
}

/// Measures all sizes in each round, so that other load on the machine disturbs all of them.
fn rounds(options: Options, driver: &Driver, subjects: &[Subject]) -> Result<Vec<[Cost; 3]>> {
    let mut times: Vec<Times> = subjects.iter().map(|_| Times::default()).collect();
    let mut spent = vec![[0.0; 3]; subjects.len()];
    let clock = driver.cpu()?;
    let queries = options.pick(8, 2);
    let count = options.pick(9, 2);
    for round in 0..=count {
        for ((subject, times), spent) in subjects.iter().zip(&mut times).zip(&mut spent) {
            let mut took = Times::default();
            let marks = [(); 4].map(|()| clock.now());
            let mut marks = marks;
            for _ in 0..queries {
                let delta = driver.get_metadata(Some(&subject.base), &subject.target)?;
                ensure!(
                    delta.blocks() == subject.blocks,
                    "the delta differs from the written blocks"
                );
                took.delta.push(delta.whole);
            }
            marks[1] = clock.now();
            for _ in 0..queries {
                took.allocated.push(driver.get_metadata(None, &subject.target)?.whole);
            }
            marks[2] = clock.now();
            writer::change(&driver.pool.volume(&subject.volume), &subject.blocks, round as u64)?;
            let begun = Instant::now();
            driver.snapshot(&format!("{}-{round}", subject.volume), &subject.volume)?;
            took.snapshot.push(begun.elapsed());
            marks[3] = clock.now();
            // The first round warms up.
            if round > 0 {
                times.delta.extend(took.delta);
                times.allocated.extend(took.allocated);
                times.snapshot.extend(took.snapshot);
                for (spent, pair) in spent.iter_mut().zip(marks.windows(2)) {
                    *spent += (pair[1] - pair[0]).as_secs_f64();
                }
            }
        }
    }
    let peak = crate::kernel::memory(driver.pid(), "status", "VmHWM")?;
    let cost = |times: Vec<Duration>, spent: f64| {
        let runs = times.len() as f64;
        Cost { times: times.into_iter().collect(), cpu: spent / runs, peak }
    };
    let costs = times.into_iter().zip(spent).map(|(times, [delta, allocated, snapshot])| {
        [cost(times.delta, delta), cost(times.allocated, allocated), cost(times.snapshot, snapshot)]
    });
    Ok(costs.collect())
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
