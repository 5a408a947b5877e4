//! A full volume of 10 GiB: its delta compared with reading it, and CreateSnapshot compared with
//! copying it.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use support::random::Random;
use support::requests::create;

use crate::calls::ext4;
use crate::harness::{Cost, Driver};
use crate::host_path::{self, HostPath};
use crate::kernel;
use crate::report::{Report, Row};
use crate::stats::{Samples, bytes, grouped, time};
use crate::{Options, peers, writer};

const THOUSAND: &str = "at least 1,000 times faster than host-path";
const FIVE_HUNDRED: &str = "at least 500 times faster than host-path";

/// Bytes of the volume.
fn size(options: Options) -> u64 {
    options.pick(10 << 30, 256 << 20)
}

fn changed(options: Options) -> usize {
    (size(options) / 4096 / 1000) as usize
}

/// A driver with a fully written volume.
fn filled(options: Options) -> Result<(Driver, String)> {
    let driver = Driver::start(64 << 30)?;
    let volume = driver.volume("ten", size(options))?;
    writer::fill(&driver.pool.volume(&volume), size(options))?;
    Ok((driver, volume))
}

pub fn delta(options: Options, report: &mut Report) -> Result<()> {
    let (driver, volume) = filled(options)?;
    let blocks = Random::new(3).distinct(changed(options), size(options) / 4096);
    let base = driver.snapshot("base", &volume)?;
    writer::change(&driver.pool.volume(&volume), &blocks, 4)?;
    let target = driver.snapshot("target", &volume)?;
    let files = [driver.pool.snapshot(&base), driver.pool.snapshot(&target)];

    let cost = driver.measure(5, options.pick(100, 5), |_| {
        let delta = driver.get_metadata(Some(&base), &target)?;
        ensure!(delta.blocks() == blocks, "the delta differs from the written blocks");
        Ok(delta.whole)
    })?;
    let what = format!(
        "delta, {}, {} blocks changed at random",
        bytes(size(options)),
        grouped(blocks.len() as i64)
    );
    let runs = options.pick(2, 1);
    let median = cost.times.median();
    let line = (1..=runs).map(|run| (f64::from(run), median)).collect();
    report.line("delta", "csi-loopback (median)", line);
    let steps = [
        ("content comparison, 1 MiB reads, cold", 1 << 20, false),
        ("algorithm of host-path (4 KiB reads), cold", 4096, true),
    ];
    for (name, step, stands_in) in steps {
        let mut times = Vec::new();
        let mut cpu = Duration::ZERO;
        for _ in 0..runs {
            peers::make_cold([&files[0], &files[1]])?;
            let compared = peers::compare(&files[0], &files[1], step, u64::MAX)?;
            ensure!(compared.blocks == blocks, "the comparison differs from the written blocks");
            times.push(compared.time);
            cpu += compared.cpu;
        }
        cpu /= times.len() as u32;
        let samples: Samples = times.iter().copied().collect();
        let ratio = samples.median() / cost.times.median();
        let row = Row::times("delta", what.clone(), &cost).against(
            format!("{name}: {}, {} of CPU", samples.times(), time(cpu.as_secs_f64())),
            ratio,
        );
        let line = (1..).map(f64::from).zip(times.iter().map(Duration::as_secs_f64)).collect();
        report.line("delta", name, line);
        report.row(if stands_in { row.must(THOUSAND, ratio >= 1000.0) } else { row });
    }
    warm(report, &files[0], &files[1])?;
    drop(driver);
    delta_of_host_path(options, report, Row::times("delta", what, &cost), &cost, &blocks)
}

/// Notes the effect of the page cache on the comparison.
fn warm(report: &mut Report, base: &std::path::Path, target: &std::path::Path) -> Result<()> {
    const PART: u64 = 1 << 30;
    peers::compare(base, target, 1 << 20, PART)?;
    let parts = [("1 MiB", 1 << 20), ("4 KiB", 4096)];
    for (name, step) in parts {
        let compared = peers::compare(base, target, step, PART)?;
        let size = base.metadata()?.len().min(PART);
        report.note(format!(
            "delta: with the first {} of both files in the page cache, the comparison of this part with \
             {name} reads takes {}",
            bytes(size),
            time(compared.time.as_secs_f64())
        ));
    }
    Ok(())
}

fn delta_of_host_path(
    options: Options,
    report: &mut Report,
    row: Row,
    cost: &Cost,
    blocks: &[u64],
) -> Result<()> {
    let driver = match HostPath::start(3 * size(options)) {
        Ok(driver) => driver,
        Err(reason) => {
            let peer = format!("{}; {}", host_path::missing(&reason), host_path::DELTA_ELSEWHERE);
            report.row(row.against(peer, None).must(THOUSAND, None));
            return Ok(());
        }
    };
    let volume = driver.volume("ten", size(options))?;
    writer::fill(&volume.file, size(options))?;
    let base = driver.snapshot("base", &volume.id)?;
    writer::change(&volume.file, blocks, 4)?;
    let target = driver.snapshot("target", &volume.id)?;
    let clock = driver.cpu()?;
    let times = (0..options.pick(3, 1)).map(|_| {
        let delta = driver.get_delta(&base, &target)?;
        ensure!(delta.blocks() == blocks, "the delta of host-path differs from the written blocks");
        Ok(delta.whole)
    });
    let times: Samples = times.collect::<Result<Vec<Duration>>>()?.into_iter().collect();
    let cpu = clock.spent().as_secs_f64() / times.count() as f64;
    let ratio = times.median() / cost.times.median();
    let peer = format!("csi-driver-host-path: {}, {} of CPU", times.times(), time(cpu));
    report.row(row.against(peer, ratio).must(THOUSAND, ratio >= 1000.0));
    Ok(())
}

pub fn snapshot(options: Options, report: &mut Report) -> Result<()> {
    let (driver, volume) = filled(options)?;
    let file = driver.pool.volume(&volume);
    let runs = options.pick(11, 3);
    let mut all_steps = Vec::new();
    let cost = driver.measure(2, runs, |run| {
        let blocks = Random::new(run as u64).distinct(16, size(options) / 4096);
        writer::change(&file, &blocks, run as u64)?;
        let begun = Instant::now();
        driver.snapshot(&format!("snapshot-{run}"), &volume)?;
        let took = begun.elapsed();
        all_steps.push(driver.last_snapshot_steps()?);
        Ok(took)
    })?;
    let what = format!("CreateSnapshot, {}, few extents", bytes(size(options)));
    let steps =
        ["pre_clone", "flush", "clone", "seal", "compare", "record", "commit"].map(|step| {
            let times = all_steps.iter().filter_map(|steps| steps.get(step).copied());
            let times: Samples = times.collect();
            format!("{step} {}", time(times.median()))
        });
    report.note(format!(
        "snapshot: steps of CreateSnapshot with few extents: {}; the rest is the intent in the catalog and the call",
        steps.join(", ")
    ));

    let copy = driver.pool.path().join("copy");
    let mut times = Vec::new();
    for _ in 0..options.pick(2, 1) {
        kernel::uncache(&file)?;
        times.push(peers::copy(&file, &copy)?);
        std::fs::remove_file(&copy)?;
    }
    let times: Samples = times.into_iter().collect();
    let ratio = times.median() / cost.times.median();
    let peer = format!(
        "algorithm of host-path (cp without reflinks), cold: {}, {} of disk",
        times.times(),
        bytes(size(options))
    );
    let row = Row::times("snapshot", what.clone(), &cost);
    report.row(row.against(peer, ratio).must(FIVE_HUNDRED, ratio >= 500.0));
    measure_space(report, &driver, &volume)?;
    drop(driver);
    snapshot_of_host_path(options, report, Row::times("snapshot", what, &cost), &cost)?;
    freeze(options, report)
}

/// The pool space of a snapshot without changes.
fn measure_space(report: &mut Report, driver: &Driver, volume: &str) -> Result<()> {
    use std::os::unix::fs::MetadataExt;
    /// Several, because XFS allocates inodes and the catalog grows in chunks: one snapshot may
    /// allocate nothing.
    const SNAPSHOTS: u64 = 16;
    let before = kernel::free_bytes(&driver.pool.path())?;
    let mut id = String::new();
    for number in 0..SNAPSHOTS {
        id = driver.snapshot(&format!("idle-{number}"), volume)?;
    }
    let used = before.saturating_sub(kernel::free_bytes(&driver.pool.path())?) / SNAPSHOTS;
    let file = driver.pool.snapshot(&id).metadata()?;
    let shared = bytes(file.blocks() * 512);
    let row = Row::value("snapshot", "disk space of a snapshot until blocks change", bytes(used))
        .against(format!("data in the snapshot (st_blocks, shared): {shared}"), None);
    report.row(row.must("only metadata: under 1 MiB", used < 1 << 20));
    Ok(())
}

fn snapshot_of_host_path(
    options: Options,
    report: &mut Report,
    row: Row,
    cost: &Cost,
) -> Result<()> {
    let driver = match HostPath::start(2 * size(options)) {
        Ok(driver) => driver,
        Err(reason) => {
            let peer =
                format!("{}; {}", host_path::missing(&reason), host_path::SNAPSHOT_ELSEWHERE);
            report.row(row.against(peer, None).must(FIVE_HUNDRED, None));
            return Ok(());
        }
    };
    let volume = driver.volume("ten", size(options))?;
    writer::fill(&volume.file, size(options))?;
    let before = kernel::free_bytes(driver.state_dir())?;
    let begun = Instant::now();
    driver.snapshot("snapshot", &volume.id)?;
    let times: Samples = [begun.elapsed()].into_iter().collect();
    let used = before.saturating_sub(kernel::free_bytes(driver.state_dir())?);
    let ratio = times.median() / cost.times.median();
    let peer = format!("csi-driver-host-path: {}, {} of disk", times.times(), bytes(used));
    report.row(row.against(peer, ratio).must(FIVE_HUNDRED, ratio >= 500.0));
    Ok(())
}

/// How long a mounted filesystem is frozen, and the stall of a writer in it.
fn freeze(options: Options, report: &mut Report) -> Result<()> {
    let driver = Driver::start(64 << 30)?;
    let volume = driver.create(create("ext4", size(options), ext4()))?;
    let file = driver.publish_as(&volume, ext4())?.join("file");
    std::fs::File::create_new(&file)?;
    let pages: u64 = options.pick(16 << 10, 1 << 10);
    writer::fill(&file, pages * 4096)?;
    let blocks: Vec<u64> = (0..pages).collect();
    let idle = writer::write_during(&file, &blocks, 1, || {
        std::thread::sleep(Duration::from_millis(500));
        Ok(())
    })?;
    let (mut frozen, mut flush, mut clone, mut stalls) = (vec![], vec![], vec![], vec![]);
    let cost = driver.measure(1, options.pick(9, 2), |run| {
        let snapshot = writer::write_during(&file, &blocks, run as u64 + 2, || {
            let begun = Instant::now();
            driver.snapshot(&format!("snapshot-{run}"), &volume)?;
            Ok(begun.elapsed())
        })?;
        let steps = driver.last_snapshot_steps()?;
        if run > 0 {
            for (name, found) in
                [("frozen", &mut frozen), ("flush", &mut flush), ("clone", &mut clone)]
            {
                found.extend(steps.get(name).copied());
            }
            stalls.push(snapshot.longest);
        }
        Ok(snapshot.result)
    })?;
    let what = "CreateSnapshot of a mounted ext4 with a writer";
    report.row(Row::times("snapshot", what, &cost));
    let flush: Samples = flush.into_iter().collect();
    let clone: Samples = clone.into_iter().collect();
    let frozen: Samples = frozen.into_iter().collect();
    let parts = format!(
        "flush to the backing file {}, final FICLONE {}, FIFREEZE and FITHAW of ext4 {}",
        time(flush.median()),
        time(clone.median()),
        time((frozen.median() - flush.median() - clone.median()).max(0.0))
    );
    let row = Row::samples("snapshot", "frozen time of this call", &frozen, "seconds", time);
    report.row(row.against(parts, None));
    let stalls: Samples = stalls.into_iter().collect();
    report.row(
        Row::samples("snapshot", "longest stall of that 4 KiB writer", &stalls, "seconds", time)
            .against(
                format!("without a snapshot, in 0.5 s: {}", time(idle.longest.as_secs_f64())),
                None,
            ),
    );
    Ok(())
}
