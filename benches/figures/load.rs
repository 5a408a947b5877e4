//! fio on a block device, and a plain loop device for comparison.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use support::ops::Device;

use crate::harness::run;

/// A plain loop device with direct I/O and the sector size of a volume.
pub fn plain_loop(file: &Path) -> Device {
    Device::attach(file, &["--sector-size", "4096", "--direct-io=on"])
}

/// Whether fio is installed.
pub fn is_available() -> bool {
    Command::new("fio").arg("--version").output().is_ok()
}

/// Direct I/O at queue depth 16 (libaio).
#[derive(Debug, Clone, Copy, Default)]
pub struct Load {
    /// fio's `rw`: randwrite, write, …
    pub pattern: &'static str,
    /// fio's `bs`: 4k, 128k.
    pub block_size: &'static str,
    pub milliseconds: u64,
    /// End after this number of operations, too; 0: no limit.
    pub operations: u64,
    /// Flush after this number of writes; 0: never.
    pub flush_every: u32,
    /// Flush the device after the last write, as part of the measured time.
    pub flushes_at_end: bool,
    /// Some offsets are much more frequent than others, as in databases (zipf 1.1).
    pub is_skewed: bool,
    /// Whether each run uses each offset once, in the same order. Otherwise offsets are random and
    /// can repeat.
    pub repeats: bool,
}

/// The result of a load.
#[derive(Debug, Clone, Copy)]
pub struct LoadResult {
    pub bytes_per_second: f64,
    pub iops: f64,
    /// The 99th percentile of the time from submission to completion, in seconds.
    pub p99: f64,
    /// The longest time from submission to completion, in seconds.
    pub longest: f64,
    /// Bytes written to the disk of TMPDIR, by any process, per written byte of the load.
    pub written: Option<f64>,
}

/// Bytes written so far to the disk that contains TMPDIR. `None` if the kernel does not count them.
fn disk_bytes() -> Option<u64> {
    let device = fs::metadata(std::env::temp_dir()).ok()?.dev();
    let (major, minor) = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
    let counters = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).ok()?;
    // Documentation/block/stat.rst: 6 is sectors of 512 bytes written.
    Some(counters.split_whitespace().nth(6)?.parse::<u64>().ok()? * 512)
}

impl Load {
    pub fn run(&self, device: &Path) -> Result<LoadResult> {
        let job = [
            format!("--filename={}", device.display()),
            format!("--rw={}", self.pattern),
            format!("--bs={}", self.block_size),
            format!("--runtime={}ms", self.milliseconds),
            format!("--fsync={}", self.flush_every),
            format!("--number_ios={}", self.operations),
        ];
        let mut arguments = vec!["--name=figure", "--time_based", "--output-format=json"];
        arguments.extend(["--ioengine=libaio", "--iodepth=16", "--direct=1"]);
        arguments.extend(job.iter().map(String::as_str));
        arguments.extend(match self.repeats {
            true => &["--randrepeat=1"][..],
            false => &["--randrepeat=0", "--norandommap"],
        });
        if self.is_skewed {
            arguments.push("--random_distribution=zipf:1.1");
        }
        if self.pattern == "randrw" {
            arguments.push("--rwmixread=70");
        }
        let before = disk_bytes();
        let output = run("fio", &arguments)?;
        let ended = Instant::now();
        if self.flushes_at_end {
            File::open(device)?.sync_all()?;
        }
        let flush = ended.elapsed().as_secs_f64();
        let written = disk_bytes().zip(before).map(|(now, before)| now.saturating_sub(before));
        let json = output.find('{').map(|start| &output[start..]).context("fio printed no JSON")?;
        let output: serde_json::Value =
            serde_json::from_str(json).context("parsing the output of fio")?;
        let job = &output["jobs"][0];
        let number = |value: &serde_json::Value| value.as_f64().unwrap_or_default();
        let sides = ["read", "write"].map(|side| &job[side]);
        let sum = |name: &str| sides.iter().map(|side| number(&side[name])).sum::<f64>();
        let percentile =
            |side: &&serde_json::Value| number(&side["clat_ns"]["percentile"]["99.000000"]);
        let maximum = |side: &&serde_json::Value| number(&side["clat_ns"]["max"]);
        let runtime = (number(&job["job_runtime"]) / 1e3).max(1e-3);
        let part = runtime / (runtime + if self.flushes_at_end { flush } else { 0.0 });
        let result = LoadResult {
            bytes_per_second: sum("bw_bytes") * part,
            iops: sum("iops") * part,
            p99: sides.iter().map(percentile).fold(0.0, f64::max) / 1e9,
            longest: sides.iter().map(maximum).fold(0.0, f64::max) / 1e9,
            written: written.map(|bytes| bytes as f64 / number(&job["write"]["io_bytes"]).max(1.0)),
        };
        ensure!(result.iops > 0.0, "fio reported no I/O");
        Ok(result)
    }
}
