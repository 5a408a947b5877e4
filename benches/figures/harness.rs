//! The shipped driver on a new pool: an XFS in a sparse image in TMPDIR, on a loop device with
//! direct I/O. The benchmarks can access the mounted pool, to fill a volume without its device and
//! to read records. Dropping a [`Driver`] removes everything.

use std::cell::RefCell;
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use csi_loopback::proto::csi::v1 as csi;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use support::requests::{block, channel_of, create, create_snapshot};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};

use crate::calls::InUse;
use crate::kernel::{self, CpuClock};
use crate::raw::WINDOWS;
use crate::stats::Samples;

pub const BINARY: &str = env!("CARGO_BIN_EXE_csi-loopback");

/// Time limit for a driver to start or to stop.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a program and returns its output. Fails if the program fails.
pub fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.with_context(|| format!("running {program}"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {arguments:?}: {stderr}");
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// A directory with a mounted XFS in it.
pub struct Pool {
    directory: TempDir,
}

/// Properties of a new pool.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    pub bytes: u64,
    /// Bytes per block of its filesystem.
    pub block_size: u64,
    /// Whether the image is allocated, as in an image pool, or sparse.
    pub is_allocated: bool,
}

impl Pool {
    pub fn new(layout: Layout) -> Result<Self> {
        let pool = Self { directory: TempDir::with_prefix("figures-")? };
        let image = pool.directory().join("xfs.img");
        File::create(&image)?.set_len(layout.bytes)?;
        if layout.is_allocated {
            run("fallocate", &["--length", &layout.bytes.to_string(), text(&image)])?;
        }
        let block_size = format!("size={}", layout.block_size);
        // -K: otherwise mkfs discards the space of an allocated image.
        run(
            "mkfs.xfs",
            &["-q", "-K", "-m", "reflink=1,rmapbt=0", "-b", &block_size, text(&image)],
        )?;
        fs::create_dir(pool.path())?;
        let attach = ["--find", "--show", "--direct-io=on", text(&image)];
        let device = run("losetup", &attach)?;
        // As the driver mounts an image.
        let path = pool.path();
        let mounted = run("mount", &["-t", "xfs", "-o", "logbsize=256k", &device, text(&path)]);
        // The mount keeps the device until it is unmounted.
        run("losetup", &["--detach", &device])?;
        mounted.map(|_| pool)
    }

    /// Directory for files outside of the pool.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn path(&self) -> PathBuf {
        self.directory().join("xfs")
    }

    pub fn data_dir(&self) -> PathBuf {
        self.path().join("data")
    }

    /// The backing file of a volume.
    pub fn volume(&self, id: &str) -> PathBuf {
        self.data_dir().join("volumes").join(id)
    }

    pub fn snapshot(&self, id: &str) -> PathBuf {
        self.data_dir().join("snapshots").join(id)
    }

    /// The first generation of a snapshot's change record.
    pub fn record(&self, id: &str) -> PathBuf {
        self.data_dir().join("records").join(format!("{id}.0"))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for _ in 0..50 {
            if Command::new("umount")
                .arg(self.path())
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|s| s.success())
            {
                break;
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Time and resources that the driver used.
#[derive(Debug, Clone, Default)]
pub struct Cost {
    /// Wall time in seconds.
    pub times: Samples,
    /// The driver's processor time per run, in seconds.
    pub cpu: f64,
    /// Peak resident memory of the driver, in bytes.
    pub peak: u64,
}

/// The duration of each step of CreateSnapshot from the driver's log, in seconds.
pub type SnapshotSteps = std::collections::BTreeMap<String, f64>;

pub struct Driver {
    pub pool: Pool,
    pub runtime: Runtime,
    child: Option<Child>,
    channel: Option<Channel>,
    pub(crate) in_use: RefCell<Vec<InUse>>,
}

impl Driver {
    /// Starts a driver on a new sparse pool of `size` bytes.
    pub fn start(size: u64) -> Result<Self> {
        Self::start_on(Layout { bytes: size, block_size: 4096, is_allocated: false })
    }

    pub fn start_on(layout: Layout) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let pool = Pool::new(layout)?;
        let mut driver =
            Self { pool, runtime, child: None, channel: None, in_use: RefCell::default() };
        driver.restart()?;
        Ok(driver)
    }

    pub fn socket(&self) -> PathBuf {
        self.pool.directory().join("csi.sock")
    }

    fn log_path(&self) -> PathBuf {
        self.pool.directory().join("driver.log")
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().map(Child::id).unwrap_or_default()
    }

    pub fn restart(&mut self) -> Result<()> {
        self.start_within(PATIENCE)
    }

    pub fn start_within(&mut self, patience: Duration) -> Result<()> {
        let log = File::options().create(true).append(true).open(self.log_path())?;
        let mut command = Command::new(BINARY);
        command
            .args(["--mode", "driver", "--pool", "reflink", "--node-id", "bench"])
            // Sparse volumes of terabytes.
            .args(["--overcommit", "1000000", "--log-format", "json"])
            .args(["--log-level", "info,csi_loopback::storage::take_snapshot=debug"])
            .arg(format!("--endpoint=unix://{}", self.socket().display()))
            .arg(format!("--data-dir={}", self.pool.data_dir().display()))
            .env_remove("CSI_ENDPOINT")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let mut child = command.spawn().with_context(|| format!("starting {BINARY}"))?;
        let until = Instant::now() + patience;
        while UnixStream::connect(self.socket()).is_err() {
            if child.try_wait()?.is_some() || Instant::now() > until {
                let _ = child.kill();
                bail!("the driver did not start: {}", self.log());
            }
            thread::sleep(Duration::from_millis(2));
        }
        self.child = Some(child);
        self.channel = Some(connect(&self.runtime, self.socket()));
        Ok(())
    }

    pub fn stop(&mut self) -> Result<()> {
        self.channel = None;
        let Some(mut child) = self.child.take() else { return Ok(()) };
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM)?;
        let until = Instant::now() + PATIENCE;
        while child.try_wait()?.is_none() {
            if Instant::now() > until {
                child.kill()?;
                child.wait()?;
                bail!("the driver did not stop");
            }
            // Not thread::sleep: the client must process GOAWAY, or the driver waits for the
            // connection.
            self.runtime.block_on(async { tokio::time::sleep(Duration::from_millis(5)).await });
        }
        Ok(())
    }

    pub fn kill(&mut self) -> Result<()> {
        self.channel = None;
        let Some(mut child) = self.child.take() else { return Ok(()) };
        child.kill()?;
        child.wait()?;
        // The stale socket file would look like a running driver.
        fs::remove_file(self.socket()).context("removing the socket")
    }

    pub fn channel(&self) -> Result<Channel> {
        self.channel.clone().context("the driver is not running")
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// The steps of the newest snapshot.
    pub fn last_snapshot_steps(&self) -> Result<SnapshotSteps> {
        let log = self.log();
        let parse = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok();
        let mut lines =
            log.lines().rev().filter(|line| line.contains("\"took a snapshot\"")).filter_map(parse);
        let line = lines
            .find(|line| line["message"] == "took a snapshot")
            .context("the driver logged no snapshot steps")?;
        let fields = line.as_object().context("a log line is no object")?.iter();
        let step = |(name, value): (&String, &serde_json::Value)| {
            Some((name.strip_suffix("_us")?.to_owned(), value.as_f64()? / 1e6))
        };
        Ok(fields.filter_map(step).collect())
    }

    pub fn cpu(&self) -> Result<CpuClock> {
        CpuClock::of(self.pid())
    }

    /// Calls `run` `warm` times unmeasured and then `runs` times, with the number of the run. It
    /// returns the duration of the measured part.
    pub fn measure(
        &self,
        warm: usize,
        runs: usize,
        mut run: impl FnMut(usize) -> Result<Duration>,
    ) -> Result<Cost> {
        for number in 0..warm {
            run(number)?;
        }
        kernel::reset_peak(self.pid())?;
        let clock = self.cpu()?;
        let times = (warm..warm + runs).map(run).collect::<Result<Vec<Duration>>>()?;
        let cpu = clock.spent().as_secs_f64() / runs as f64;
        let peak = kernel::memory(self.pid(), "status", "VmHWM")?;
        Ok(Cost { times: times.into_iter().collect(), cpu, peak })
    }

    /// Creates an unpublished raw block volume.
    pub fn volume(&self, name: &str, bytes: u64) -> Result<String> {
        self.create(create(name, bytes, block()))
    }

    pub fn create(&self, request: csi::CreateVolumeRequest) -> Result<String> {
        Ok(self.call(request)?.volume.context("no volume in the response")?.volume_id)
    }

    pub fn snapshot(&self, name: &str, volume_id: &str) -> Result<String> {
        let response = self.call(create_snapshot(name, volume_id))?;
        Ok(response.snapshot.context("no snapshot in the response")?.snapshot_id)
    }
}

/// A channel to a unix socket.
pub fn connect(runtime: &Runtime, socket: PathBuf) -> Channel {
    let _inside = runtime.enter();
    channel_of(endpoint(), socket)
}

/// An endpoint with flow-control windows that do not limit a stream.
pub fn endpoint() -> Endpoint {
    Endpoint::from_static("http://localhost")
        .initial_stream_window_size(WINDOWS.0)
        .initial_connection_window_size(WINDOWS.1)
}

impl Drop for Driver {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.release();
        }
        if let Err(error) = self.stop() {
            eprintln!("stopping the driver: {error:#}");
        }
    }
}
