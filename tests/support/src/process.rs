//! Programs as processes with a log. They end with the test, also after a panic, which prints the last
//! lines of the log.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::driver::PATIENCE;

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
        text_of(&self.log)
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
            print_end(&self.log);
        }
    }
}

/// A log, which may have any bytes; empty if it is missing.
pub fn text_of(log: &Path) -> String {
    String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).into_owned()
}

/// Prints the last lines of a log.
pub fn print_end(log: &Path) {
    let text = text_of(log);
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(30)..];
    println!("--- last lines of {} ---\n{}", log.display(), last.join("\n"));
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
