//! `backup` and `restore` of a full 10 GiB volume, and of 0.1 % of it changed at random: time,
//! bytes read and memory, with a full read-and-compare and restic on the same volume; and memory
//! for a smaller volume.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use support::random::Random;

use crate::harness::{BINARY, Driver, run, text};
use crate::kernel;
use crate::report::{Report, Row};
use crate::stats::{bytes, time};
use crate::{Options, peers, writer};

/// What a command took.
pub(super) struct Spent {
    time: Duration,
    cpu: Duration,
    peak: u64,
    output: String,
}

impl Spent {
    pub(super) fn describe(&self) -> String {
        time(self.time.as_secs_f64())
    }

    /// The row with processor time and peak memory of the command.
    pub(super) fn cost(&self, row: Row) -> Row {
        row.spent(self.cpu.as_secs_f64(), self.peak)
    }

    /// A field of the JSON that the command printed.
    fn number(&self, field: &str) -> Result<u64> {
        let value: serde_json::Value = serde_json::from_str(&self.output)?;
        value[field].as_u64().with_context(|| format!("{field} is missing in {}", self.output))
    }
}

/// Runs a command to its end, and reads its peak of memory meanwhile.
pub(super) fn spend(command: &mut Command) -> Result<Spent> {
    let (begun, cpu) = (Instant::now(), kernel::children_cpu()?);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let pid = child.id();
    let sampler = thread::spawn(move || {
        let mut peak = 0;
        while let Ok(memory) = kernel::memory(pid, "status", "VmHWM") {
            peak = memory.max(peak);
            thread::sleep(Duration::from_millis(20));
        }
        peak
    });
    let output = child.wait_with_output()?;
    let (time, cpu) = (begun.elapsed(), kernel::children_cpu()? - cpu);
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {error}");
    let peak = sampler.join().unwrap_or_default();
    Ok(Spent { time, cpu, peak, output: String::from_utf8_lossy(&output.stdout).into_owned() })
}

pub(super) fn command(driver: &Driver, repository: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    command
        .args(arguments)
        .args(["--repository", text(repository), "--output", "json"])
        .env("CSI_ENDPOINT", format!("unix://{}", driver.socket().display()));
    command
}

/// Overwrites blocks of a volume at random.
fn change(file: &Path, size: u64, blocks: u64) -> Result<()> {
    writer::change(file, &Random::new(5).distinct(blocks as usize, size / 4096), 9)
}

pub fn measure(options: Options, report: &mut Report) -> Result<()> {
    let size = options.pick(10 << 30, 64 << 20);
    let driver = Driver::start(64 << 30)?;
    let volume = driver.volume("backup", size)?;
    let file = driver.pool.volume(&volume);
    writer::fill(&file, size)?;
    let base = driver.snapshot("base", &volume)?;
    let place = driver.pool.directory().join("repository");

    let disk = sequential(&driver.pool.snapshot(&base), size)?;
    let share = |spent: &Spent| {
        let rate = size as f64 / spent.time.as_secs_f64();
        format!(
            "{} of the disk's sequential read rate of {}/s",
            percent(rate / disk),
            bytes(disk as u64)
        )
    };
    let full = spend(&mut command(&driver, &place, &["backup", "create", "base"]))?;
    let what = format!("full backup of {}, data everywhere", bytes(size));
    let row = Row::value("backup", what, format!("{}, {}", full.describe(), share(&full)));
    report.row(full.cost(row));

    let changed = size / 4096 / 1000;
    change(&file, size, changed)?;
    let target = driver.snapshot("target", &volume)?;
    let mut create = command(&driver, &place, &["backup", "create", "target", "--base", "auto"]);
    let incremental = spend(&mut create)?;
    let read = incremental.number("data_bytes")? + incremental.number("zero_bytes")?;
    ensure!(read == changed * 4096, "the backup has {read} bytes");
    compare_and_restic(options, report, &driver, [&base, &target], &incremental, read)?;

    let restored = driver.pool.directory().join("restored");
    let restore = ["restore", "target", "--to", text(&restored)];
    let spent = spend(&mut command(&driver, &place, &restore))?;
    let what = format!("restore of {} from a full and an incremental backup", bytes(size));
    let row = Row::value("backup", what, format!("{}, {}", spent.describe(), share(&spent)));
    report.row(spent.cost(row));

    let device = driver.publish(&volume)?;
    let restore = ["restore", "base", "--to", text(&device), "--from", "target"];
    let in_place = spend(&mut command(&driver, &place, &restore))?;
    ensure!(in_place.number("written_bytes")? == changed * 4096, "{}", in_place.output);
    driver.release();
    let what = format!("restore of {} in place, 0.1 % changed at random", bytes(size));
    let ratio = spent.time.as_secs_f64() / in_place.time.as_secs_f64();
    let measured = format!("{}, {ratio:.0}× faster than the whole", in_place.describe());
    report.row(in_place.cost(Row::value("backup", what, measured)));
    memory(options, report, &driver, size, changed, [full.peak, incremental.peak, spent.peak])
}

/// Reports the peak memory of a full backup, an incremental one and a restore for two sizes, with
/// as many changed blocks.
fn memory(
    options: Options,
    report: &mut Report,
    driver: &Driver,
    size: u64,
    changed: u64,
    large: [u64; 3],
) -> Result<()> {
    // A smaller restore does not fill its queues.
    let small_size = options.pick(4 << 30, 8 << 20);
    let small = peaks(driver, small_size, changed)?;
    let shown = |size: u64, peaks: [u64; 3]| {
        let [full, incremental, restore] = peaks.map(bytes);
        format!("{}: {full}, {incremental}, {restore}", bytes(size))
    };
    let measured = format!("{}; {}", shown(small_size, small), shown(size, large));
    let is_flat = small.iter().zip(large).all(|(small, large)| large <= *small * 5 / 4);
    let what = "peak memory of a full backup, an incremental one and a restore, by size";
    let reached = (!options.quick).then_some(is_flat);
    report.row(Row::value("backup", what, measured).must("flat in size (25 %)", reached));
    Ok(())
}

/// Peak memory of these commands for a volume of this size.
fn peaks(driver: &Driver, size: u64, changed: u64) -> Result<[u64; 3]> {
    let volume = driver.volume("small", size)?;
    let file = driver.pool.volume(&volume);
    let place = driver.pool.directory().join("small-repository");
    let run = |arguments: &[&str]| {
        Ok::<_, anyhow::Error>(spend(&mut command(driver, &place, arguments))?.peak)
    };
    writer::fill(&file, size)?;
    driver.snapshot("small-base", &volume)?;
    let full = run(&["backup", "create", "small-base"])?;
    change(&file, size, changed)?;
    driver.snapshot("small-target", &volume)?;
    let incremental = run(&["backup", "create", "small-target", "--base", "auto"])?;
    let restored = driver.pool.directory().join("small-restored");
    let restore = run(&["restore", "small-target", "--to", text(&restored)])?;
    Ok([full, incremental, restore])
}

/// Bytes per second of a cold read of 1 MiB at a time.
fn sequential(file: &Path, size: u64) -> Result<f64> {
    kernel::uncache(file)?;
    let begun = Instant::now();
    run("dd", &[&format!("if={}", file.display()), "of=/dev/null", "bs=1M"])?;
    Ok(size as f64 / begun.elapsed().as_secs_f64())
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

fn compare_and_restic(
    options: Options,
    report: &mut Report,
    driver: &Driver,
    snapshots: [&String; 2],
    incremental: &Spent,
    read: u64,
) -> Result<()> {
    let files = snapshots.map(|id| driver.pool.snapshot(id));
    let size = files[0].metadata()?.len();
    peers::make_cold([&files[0], &files[1]])?;
    let compared = peers::compare(&files[0], &files[1], 1 << 20, u64::MAX)?;
    let row = || {
        let what = format!("incremental backup of {}, 0.1 % changed at random", bytes(size));
        let measured = format!("{}, {} read", incremental.describe(), bytes(read));
        incremental.cost(Row::value("backup", what, measured))
    };
    let ratio = |peer: Duration| peer.as_secs_f64() / incremental.time.as_secs_f64();
    let peer = format!(
        "read and compare: {}, {} read",
        time(compared.time.as_secs_f64()),
        bytes(2 * size)
    );
    report.row(row().against(peer, ratio(compared.time)));
    match restic(options, driver, &files) {
        Ok(second) => {
            let peer = format!("restic: {}, {} read", second.describe(), bytes(size));
            report.row(row().against(peer, ratio(second.time)));
        }
        Err(error) => report.row(row().against(format!("restic: {error:#}"), None)),
    }
    Ok(())
}

/// The second of two backups by restic, which knows the first.
fn restic(options: Options, driver: &Driver, files: &[std::path::PathBuf; 2]) -> Result<Spent> {
    let place = driver.pool.directory().join("restic");
    let restic = |arguments: &[&str]| {
        let mut command = Command::new("restic");
        command
            .args(["--no-cache", "--repo", text(&place)])
            .args(arguments)
            .env("RESTIC_PASSWORD", "bench");
        command
    };
    if restic(&["version"]).output().is_err() {
        anyhow::bail!("not installed");
    }
    spend(&mut restic(&["init"]))?;
    let mut second = None;
    for file in files {
        kernel::uncache(file)?;
        let mut backup = restic(&["backup", "--stdin", "--stdin-filename", "volume"]);
        second = Some(spend(backup.stdin(fs::File::open(file)?))?);
    }
    if !options.quick {
        fs::remove_dir_all(&place)?;
    }
    second.context("restic made no backup")
}
