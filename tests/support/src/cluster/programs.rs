//! Released Kubernetes programs as processes with a log. They end with the test, also after a
//! panic, which prints the last lines of the log.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::Cluster;
use super::tls::Certificate;
use crate::driver::PATIENCE;
use crate::path;

/// Time limit for a process to stop before it is killed.
const CLEAN_UP: Duration = Duration::from_secs(20);

/// A process of a test.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    status: Option<ExitStatus>,
    /// Do not print the log when a test panics.
    pub quiet: bool,
}

impl Process {
    /// Starts a process with its output in NAME.log in `directory`.
    pub fn spawn(name: &str, mut command: Command, directory: &Path) -> Self {
        let log = directory.join(format!("{name}.log"));
        let file = File::options().create(true).append(true).open(&log).unwrap();
        command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
        let child = command.spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
        Self { name: name.to_owned(), child, log, status: None, quiet: false }
    }

    /// Its output.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.status = self.status.or_else(|| self.child.try_wait().unwrap());
        self.status
    }

    /// Waits until it ends by itself.
    pub fn wait(&mut self, patience: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + patience;
        while self.ended().is_none() && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        self.status
    }

    /// Sends SIGTERM, and SIGKILL after a time limit.
    pub fn stop(&mut self) {
        if self.ended().is_some() {
            return;
        }
        let _ = kill(self.pid(), Signal::SIGTERM);
        if self.wait(CLEAN_UP).is_none() {
            println!("{} did not stop and was killed", self.name);
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    /// Waits until `poll` returns a value. Panics if the process ends before.
    pub fn wait_for<T>(&mut self, what: &str, mut poll: impl FnMut(&Self) -> Option<T>) -> T {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = poll(self) {
                return found;
            }
            let ended = self.ended();
            assert!(ended.is_none(), "{} ended before {what}: {ended:?}", self.name);
            assert!(Instant::now() < until, "{}: timeout: {what}", self.name);
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop();
        if thread::panicking() && !self.quiet {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(30)..];
            println!("--- last lines of {} ---\n{}", self.log.display(), last.join("\n"));
        }
    }
}

/// Runs a command. Panics if it does not end in time.
pub fn finish(command: Command) -> Output {
    finish_within(PATIENCE, command)
}

/// Runs a command. Panics if it does not end in this time.
pub fn finish_within(limit: Duration, mut command: Command) -> Output {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let pid = Pid::from_raw(child.id() as i32);
    let (done, waiting) = std::sync::mpsc::channel();
    let reader = thread::spawn(move || {
        let _ = done.send(child.wait_with_output().unwrap());
    });
    let output = waiting.recv_timeout(limit).unwrap_or_else(|_| {
        let _ = kill(pid, Signal::SIGKILL);
        panic!("{command:?} exceeded its time limit")
    });
    reader.join().unwrap();
    output
}

/// The output of a successful command. Panics if the command failed.
#[track_caller]
pub fn stdout_of(output: Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// The offset and size in each row of the lister's table.
pub fn table_extents(table: &str) -> Vec<(u64, u64)> {
    let rows = table.lines().skip(2);
    rows.map(|row| {
        let numbers: Vec<&str> = row.split_whitespace().collect();
        (numbers[3].parse().unwrap(), numbers[4].parse().unwrap())
    })
    .collect()
}

/// The offset and size of each extent in the lister's JSON, which omits an offset of zero.
pub fn json_extents(json: &Value) -> Vec<(u64, u64)> {
    let messages = json.as_array().unwrap().iter();
    messages
        .flat_map(|message| message["block_metadata"].as_array().unwrap())
        .map(|one| (one["byte_offset"].as_u64().unwrap_or(0), one["size_bytes"].as_u64().unwrap()))
        .collect()
}

/// A free port of 127.0.0.1 below the ephemeral ports. Each call of a process returns another port.
pub fn free_port() -> u16 {
    static NEXT: OnceLock<AtomicU32> = OnceLock::new();
    let next = NEXT.get_or_init(|| AtomicU32::new(getrandom::u32().unwrap() % 12_000));
    loop {
        let port = 20_000 + (next.fetch_add(1, Ordering::Relaxed) % 12_000) as u16;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}

impl Cluster {
    pub fn spawn(&self, name: &str, command: Command) -> Process {
        Process::spawn(&self.unique(name), command, self.scratch())
    }

    /// Starts csi-snapshotter for the driver on the socket, as administrator. Concurrent drivers
    /// need different names: two csi-snapshotters for one name process the same snapshots.
    pub fn snapshotter(&self, socket: &Path) -> Process {
        self.snapshotter_as(&self.kubeconfig(), socket)
    }

    /// The same as the user of the kubeconfig.
    pub fn snapshotter_as(&self, kubeconfig: &Path, socket: &Path) -> Process {
        let mut command = Command::new(self.tool("csi-snapshotter"));
        command
            .args(["-kubeconfig", path(kubeconfig), "-csi-address", path(socket)])
            .args(["-retry-interval-start=200ms", "-retry-interval-max=2s"])
            .args(["-kube-api-qps=100", "-kube-api-burst=200"]);
        self.spawn("csi-snapshotter", command)
    }

    /// Starts the released sidecar for the driver on the socket, with additional `flags`, and waits
    /// until it is ready.
    pub fn released_sidecar(
        &self,
        socket: &Path,
        kubeconfig: &Path,
        certificate: &Certificate,
        flags: &[&str],
    ) -> Served {
        let (port, http_port) = (free_port(), free_port());
        let mut command = Command::new(self.tool("csi-snapshot-metadata"));
        command
            .args(["-csi-address", path(socket), "-kubeconfig", path(kubeconfig)])
            .args(["-tls-cert", path(&certificate.file), "-tls-key", path(&certificate.key)])
            .arg(format!("-port={port}"))
            .arg(format!("-http-endpoint=127.0.0.1:{http_port}"))
            .args(flags);
        let mut process = self.spawn("csi-snapshot-metadata", command);
        // It listens on this port after it has read the driver's capabilities.
        process.wait_for("it is ready", |_| TcpStream::connect(("127.0.0.1", http_port)).ok());
        Served { process, port, http_port }
    }

    /// Runs the released lister as the user of the kubeconfig.
    pub fn lister(&self, kubeconfig: &Path, arguments: &[&str]) -> Output {
        self.released_client("snapshot-metadata-lister", kubeconfig, arguments)
    }

    /// Runs the released verifier as the user of the kubeconfig.
    pub fn verifier(&self, kubeconfig: &Path, arguments: &[&str]) -> Output {
        self.released_client("snapshot-metadata-verifier", kubeconfig, arguments)
    }

    fn released_client(&self, name: &str, kubeconfig: &Path, arguments: &[&str]) -> Output {
        let mut command = Command::new(self.tool(name));
        command.args(["-kubeconfig", path(kubeconfig)]).args(arguments);
        finish(command)
    }
}

/// A running server.
pub struct Served {
    pub process: Process,
    /// Port of the service, with TLS.
    pub port: u16,
    /// Port of health and metrics.
    pub http_port: u16,
}

impl Served {
    /// The service's address in a SnapshotMetadataService.
    pub fn address(&self) -> String {
        format!("localhost:{}", self.port)
    }
}
