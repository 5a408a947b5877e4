//! Runs a runtime's program: without a shell, with a clean environment, a timeout that kills its
//! process group, and limited output.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

use super::output::printable;
use super::refusal::{Refusal, Result};
use crate::crust::{Problem, trust};

/// Maximum bytes of standard output; valid output is much shorter.
const MAX_OUTPUT: usize = 64 << 10;
/// Maximum bytes of standard error that are kept.
const MAX_ERRORS: usize = 4 << 10;
/// Maximum bytes of standard error in an error.
const MAX_MESSAGE: usize = 512;
/// Exit code of a program for a volume without a running container.
const NOT_RUNNING: i32 = 3;
/// How long to wait for the end of a killed program.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How programs are run.
#[derive(Debug, Clone)]
pub struct Runner {
    pub timeout: Duration,
    /// The environment, in addition to `PATH`.
    pub environment: Vec<(String, String)>,
}

impl Runner {
    /// Runs the program and returns its standard output. `action` describes the command in errors.
    pub fn run(
        &self,
        program: &Path,
        action: &'static str,
        arguments: &[OsString],
    ) -> Result<Vec<u8>> {
        trust::program(program).map_err(|problem| match problem {
            // A missing file is an error of starting the program.
            Problem::Io { source, .. } => not_started(program, &source),
            problem => Refusal::Untrusted(problem.to_string()),
        })?;
        let child = Command::new(program)
            .args(arguments)
            .env_clear()
            .env("PATH", PATH)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| not_started(program, &error))?;
        let mut running = Running::new(child);
        let outcome = running.read_output(Instant::now() + self.timeout);
        let status = running.end();
        match outcome.map_err(|error| failed(program, action, error.to_string(), b""))? {
            Outcome::TimedOut => {
                Err(Refusal::TimedOut { program: program.to_owned(), action, limit: self.timeout })
            }
            Outcome::OutputTooLong => Err(Refusal::OutputTooLong {
                program: program.to_owned(),
                action,
                limit: MAX_OUTPUT,
            }),
            Outcome::Ended { output, errors } => {
                check_status(program, action, status, &errors).map(|()| output)
            }
        }
    }
}

fn check_status(
    program: &Path,
    action: &'static str,
    status: io::Result<ExitStatus>,
    errors: &[u8],
) -> Result<()> {
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) if status.code() == Some(NOT_RUNNING) => {
            Err(Refusal::NotRunning(message(errors)))
        }
        Ok(status) => Err(failed(program, action, status.to_string(), errors)),
        Err(error) => Err(failed(program, action, error.to_string(), errors)),
    }
}

fn not_started(program: &Path, error: &io::Error) -> Refusal {
    Refusal::NotStarted { program: program.to_owned(), reason: error.to_string() }
}

fn failed(program: &Path, action: &'static str, reason: String, errors: &[u8]) -> Refusal {
    Refusal::Failed { program: program.to_owned(), action, status: reason, stderr: message(errors) }
}

fn message(errors: &[u8]) -> String {
    match printable(&String::from_utf8_lossy(errors), MAX_MESSAGE) {
        message if message.is_empty() => "no message on standard error".into(),
        message => message,
    }
}

enum Outcome {
    Ended { output: Vec<u8>, errors: Vec<u8> },
    TimedOut,
    OutputTooLong,
}

/// A running program. It and its process group are killed on drop.
struct Running {
    pid: Pid,
    /// `None` after the end.
    child: Option<Child>,
}

impl Running {
    fn new(child: Child) -> Self {
        // A process id fits: it was a pid_t.
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX));
        Self { pid, child: Some(child) }
    }

    /// Reads until the program ends, times out or exceeds the output limit.
    fn read_output(&mut self, deadline: Instant) -> io::Result<Outcome> {
        let (stdout, stderr) = match &mut self.child {
            Some(child) => (child.stdout.take(), child.stderr.take()),
            None => (None, None),
        };
        let mut output = Pipe::new(stdout.map(OwnedFd::from), MAX_OUTPUT)?;
        let mut errors = Pipe::new(stderr.map(OwnedFd::from), MAX_ERRORS)?;
        let mut pause = Duration::from_millis(1);
        loop {
            let has_ended = self.has_ended()?;
            // Read after this check, so that all output before the end is included.
            let has_data = output.drain()? | errors.drain()?;
            if output.overflowed {
                return Ok(Outcome::OutputTooLong);
            }
            if has_ended {
                return Ok(Outcome::Ended { output: output.kept, errors: errors.kept });
            }
            if Instant::now() >= deadline {
                return Ok(Outcome::TimedOut);
            }
            pause = if has_data {
                Duration::from_millis(1)
            } else {
                (pause * 2).min(Duration::from_millis(20))
            };
            thread::sleep(pause);
        }
    }

    /// The process is not reaped yet, so that its id, and process group, cannot be reused.
    fn has_ended(&self) -> io::Result<bool> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        match waitid(Id::Pid(self.pid), flags) {
            Ok(WaitStatus::StillAlive) => Ok(false),
            Ok(_) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Kills and reaps the program with its process group. Processes that left the group survive.
    /// A program that waits for a device cannot be killed at once: a thread reaps it later, so that
    /// the call ends.
    fn end(&mut self) -> io::Result<ExitStatus> {
        let Some(mut child) = self.child.take() else { return Err(io::ErrorKind::NotFound.into()) };
        let _ = killpg(self.pid, Signal::SIGKILL);
        let deadline = Instant::now() + KILL_TIMEOUT;
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                thread::spawn(move || child.wait());
                return Err(io::Error::other("it cannot be killed: it waits for a device"));
            }
            thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// The reading end of a pipe, nonblocking and limited to `capacity` bytes.
struct Pipe {
    file: Option<File>,
    kept: Vec<u8>,
    capacity: usize,
    overflowed: bool,
}

impl Pipe {
    fn new(end: Option<OwnedFd>, capacity: usize) -> io::Result<Self> {
        if let Some(end) = &end {
            fcntl(end.as_fd(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        Ok(Self { file: end.map(File::from), kept: Vec::new(), capacity, overflowed: false })
    }

    /// Reads available data, up to a limit. Returns whether there was any.
    fn drain(&mut self) -> io::Result<bool> {
        let Some(file) = &mut self.file else { return Ok(false) };
        let mut buffer = [0; 8192];
        let mut has_data = false;
        for _ in 0..16 {
            match file.read(&mut buffer) {
                Ok(0) => {
                    self.file = None;
                    break;
                }
                Ok(length) => {
                    has_data = true;
                    let fits = length.min(self.capacity - self.kept.len());
                    self.kept.extend_from_slice(&buffer[..fits]);
                    self.overflowed |= fits < length;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(has_data)
    }
}
