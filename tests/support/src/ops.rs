//! crust_ops as a process on a socket in a private directory, with a loop device for volumes, and
//! stand-ins for the programs of a runtime. Dropping it removes everything.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output};

use csi_loopback::crust::{Directory, Entry, Target};
use csi_loopback::proto::crust as api;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use api::runtime_client::RuntimeClient;
use api::volume_group_change_policy::Policy;
use api::volume_type::Type;

use super::driver::{PATIENCE, assert_refused, binary, channel_of};
use super::process::{Process, finish, text_of};
use super::{owned, path};

/// A loop device. Dropping it detaches the device.
#[derive(Debug)]
pub struct Device(String);

impl Device {
    pub fn new(directory: &Path, bytes: u64) -> Self {
        let image = directory.join("device.img");
        File::create(&image).unwrap().set_len(bytes).unwrap();
        Self::attach(&image, &[])
    }

    /// Attaches an image with flags of losetup.
    pub fn attach(image: &Path, flags: &[&str]) -> Self {
        let arguments = [&["--find", "--show"], flags, &[path(image)]].concat();
        let output = Command::new("losetup").args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self(String::from_utf8(output.stdout).unwrap().trim().to_owned())
    }

    pub fn path(&self) -> &str {
        &self.0
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

pub struct Ops {
    process: Option<Process>,
    flags: Vec<String>,
    runtime: Runtime,
    pub device: Device,
    directory: TempDir,
}

impl Ops {
    /// With these flags in addition to the defaults of the tests.
    pub fn start(flags: &[&str]) -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let mut ops = Self {
            process: None,
            flags: owned(flags),
            runtime: Runtime::new().unwrap(),
            device: Device::new(directory.path(), 16 << 20),
            directory,
        };
        ops.start_again();
        ops
    }

    pub fn scratch(&self) -> &Path {
        self.directory.path()
    }

    pub fn socket(&self) -> PathBuf {
        self.scratch().join("crust.sock")
    }

    pub fn crust_dir(&self) -> PathBuf {
        self.scratch().join("crust")
    }

    pub fn kata_dir(&self) -> PathBuf {
        self.scratch().join("direct-volumes")
    }

    /// Its command line. `flags` override defaults.
    fn command(&self, flags: &[String]) -> Command {
        let (socket, crust, kata) = (self.socket(), self.crust_dir(), self.kata_dir());
        let mut command = Command::new(binary());
        command.args(["--mode", "runtime-ops", "--log-level", "debug"]);
        for (flag, value) in [("--endpoint", socket), ("--crust-dir", crust), ("--kata-dir", kata)]
        {
            if !flags.iter().any(|given| given == flag) {
                command.args([flag, path(&value)]);
            }
        }
        command.args(flags);
        command
    }

    /// Starts it and waits until it is ready.
    pub fn start_again(&mut self) {
        let mut process = Process::spawn("ops", self.command(&self.flags), self.scratch());
        let socket = self.socket();
        process.wait_for("crust_ops is ready", |_| UnixStream::connect(&socket).ok());
        self.process = Some(process);
    }

    pub fn start_with(&mut self, flags: &[&str]) {
        self.flags = owned(flags);
        self.start_again();
    }

    /// Runs a second process, which must end by itself.
    pub fn run_another(&self, flags: &[&str]) -> Output {
        finish(self.command(&owned(flags)))
    }

    pub fn log(&self) -> String {
        text_of(&self.scratch().join("ops.log"))
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    pub fn pid(&self) -> Pid {
        self.process.as_ref().unwrap().pid()
    }

    pub fn wait(&mut self) -> ExitStatus {
        self.process.take().unwrap().wait(PATIENCE).unwrap()
    }

    pub fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.wait()
    }

    /// A new connection.
    fn client(&self) -> RuntimeClient<Channel> {
        let _inside = self.runtime.enter();
        RuntimeClient::new(channel_of(Endpoint::from_static("http://localhost"), self.socket()))
    }

    pub fn stage(&self, request: api::RuntimeStageVolumeRequest) -> Result<(), Status> {
        let mut client = self.client();
        self.runtime.block_on(client.runtime_stage_volume(request)).map(drop)
    }

    pub fn unstage(&self, target: &str) -> Result<(), Status> {
        let request = api::RuntimeUnstageVolumeRequest { volume_target_path: target.into() };
        let mut client = self.client();
        self.runtime.block_on(client.runtime_unstage_volume(request)).map(drop)
    }

    pub fn stats(&self, target: &str) -> Result<api::RuntimeGetVolumeStatsResponse, Status> {
        let request = api::RuntimeGetVolumeStatsRequest { volume_target_path: target.into() };
        let mut client = self.client();
        let response = self.runtime.block_on(client.runtime_get_volume_stats(request));
        response.map(tonic::Response::into_inner)
    }

    pub fn expand(&self, target: &str, required: i64, limit: i64) -> Result<i64, Status> {
        let range = api::CapacityRange { required_bytes: required, limit_bytes: limit };
        let request = api::RuntimeExpandVolumeRequest {
            volume_target_path: target.into(),
            capacity_range: Some(range),
        };
        let mut client = self.client();
        let response = self.runtime.block_on(client.runtime_expand_volume(request));
        response.map(|response| response.into_inner().capacity_bytes)
    }

    /// Creates a target directory.
    pub fn target(&self, name: &str) -> String {
        let target = self.scratch().join("targets").join(name);
        fs::create_dir_all(&target).unwrap();
        path(&target).to_owned()
    }

    /// A valid request to stage the device at the target.
    pub fn staging(&self, target: &str) -> api::RuntimeStageVolumeRequest {
        api::RuntimeStageVolumeRequest {
            volume_type: Some(api::VolumeType { r#type: Type::Block.into() }),
            volume_target_path: target.into(),
            volume_backing_path: self.device.path().into(),
            fs_type: "ext4".into(),
            mount_flags: vec!["noatime".into()],
            ..Default::default()
        }
    }

    pub fn entry(&self, target: &str) -> Entry {
        Directory::new(self.crust_dir()).entry(&Target::new("target", target).unwrap())
    }

    /// A shell script that only its owner can change.
    pub fn program(&self, name: &str, script: &str) -> PathBuf {
        let program = self.scratch().join(name);
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        program
    }

    /// Stages a volume that a runtime with this program has claimed.
    pub fn claimed(&self, name: &str, script: &str) -> String {
        let target = self.target(name);
        self.stage(self.staging(&target)).unwrap();
        let program = self.program(&format!("runtime-of-{name}"), script);
        self.entry(&target).write_runtime_cli(&program).unwrap();
        target
    }
}

pub fn policy(policy: Policy) -> Option<api::VolumeGroupChangePolicy> {
    Some(api::VolumeGroupChangePolicy { policy: policy.into() })
}

/// Asserts that a call failed with this code and with `words` in its message.
#[track_caller]
pub fn assert_code<T>(result: Result<T, Status>, code: Code, words: &str) {
    assert_refused(result, code, words, "crust_ops");
}
