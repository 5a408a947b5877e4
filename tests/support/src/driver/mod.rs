//! The driver binary as a process on a socket in a private directory, with typed calls for every
//! RPC and access to its log. Its cleanup also runs after a panic and removes only what this driver
//! created. When a test panics, the last lines of the log are printed.

mod clean_up;

use std::any::Any;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use csi::snapshot_metadata_client::SnapshotMetadataClient;

pub use super::kernel::*;
use super::process::{Process, finish, print_end, text_of};
pub use super::requests::*;
use super::{ALL_KINDS, BLOCK, GIB, ImageFs, have_root, keep, owned, path, pool_block_size};

/// The binary under test, which cargo builds with the tests.
pub fn binary() -> &'static str {
    static BINARY: LazyLock<String> = LazyLock::new(|| {
        let tests = std::env::current_exe().unwrap();
        let target = tests.ancestors().find(|directory| directory.ends_with("deps")).unwrap();
        path(&target.with_file_name("csi-loopback")).to_owned()
    });
    &BINARY
}

/// Time limit of every wait.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// HTTP/2's default window: the bytes in flight to a client that does not read.
const WINDOW: u32 = 65_535;

/// A driver with these flags. Reports a skip if the machine cannot run it.
pub fn driver_with(kind: PoolKind, flags: &[&str]) -> Option<Driver> {
    have_root().then(|| Driver::with(kind, flags))
}

/// Runs a test against a driver with an image pool.
pub fn with_driver(run: impl FnOnce(&mut Driver)) {
    if let Some(mut driver) = driver_with(PoolKind::Image, &[]) {
        run(&mut driver);
    }
}

/// Runs a test against a driver of each kind of pool.
pub fn for_each_driver(run: impl Fn(&mut Driver)) {
    if !have_root() {
        return;
    }
    for kind in ALL_KINDS {
        println!("with a pool of kind {kind}");
        run(&mut Driver::start(kind));
    }
}

/// Whether this process has the capability to grow a mounted ext4.
pub fn ext4_grows_online() -> bool {
    const CAP_SYS_RESOURCE: u64 = 1 << 24;
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:\t")).unwrap();
    u64::from_str_radix(effective, 16).unwrap() & CAP_SYS_RESOURCE != 0
}

/// A driver, and the directory of all its files.
pub struct Driver {
    process: Option<Process>,
    /// A program with arguments that runs the driver, if any.
    program: Vec<String>,
    kind: PoolKind,
    flags: Vec<String>,
    place: PathBuf,
    channel: Option<Channel>,
    runtime: Runtime,
    /// Staged and published volumes, for the cleanup.
    in_use: Mutex<Vec<InUse>>,
    // Dropped in this order: the filesystem before its directory.
    xfs: Option<ImageFs>,
    directory: TempDir,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum InUse {
    Staged(String, String),
    Published(String, String),
}

impl Driver {
    pub fn start(kind: PoolKind) -> Self {
        Self::with(kind, &[])
    }

    /// With these flags, which override the defaults of the tests.
    pub fn with(kind: PoolKind, flags: &[&str]) -> Self {
        Self::run_by(&[], kind, flags)
    }

    /// Run by another program, such as `unshare`, which must end with the driver. [`Driver::pid`]
    /// is then the program's.
    pub fn run_by(program: &[&str], kind: PoolKind, flags: &[&str]) -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let xfs = (kind == PoolKind::Reflink).then(|| ImageFs::xfs(directory.path(), 16 * GIB));
        let place = xfs.as_ref().map_or(directory.path(), ImageFs::path).to_owned();
        Self::assemble(program, kind, flags, place, xfs, directory)
    }

    /// With its data directory in `place`, which can have one.
    pub fn in_place(kind: PoolKind, place: &Path, flags: &[&str]) -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        Self::assemble(&[], kind, flags, place.to_owned(), None, directory)
    }

    fn assemble(
        program: &[&str],
        kind: PoolKind,
        flags: &[&str],
        place: PathBuf,
        xfs: Option<ImageFs>,
        directory: TempDir,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let mut driver = Self {
            process: None,
            program: owned(program),
            kind,
            flags: owned(flags),
            place,
            channel: None,
            runtime,
            in_use: Mutex::new(Vec::new()),
            xfs,
            directory,
        };
        driver.start_again();
        driver
    }

    pub fn kind(&self) -> PoolKind {
        self.kind
    }

    /// A private directory for the test.
    pub fn scratch(&self) -> &Path {
        self.directory.path()
    }

    pub fn data_dir(&self) -> PathBuf {
        self.place.join("data")
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("csi.sock")
    }

    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// The command line of the driver. `flags` override defaults.
    fn command(&self, flags: &[String]) -> Command {
        let (endpoint, data_dir) = (self.endpoint(), self.data_dir().display().to_string());
        let kind = self.kind.to_string();
        let defaults = [
            ("--endpoint", endpoint.as_str()),
            ("--data-dir", &data_dir),
            ("--pool", &kind),
            ("--node-id", "node-1"),
        ];
        let mut line = self.program.iter().map(String::as_str).chain([binary()]);
        let mut command = Command::new(line.next().unwrap());
        command
            .args(line)
            .args(["--mode", "driver"])
            .env_remove("CSI_ENDPOINT")
            .env_remove("NODE_ID");
        for (flag, value) in defaults {
            if !flags.iter().any(|given| given == flag) {
                command.args([flag, value]);
            }
        }
        if !flags.iter().any(|flag| flag.starts_with("--pool-size")) {
            // Larger than the free space of test machines.
            command.args(["--pool-size", "16Gi", "--pool-sparse"]);
        }
        // Blocks of 4 KiB, so that allocations are exact. csi-sanity, the demo and the storage
        // tests use the default.
        command.args(["--pool-block-size", &pool_block_size().unwrap_or(BLOCK).to_string()]);
        command.args(flags);
        command
    }

    /// Starts the driver on the same directory and waits until it is ready.
    pub fn start_again(&mut self) {
        self.try_start().unwrap_or_else(|error| panic!("{error}\n{}", self.log()));
    }

    /// Like [`Driver::start_again`], but returns an error if the driver ends before it is ready.
    pub fn try_start(&mut self) -> Result<(), String> {
        self.start_with(&self.flags.clone())
    }

    fn start_with(&mut self, flags: &[String]) -> Result<(), String> {
        let socket = self.socket();
        let mut process = Process::spawn("driver", self.command(flags), self.scratch());
        // The end of the log is printed also if the driver does not run at the end of the test.
        process.quiet = true;
        let process = self.process.insert(process);
        let until = Instant::now() + PATIENCE;
        while UnixStream::connect(&socket).is_err() {
            if let Some(status) = process.ended() {
                self.process = None;
                return Err(format!("the driver ended: {status}"));
            }
            if Instant::now() > until {
                return Err("the driver did not start".to_owned());
            }
            thread::sleep(Duration::from_millis(2));
        }
        self.channel = Some(self.channel_to(socket));
        Ok(())
    }

    /// A connection to another socket.
    pub fn channel_to(&self, socket: PathBuf) -> Channel {
        let _inside = self.runtime.enter();
        let endpoint = Endpoint::from_static("http://localhost");
        channel_of(endpoint.initial_stream_window_size(WINDOW), socket)
    }

    /// Runs a second driver with other `flags`, which must end by itself.
    pub fn run_another(&self, flags: &[&str]) -> Output {
        finish(self.command(&owned(flags)))
    }

    /// Runs a client command with this driver.
    pub fn cli(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(binary());
        command.args(arguments).env("CSI_ENDPOINT", self.endpoint()).output().unwrap()
    }

    /// The JSON output of a client command, which must succeed.
    pub fn cli_json(&self, arguments: &[&str]) -> serde_json::Value {
        let output = self.cli(&[arguments, &["--output", "json"]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {stderr}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Whether it was started and not stopped.
    pub fn is_running(&self) -> bool {
        self.process.is_some()
    }

    pub fn pid(&self) -> Pid {
        self.process.as_ref().expect("the driver runs").pid()
    }

    pub fn signal(&self, signal: Signal) {
        self.process.as_ref().expect("the driver runs").signal(signal);
    }

    /// Waits until the driver ends by itself.
    pub fn wait(&mut self) -> ExitStatus {
        let status = self.process.take().expect("the driver runs").wait(PATIENCE);
        self.channel = None;
        self.wait_until_closed();
        status.expect("the driver ends")
    }

    /// Waits until the socket of a driver that ended is closed: a tool that a killed one was
    /// starting holds its descriptors until it executes. A later start would take that socket for
    /// its own.
    pub fn wait_until_closed(&self) {
        wait_for("the ended driver's socket is closed", || {
            UnixStream::connect(self.socket()).is_err()
        });
    }

    /// Sends SIGTERM and waits for the end.
    pub fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.wait()
    }

    /// Sends SIGKILL and waits for the end.
    pub fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        self.wait();
    }

    pub fn restart(&mut self) {
        assert!(self.stop().success());
        self.start_again();
    }

    /// Restarts with other flags.
    pub fn restart_with(&mut self, flags: &[&str]) {
        self.flags = owned(flags);
        self.restart();
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("driver.log")
    }

    /// The log of all runs of the driver.
    pub fn log(&self) -> String {
        text_of(&self.log_path())
    }

    /// Makes a call and waits for its response.
    pub fn call<R: Rpc>(&self, request: R) -> Result<R::Response, Status> {
        self.note(&request);
        let released = released_by(&request);
        let response = self.send(request);
        if response.is_ok()
            && let Some(released) = released
        {
            self.in_use().retain(|other| *other != released);
        }
        response
    }

    /// Makes a call, and repeats it while it returns ABORTED.
    pub fn call_patiently<R: Rpc + Clone>(&self, request: R) -> Result<R::Response, Status> {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.call(request.clone()) {
                Err(status) if status.code() == Code::Aborted && Instant::now() < until => {
                    thread::sleep(Duration::from_millis(1));
                }
                response => return response,
            }
        }
    }

    /// Makes a call that must succeed.
    pub fn ok<R: Rpc>(&self, request: R) -> R::Response {
        self.call(request).unwrap_or_else(|status| panic!("{status:?}"))
    }

    /// Makes a call that must fail with this code and with `words` in its message.
    pub fn refused<R: Rpc>(&self, request: R, code: Code, words: &str) {
        let call = format!("{request:?}");
        assert_refused(self.call(request), code, words, &call);
    }

    fn send<R: Rpc>(&self, request: R) -> Result<R::Response, Status> {
        self.block_on(call_through(self.channel(), request))
    }

    pub fn channel(&self) -> Channel {
        self.channel.clone().expect("the driver runs")
    }

    pub fn metadata(&self) -> SnapshotMetadataClient<Channel> {
        SnapshotMetadataClient::new(self.channel())
    }

    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    fn in_use(&self) -> std::sync::MutexGuard<'_, Vec<InUse>> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records for the cleanup that a client is about to make this request.
    pub fn note(&self, request: &dyn Any) {
        let used = if let Some(stage) = request.downcast_ref::<csi::NodeStageVolumeRequest>() {
            InUse::Staged(stage.volume_id.clone(), stage.staging_target_path.clone())
        } else if let Some(publish) = request.downcast_ref::<csi::NodePublishVolumeRequest>() {
            InUse::Published(publish.volume_id.clone(), publish.target_path.clone())
        } else {
            return;
        };
        let mut in_use = self.in_use();
        in_use.retain(|other| *other != used);
        in_use.push(used);
    }

    /// Records for the cleanup that another process stages and publishes the volume at its default
    /// paths.
    pub fn will_use(&self, volume_id: &str) {
        self.note(&self.staging_of(volume_id, &block()));
        self.note(&self.publishing(volume_id, &self.target(volume_id), &block()));
    }

    /// Creates a volume.
    pub fn volume(&self, name: &str, bytes: u64, wanted: csi::VolumeCapability) -> String {
        self.ok(create(name, bytes, wanted)).volume.unwrap().volume_id
    }

    /// Creates a volume with the content and size of a source.
    pub fn copy(&self, name: &str, source: Source<'_>, wanted: csi::VolumeCapability) -> String {
        let request = csi::CreateVolumeRequest {
            volume_content_source: Some(source.into()),
            ..create(name, 0, wanted)
        };
        self.ok(request).volume.unwrap().volume_id
    }

    pub fn snapshot(&self, name: &str, volume_id: &str) -> String {
        self.ok(create_snapshot(name, volume_id)).snapshot.unwrap().snapshot_id
    }

    pub fn staging(&self, volume_id: &str) -> PathBuf {
        self.directory.path().join(format!("staging-{volume_id}"))
    }

    pub fn target(&self, volume_id: &str) -> PathBuf {
        self.directory.path().join(format!("target-{volume_id}"))
    }

    /// A request to stage the volume at [`Driver::staging`].
    pub fn staging_of(
        &self,
        volume_id: &str,
        wanted: &csi::VolumeCapability,
    ) -> csi::NodeStageVolumeRequest {
        csi::NodeStageVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: self.staging(volume_id).display().to_string(),
            volume_capability: Some(wanted.clone()),
            ..Default::default()
        }
    }

    /// A request to publish the volume from [`Driver::staging`] at `target`.
    pub fn publishing(
        &self,
        volume_id: &str,
        target: &Path,
        wanted: &csi::VolumeCapability,
    ) -> csi::NodePublishVolumeRequest {
        csi::NodePublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: self.staging(volume_id).display().to_string(),
            target_path: target.display().to_string(),
            volume_capability: Some(wanted.clone()),
            ..Default::default()
        }
    }

    /// Stages the volume, as patiently as a kubelet, and returns the staging path.
    pub fn stage(&self, volume_id: &str, wanted: &csi::VolumeCapability) -> PathBuf {
        self.call_patiently(self.staging_of(volume_id, wanted)).unwrap();
        self.staging(volume_id)
    }

    /// Stages and publishes the volume and returns the target path.
    pub fn publish(&self, volume_id: &str, wanted: &csi::VolumeCapability) -> PathBuf {
        self.stage(volume_id, wanted);
        let target = self.target(volume_id);
        self.call_patiently(self.publishing(volume_id, &target, wanted)).unwrap();
        target
    }

    /// Repeats the call while the volume is in use: between fork and exec, a tool of another test
    /// thread holds files that this thread has closed.
    pub fn unpublish(&self, volume_id: &str, target: &Path) {
        self.call_patiently(unpublishing(volume_id, path(target))).unwrap();
    }

    pub fn unstage(&self, volume_id: &str) {
        self.call_patiently(unstaging(volume_id, path(&self.staging(volume_id)))).unwrap();
    }

    /// Undoes [`Driver::publish`].
    pub fn take_down(&self, volume_id: &str) {
        self.unpublish(volume_id, &self.target(volume_id));
        self.unstage(volume_id);
    }

    /// Publishes a raw block volume, runs `work` on its device, and unpublishes it.
    pub fn with_device<T>(&self, volume_id: &str, work: impl FnOnce(&Path) -> T) -> T {
        let device = self.publish(volume_id, &block());
        let result = work(&device);
        self.take_down(volume_id);
        result
    }

    /// The volume's backing file. Not for image pools, which are mounted only in the driver's
    /// namespace.
    pub fn backing_file(&self, volume_id: &str) -> PathBuf {
        assert_ne!(self.kind, PoolKind::Image, "the files of an image pool are not visible");
        self.data_dir().join("volumes").join(volume_id)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if thread::panicking() {
            print_end(&self.log_path());
        }
        if keep() {
            println!("kept: {}", self.directory.path().display());
            std::mem::forget(self.process.take());
            self.directory.disable_cleanup(true);
            return;
        }
        self.clean_up();
    }
}

/// What a request releases.
fn released_by(request: &dyn Any) -> Option<InUse> {
    if let Some(unstage) = request.downcast_ref::<csi::NodeUnstageVolumeRequest>() {
        return Some(InUse::Staged(unstage.volume_id.clone(), unstage.staging_target_path.clone()));
    }
    let unpublish = request.downcast_ref::<csi::NodeUnpublishVolumeRequest>()?;
    Some(InUse::Published(unpublish.volume_id.clone(), unpublish.target_path.clone()))
}
