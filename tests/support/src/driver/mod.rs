//! The real binary as its clients see it: started on a socket in a private directory, stopped, killed
//! and started again; with a typed call for every RPC, its log, and a clean-up that runs whatever
//! happens and touches only what this driver made. The last lines of the log are printed when a test
//! panics.

mod clean_up;

use std::any::Any;
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use hyper_util::rt::TokioIo;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use csi::snapshot_metadata_client::SnapshotMetadataClient;

pub use super::kernel::*;
pub use super::requests::*;
use super::{ALL_KINDS, BLOCK, GIB, Xfs, have_root, keep, path, pool_block_size};

/// The binary under test, which cargo builds beside the tests.
pub fn binary() -> &'static str {
    static BINARY: LazyLock<String> = LazyLock::new(|| {
        let tests = std::env::current_exe().unwrap();
        let target = tests.ancestors().find(|directory| directory.ends_with("deps")).unwrap();
        path(&target.with_file_name("csi-loopback")).to_owned()
    });
    &BINARY
}

/// Within this time everything a test waits for has to happen.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// HTTP/2's smallest default: so much of an answer may be under way to a client that does not read.
const WINDOW: u32 = 65_535;

/// Runs a test against a driver with an image pool.
pub fn with_driver(run: impl FnOnce(&mut Driver)) {
    if have_root() {
        run(&mut Driver::start(PoolKind::Image));
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

/// Whether the kernel lets this process grow a mounted ext4.
pub fn ext4_grows_online() -> bool {
    const CAP_SYS_RESOURCE: u64 = 1 << 24;
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:\t")).unwrap();
    u64::from_str_radix(effective, 16).unwrap() & CAP_SYS_RESOURCE != 0
}

/// A driver and the directory that all of its files are in.
pub struct Driver {
    child: Option<Child>,
    /// What runs it, with its arguments, if it is not started as it is.
    program: Vec<String>,
    kind: PoolKind,
    flags: Vec<String>,
    place: PathBuf,
    channel: Option<Channel>,
    runtime: Runtime,
    /// What has been staged and published, to be undone at the end.
    in_use: Mutex<Vec<InUse>>,
    // Dropped in this order: the filesystem before its directory.
    xfs: Option<Xfs>,
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

    /// With these flags in addition to, or instead of, those that every test has.
    pub fn with(kind: PoolKind, flags: &[&str]) -> Self {
        Self::run_by(&[], kind, flags)
    }

    /// Run by another program, such as `unshare`, which has to end with it; of the driver's own process nothing is known then.
    pub fn run_by(program: &[&str], kind: PoolKind, flags: &[&str]) -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let xfs = (kind == PoolKind::Reflink).then(|| Xfs::mount(directory.path(), 16 * GIB));
        let place = xfs.as_ref().map_or(directory.path(), Xfs::path).to_owned();
        Self::assemble(program, kind, flags, place, xfs, directory)
    }

    /// With its data directory in `place`, where there may be one already.
    pub fn in_place(kind: PoolKind, place: &Path, flags: &[&str]) -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        Self::assemble(&[], kind, flags, place.to_owned(), None, directory)
    }

    fn assemble(
        program: &[&str],
        kind: PoolKind,
        flags: &[&str],
        place: PathBuf,
        xfs: Option<Xfs>,
        directory: TempDir,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let mut driver = Self {
            child: None,
            program: program.iter().map(|word| (*word).to_owned()).collect(),
            kind,
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
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

    /// A private directory, in which the test may do what it likes.
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

    /// The command line of the driver, with `flags` in the place of others of the same name.
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
            // Larger than what there is room for.
            command.args(["--pool-size", "16Gi", "--pool-sparse"]);
        }
        // So that what is allocated is known to 4 KiB. csi-sanity, the demo and the pools of the storage tests have the default.
        command.args(["--pool-block-size", &pool_block_size().unwrap_or(BLOCK).to_string()]);
        command.args(flags).stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    /// Starts the driver on the same directory and waits until it serves.
    pub fn start_again(&mut self) {
        self.try_start().unwrap_or_else(|error| panic!("{error}\n{}", self.log()));
    }

    /// Like [`Driver::start_again`]; an error when the driver ended before it served.
    pub fn try_start(&mut self) -> Result<(), String> {
        let flags = self.flags.clone();
        self.child = Some(self.spawn(&flags).unwrap());
        self.wait_until_served()
    }

    fn spawn(&self, flags: &[String]) -> std::io::Result<Child> {
        let log = File::options().create(true).append(true).open(self.log_path())?;
        self.command(flags).stderr(log).spawn()
    }

    fn wait_until_served(&mut self) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        while UnixStream::connect(self.socket()).is_err() {
            let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
            if let Some(status) = ended {
                self.child = None;
                return Err(format!("the driver ended: {status}"));
            }
            if Instant::now() > until {
                return Err("the driver does not serve".to_owned());
            }
            thread::sleep(Duration::from_millis(2));
        }
        let socket = self.socket();
        let _inside = self.runtime.enter();
        let channel = Endpoint::from_static("http://localhost")
            .initial_stream_window_size(WINDOW)
            .connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
                let socket = socket.clone();
                async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
            }));
        self.channel = Some(channel);
        Ok(())
    }

    /// Runs a second driver, which has to end by itself, with `flags` in the place of this one's.
    pub fn run_another(&self, flags: &[&str]) -> Output {
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let mut other = self.command(&flags).stderr(Stdio::piped()).spawn().unwrap();
        let status = wait(&mut other, PATIENCE);
        if status.is_none() {
            let _ = other.kill();
        }
        let output = other.wait_with_output().unwrap();
        assert!(status.is_some(), "a second driver runs with {flags:?}");
        output
    }

    /// Runs one of the commands for people against this driver.
    pub fn cli(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(binary());
        command.args(arguments).env("CSI_ENDPOINT", self.endpoint()).output().unwrap()
    }

    /// What such a command says on success, as JSON.
    pub fn cli_json(&self, arguments: &[&str]) -> serde_json::Value {
        let output = self.cli(&[arguments, &["--output", "json"]].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {said}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Whether it was started, and its end was not waited for.
    pub fn is_running(&self) -> bool {
        self.child.is_some()
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.as_ref().expect("the driver runs").id() as i32)
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Waits for the driver to end by itself.
    pub fn wait(&mut self) -> ExitStatus {
        let mut child = self.child.take().expect("the driver runs");
        let status = wait(&mut child, PATIENCE);
        if status.is_none() {
            let _ = child.kill();
            let _ = child.wait();
        }
        self.channel = None;
        status.expect("the driver ends")
    }

    /// SIGTERM, and waits for the end.
    pub fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.wait()
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        self.wait();
    }

    pub fn restart(&mut self) {
        assert!(self.stop().success());
        self.start_again();
    }

    /// Starts anew with other flags.
    pub fn restart_with(&mut self, flags: &[&str]) {
        self.flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        self.restart();
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("driver.log")
    }

    /// All that the driver has logged, over all of its starts.
    pub fn log(&self) -> String {
        let log = fs::read(self.log_path()).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    /// Makes a call and waits for its answer.
    pub fn call<R: Rpc>(&self, request: R) -> Result<R::Answer, Status> {
        self.note(&request);
        let done = undone_by(&request);
        let answer = self.send(request);
        if answer.is_ok()
            && let Some(done) = done
        {
            self.in_use().retain(|other| *other != done);
        }
        answer
    }

    /// Makes a call, again and again while another one holds its object.
    pub fn call_patiently<R: Rpc + Clone>(&self, request: R) -> Result<R::Answer, Status> {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.call(request.clone()) {
                Err(status) if status.code() == Code::Aborted && Instant::now() < until => {
                    thread::sleep(Duration::from_millis(1));
                }
                answer => return answer,
            }
        }
    }

    /// Makes a call that has to succeed.
    pub fn ok<R: Rpc>(&self, request: R) -> R::Answer {
        self.call(request).unwrap_or_else(|status| panic!("{status:?}"))
    }

    /// Makes a call that has to fail, with this code and with `words` in its message.
    pub fn refused<R: Rpc>(&self, request: R, code: Code, words: &str) {
        let said = format!("{request:?}");
        assert_refused(self.call(request), code, words, &said);
    }

    fn send<R: Rpc>(&self, request: R) -> Result<R::Answer, Status> {
        let channel = self.channel();
        self.block_on(async {
            match tokio::time::timeout(PATIENCE, request.send(channel)).await {
                Ok(answer) => answer,
                Err(_) => Err(Status::unknown("the test ran out of patience")),
            }
        })
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

    /// Notes what a request may leave behind, before it is made, by whomever.
    pub fn note(&self, request: &dyn Any) {
        let made = if let Some(asked) = request.downcast_ref::<csi::NodeStageVolumeRequest>() {
            InUse::Staged(asked.volume_id.clone(), asked.staging_target_path.clone())
        } else if let Some(asked) = request.downcast_ref::<csi::NodePublishVolumeRequest>() {
            InUse::Published(asked.volume_id.clone(), asked.target_path.clone())
        } else {
            return;
        };
        let mut in_use = self.in_use();
        in_use.retain(|other| *other != made);
        in_use.push(made);
    }

    /// Notes that somebody else stages and publishes the volume at its usual places.
    pub fn will_use(&self, volume_id: &str) {
        self.note(&self.staging_of(volume_id, &block()));
        self.note(&self.publishing(volume_id, &self.target(volume_id), &block()));
    }

    /// Creates a volume.
    pub fn volume(&self, name: &str, bytes: u64, wanted: csi::VolumeCapability) -> String {
        self.ok(create(name, bytes, wanted)).volume.unwrap().volume_id
    }

    /// Creates a volume from a source, as large as that.
    pub fn copy(&self, name: &str, source: Source<'_>, wanted: csi::VolumeCapability) -> String {
        let request = csi::CreateVolumeRequest {
            volume_content_source: Some(source.into()),
            ..create(name, 0, wanted)
        };
        self.ok(request).volume.unwrap().volume_id
    }

    pub fn snapshot(&self, name: &str, volume_id: &str) -> String {
        self.ok(cut(name, volume_id)).snapshot.unwrap().snapshot_id
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

    /// Stages the volume and returns where.
    pub fn stage(&self, volume_id: &str, wanted: &csi::VolumeCapability) -> PathBuf {
        self.ok(self.staging_of(volume_id, wanted));
        self.staging(volume_id)
    }

    /// Stages and publishes the volume and returns where.
    pub fn publish(&self, volume_id: &str, wanted: &csi::VolumeCapability) -> PathBuf {
        self.stage(volume_id, wanted);
        let target = self.target(volume_id);
        self.ok(self.publishing(volume_id, &target, wanted));
        target
    }

    /// Patiently: a tool that another thread of the test starts holds what this one has just closed,
    /// until it runs.
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

    /// Publishes a raw volume, runs `work` on its device and takes it down again.
    pub fn with_device<T>(&self, volume_id: &str, work: impl FnOnce(&Path) -> T) -> T {
        let device = self.publish(volume_id, &block());
        let result = work(&device);
        self.take_down(volume_id);
        result
    }

    /// The volume's backing file, where the kind of pool shows it to others.
    pub fn backing_file(&self, volume_id: &str) -> PathBuf {
        assert_ne!(self.kind, PoolKind::Image, "nobody else sees into an image pool");
        self.data_dir().join("volumes").join(volume_id)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(30)..];
            println!("--- the driver's log, last lines ---\n{}", last.join("\n"));
        }
        if keep() {
            println!("left in place: {}", self.directory.path().display());
            self.directory.disable_cleanup(true);
            return;
        }
        self.clean_up();
    }
}

fn wait(child: &mut Child, patience: Duration) -> Option<ExitStatus> {
    let until = Instant::now() + patience;
    while Instant::now() < until {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        thread::sleep(Duration::from_millis(2));
    }
    None
}

fn undone_by(request: &dyn Any) -> Option<InUse> {
    if let Some(asked) = request.downcast_ref::<csi::NodeUnstageVolumeRequest>() {
        return Some(InUse::Staged(asked.volume_id.clone(), asked.staging_target_path.clone()));
    }
    let asked = request.downcast_ref::<csi::NodeUnpublishVolumeRequest>()?;
    Some(InUse::Published(asked.volume_id.clone(), asked.target_path.clone()))
}
