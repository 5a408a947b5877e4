//! Memory of the driver: idle, and during a stream of 100 million extents.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use csi::snapshot_metadata_client::SnapshotMetadataClient;
use csi_loopback::proto::csi::v1 as csi;
use support::requests::delta;

use crate::Options;
use crate::harness::Driver;
use crate::kernel;
use crate::records::{self, Pattern};
use crate::report::{Report, Row};
use crate::stats::{bytes, grouped, millions, time};

const MIB: u64 = 1 << 20;

/// Time without calls before a driver is idle.
fn settled(options: Options) -> Duration {
    Duration::from_millis(options.pick(2000, 200))
}

pub fn idle(options: Options, report: &mut Report) -> Result<()> {
    let mut driver = Driver::start(16 << 30)?;
    measure_idle(options, report, &driver, "idle, new pool")?;
    let volumes = options.pick(100, 10);
    for number in 0..volumes {
        let volume = driver.volume(&format!("v{number}"), 1 << 30)?;
        driver.snapshot(&format!("s{number}"), &volume)?;
    }
    let with = format!("with {volumes} volumes and snapshots");
    measure_idle(options, report, &driver, &format!("idle, after creation of a pool {with}"))?;
    driver.stop()?;
    driver.restart()?;
    measure_idle(options, report, &driver, &format!("idle, started on a pool {with}"))
}

fn measure_idle(options: Options, report: &mut Report, driver: &Driver, what: &str) -> Result<()> {
    thread::sleep(settled(options));
    let resident = kernel::memory(driver.pid(), "smaps_rollup", "Rss")?;
    let proportional = kernel::memory(driver.pid(), "smaps_rollup", "Pss")?;
    let own = kernel::memory(driver.pid(), "smaps_rollup", "Anonymous")?;
    let clock = driver.cpu()?;
    thread::sleep(settled(options));
    let cpu = clock.spent().as_secs_f64() / settled(options).as_secs_f64();
    let peak = kernel::memory(driver.pid(), "status", "VmHWM")?;
    let measured = format!(
        "RSS {}, PSS {}, of which {} anonymous",
        bytes(resident),
        bytes(proportional),
        bytes(own)
    );
    let row = Row::value("idle", format!("memory of the driver, {what}"), measured);
    let row = row.against(format!("CPU while idle: {} per second", time(cpu)), None);
    report.row(row.spent(cpu, peak).must("under 20 MiB", resident < 20 * MIB));
    Ok(())
}

pub fn streaming(options: Options, report: &mut Report) -> Result<()> {
    let extents: u64 = options.pick(100_000_000, 1_000_000);
    let (driver, base, target) = records::driver_with_delta(extents)?;
    thread::sleep(settled(options));
    let pid = driver.pid();
    let idle = kernel::memory(pid, "status", "VmRSS")?;
    kernel::reset_peak(pid)?;
    let clock = driver.cpu()?;
    let done = AtomicBool::new(false);
    let (took, samples) = thread::scope(|scope| -> Result<_> {
        let sampling = scope.spawn(|| sample(pid, &done));
        let streamed = driver.runtime.block_on(verified(&driver, &base, &target, extents));
        done.store(true, Ordering::Relaxed);
        let samples = sampling.join().ok().context("the sampler panicked")??;
        Ok((streamed?, samples))
    })?;
    let cpu = clock.spent().as_secs_f64();
    let peak = kernel::memory(pid, "status", "VmHWM")?;
    let above = peak.saturating_sub(idle);
    // Flat: the peak of the second half is not above the peak of the first.
    let (early, late) = samples.split_at(samples.len() / 2);
    let most = |samples: &[(f64, f64)]| samples.iter().map(|(_, y)| *y).fold(0.0, f64::max);
    let growth = (most(late) - most(early)).max(0.0);
    let what = format!("memory while streaming {} extents", grouped(extents as i64));
    let measured = format!(
        "peak {} above idle ({}); second half {} MiB above the first",
        bytes(above),
        bytes(idle),
        (growth / MIB as f64).round()
    );
    let row = Row::value("memory", what, measured).spent(cpu, peak).against(
        format!(
            "{} in total, {}",
            time(took.as_secs_f64()),
            millions(extents as f64 / took.as_secs_f64())
        ),
        None,
    );
    let flat = above < 64 * MIB && growth < 4.0 * MIB as f64;
    report.row(row.must("flat, under 64 MiB above idle", flat));
    report.line("memory", "resident", samples);
    Ok(())
}

/// Streams to a client that decodes and checks each extent.
async fn verified(driver: &Driver, base: &str, target: &str, extents: u64) -> Result<Duration> {
    let mut client = SnapshotMetadataClient::new(driver.channel()?);
    let mut expected = Pattern::new(extents).bytes();
    let begun = Instant::now();
    let mut stream = client.get_metadata_delta(delta(base, target)).await?.into_inner();
    while let Some(message) = stream.message().await? {
        for extent in &message.block_metadata {
            let extent = (extent.byte_offset as u64, extent.size_bytes as u64);
            ensure!(expected.next() == Some(extent), "unexpected extent {extent:?}");
        }
    }
    ensure!(expected.next().is_none(), "extents are missing");
    Ok(begun.elapsed())
}

/// Samples of seconds and resident bytes, until `done`.
fn sample(pid: u32, done: &AtomicBool) -> Result<Vec<(f64, f64)>> {
    let begun = Instant::now();
    let mut samples = Vec::new();
    while !done.load(Ordering::Relaxed) {
        let resident = kernel::memory(pid, "status", "VmRSS")?;
        samples.push((begun.elapsed().as_secs_f64(), resident as f64));
        thread::sleep(Duration::from_millis(50));
    }
    Ok(samples)
}
