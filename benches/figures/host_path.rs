//! The peer csi-driver-host-path. CSI_HOSTPATH_BIN is its binary; CSI_HOSTPATH_MISSING is the
//! reason if there is none. Its snapshots are full copies of preallocated files, and its
//! SnapshotMetadata reads both copies, so it needs time and space.

use std::cell::RefCell;
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use support::requests::{Rpc, block, create, create_snapshot, delete_volume};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::transport::Channel;

use crate::calls::{self, Metadata};
use crate::harness::{connect, run, text};
use crate::kernel::{self, CpuClock};

/// Results of earlier runs on other machines, for orientation only; never the base of a ratio.
pub const DELTA_ELSEWHERE: &str = "last measured elsewhere: 8 to 28 s, 7 to 9 s of CPU";
pub const SNAPSHOT_ELSEWHERE: &str = "last measured elsewhere: 27 to 48 s and 10 GiB of disk";

pub fn missing(reason: &anyhow::Error) -> String {
    format!("csi-driver-host-path: not available ({reason:#})")
}

pub struct HostPath {
    child: Child,
    channel: Channel,
    runtime: Runtime,
    volumes: RefCell<Vec<String>>,
    directory: TempDir,
}

pub struct Volume {
    pub id: String,
    /// The backing file of its loop device.
    pub file: PathBuf,
}

impl HostPath {
    /// Starts it in a new directory in TMPDIR, which must have `space` free bytes.
    pub fn start(space: u64) -> Result<Self> {
        let Some(binary) = std::env::var_os("CSI_HOSTPATH_BIN") else {
            let reason = std::env::var("CSI_HOSTPATH_MISSING");
            bail!(reason.unwrap_or_else(|_| "CSI_HOSTPATH_BIN is not set".to_owned()));
        };
        let directory = TempDir::with_prefix("host-path-")?;
        let free = kernel::free_bytes(directory.path())?;
        ensure!(
            free > space + (2 << 30),
            "TMPDIR has {free} bytes, the peer needs {space} and 2 GiB of reserve"
        );
        let socket = directory.path().join("csi.sock");
        let log = File::create(directory.path().join("driver.log"))?;
        let mut child = Command::new(&binary)
            .arg(format!("--endpoint=unix://{}", socket.display()))
            .arg(format!("--statedir={}", directory.path().join("state").display()))
            .args(["--drivername=hostpath.csi.k8s.io", "--nodeid=bench"])
            .arg("--enable-snapshot-metadata=true")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .with_context(|| format!("starting {binary:?}"))?;
        let until = Instant::now() + Duration::from_secs(20);
        while UnixStream::connect(&socket).is_err() {
            if child.try_wait()?.is_some() || Instant::now() > until {
                let _ = child.kill();
                let _ = child.wait();
                let log = fs::read_to_string(directory.path().join("driver.log"));
                bail!("it did not start: {}", log.unwrap_or_default().trim());
            }
            thread::sleep(Duration::from_millis(10));
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let channel = connect(&runtime, socket);
        Ok(Self { child, channel, runtime, volumes: RefCell::default(), directory })
    }

    fn call<R: Rpc>(&self, request: R) -> Result<R::Response> {
        Ok(self.runtime.block_on(request.send(self.channel.clone()))?)
    }

    pub fn state_dir(&self) -> &Path {
        self.directory.path()
    }

    pub fn cpu(&self) -> Result<CpuClock> {
        CpuClock::of(self.child.id())
    }

    /// A raw block volume.
    pub fn volume(&self, name: &str, bytes: u64) -> Result<Volume> {
        let response = self.call(create(name, bytes, block()))?;
        let id = response.volume.context("no volume in the response")?.volume_id;
        self.volumes.borrow_mut().push(id.clone());
        let file = self.directory.path().join("state").join(&id);
        Ok(Volume { id, file })
    }

    pub fn snapshot(&self, name: &str, volume_id: &str) -> Result<String> {
        let response = self.call(create_snapshot(name, volume_id))?;
        Ok(response.snapshot.context("no snapshot in the response")?.snapshot_id)
    }

    /// The loop device of a raw block volume, which the peer creates with the volume.
    pub fn device(&self, volume: &Volume) -> Result<PathBuf> {
        let devices =
            run("losetup", &["--noheadings", "--output", "NAME", "-j", text(&volume.file)])?;
        let device = devices.lines().next().context("the volume has no loop device")?;
        Ok(PathBuf::from(device.trim()))
    }

    /// Gets its delta with its default number of extents per message.
    pub fn get_delta(&self, base: &str, target: &str) -> Result<Metadata> {
        self.runtime.block_on(calls::get_metadata(self.channel.clone(), Some(base), target, 0))
    }
}

impl Drop for HostPath {
    fn drop(&mut self) {
        for id in self.volumes.borrow_mut().drain(..) {
            // The peer can keep the loop device of a deleted volume: detach the devices on this
            // run's file.
            let _ = self.call(delete_volume(&id));
            let file = self.directory.path().join("state").join(&id);
            let devices = run("losetup", &["--noheadings", "--output", "NAME", "-j", text(&file)]);
            for device in devices.unwrap_or_default().lines() {
                let _ = run("losetup", &["--detach", device.trim()]);
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
