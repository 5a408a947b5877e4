//! A sparse volume of 1 TiB with a million scattered extents.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::harness::Driver;
use crate::report::{Report, Row};
use crate::stats::{Samples, bytes, grouped, millions, time};
use crate::{Options, raw, writer};

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    let (size, count) = options.pick((1 << 40, 1_000_000), (64 << 30, 10_000));
    let driver = Driver::start(64 << 30)?;
    let volume = driver.volume("large", size)?;
    let base = driver.snapshot("base", &volume)?;
    let blocks = writer::scattered(count, size / 4096, 21);
    writer::scatter(&driver.pool.volume(&volume), &blocks)?;
    let begun = Instant::now();
    let target = driver.snapshot("target", &volume)?;
    let took = begun.elapsed();

    let mut firsts: Vec<Duration> = Vec::new();
    let runs = options.pick(9, 2);
    let decoded = driver.measure(1, runs, |_| {
        let delta = driver.get_metadata(Some(&base), &target)?;
        ensure!(delta.blocks() == blocks, "the delta differs from the written blocks");
        firsts.push(delta.first);
        Ok(delta.whole)
    })?;
    let extents = || blocks.iter().map(|block| (block * 4096, 4096));
    let undecoded = driver.measure(1, runs, |_| {
        let socket = driver.socket();
        let received = driver.runtime.block_on(raw::get_delta(&socket, &base, &target, 0))?;
        received.check(merged(extents()), 0)?;
        Ok(received.whole)
    })?;
    let name =
        format!("delta, {} sparse, {} scattered extents", bytes(size), grouped(count as i64));
    let firsts: Samples = firsts.into_iter().skip(1).collect();
    report.row(
        Row::samples("large", format!("{name}: first message"), &firsts, "seconds", time)
            .must("under 50 ms", firsts.max() < 0.05),
    );
    for (how, cost) in [("decoded", &decoded), ("undecoded", &undecoded)] {
        let rate = count as f64 / cost.times.median();
        report.row(
            Row::times("large", format!("{name}: whole stream, {how}"), cost)
                .against(format!("{} extents", millions(rate)), None),
        );
    }
    report.note(format!(
        "large: CreateSnapshot with these extents took {}; see the rows extents",
        time(took.as_secs_f64())
    ));
    Ok(())
}

/// Merges adjacent extents.
fn merged(extents: impl Iterator<Item = (u64, u64)>) -> impl Iterator<Item = (u64, u64)> {
    let mut extents = extents.peekable();
    std::iter::from_fn(move || {
        let (start, mut length) = extents.next()?;
        while let Some((_, more)) = extents.next_if(|(next, _)| *next == start + length) {
            length += more;
        }
        Some((start, length))
    })
}
