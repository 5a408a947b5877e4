//! Runs a runtime's program: no shell, nothing of our environment, an end for all that it starts when its time is over, and no
//! more of what it says than there is room for.

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

use super::answer::printable;
use super::refusal::{Refusal, Result};
use crate::crust::{Problem, trust};

/// Bytes of standard output: all answers are much shorter.
const MAX_OUTPUT: usize = 64 << 10;
/// Bytes of what it says on standard error that are kept.
const MAX_ERRORS: usize = 4 << 10;
/// Bytes of that which a refusal repeats.
const MAX_SAID: usize = 512;
/// Exit code of a program that knows the volume, and that no container of it runs.
const NOT_RUNNING: i32 = 3;
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How programs are run.
#[derive(Debug, Clone)]
pub struct Runner {
    pub timeout: Duration,
    /// All of their environment but `PATH`.
    pub environment: Vec<(String, String)>,
}

impl Runner {
    /// What the program says when it succeeds. `action` is what it is to do, in words of ours.
    pub fn run(
        &self,
        program: &Path,
        action: &'static str,
        arguments: &[OsString],
    ) -> Result<Vec<u8>> {
        trust::program(program).map_err(|problem| match problem {
            // What is not there is no program.
            Problem::Io { source, .. } => unstartable(program, &source),
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
            .map_err(|error| unstartable(program, &error))?;
        let mut running = Running { child, ended: false };
        let said = running.listen(Instant::now() + self.timeout);
        let status = running.end();
        match said.map_err(|error| failed(program, action, error.to_string(), b""))? {
            Said::Overdue => {
                Err(Refusal::Overdue { program: program.to_owned(), action, limit: self.timeout })
            }
            Said::TooMuch => {
                Err(Refusal::TooMuch { program: program.to_owned(), action, limit: MAX_OUTPUT })
            }
            Said::All { output, errors } => {
                judge(program, action, status, &errors).map(|()| output)
            }
        }
    }
}

fn judge(
    program: &Path,
    action: &'static str,
    status: io::Result<ExitStatus>,
    errors: &[u8],
) -> Result<()> {
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) if status.code() == Some(NOT_RUNNING) => Err(Refusal::NotRunning(said(errors))),
        Ok(status) => Err(failed(program, action, status.to_string(), errors)),
        Err(error) => Err(failed(program, action, error.to_string(), errors)),
    }
}

fn unstartable(program: &Path, error: &io::Error) -> Refusal {
    Refusal::Unstartable { program: program.to_owned(), reason: error.to_string() }
}

fn failed(program: &Path, action: &'static str, how: String, errors: &[u8]) -> Refusal {
    Refusal::Failed { program: program.to_owned(), action, how, said: said(errors) }
}

fn said(errors: &[u8]) -> String {
    match printable(&String::from_utf8_lossy(errors), MAX_SAID) {
        said if said.is_empty() => "it does not say why".into(),
        said => said,
    }
}

enum Said {
    All { output: Vec<u8>, errors: Vec<u8> },
    Overdue,
    TooMuch,
}

/// A program, which does not outlive this, nor does what it has started.
struct Running {
    child: Child,
    ended: bool,
}

impl Running {
    /// Listens until it has ended, is out of time or has said too much.
    fn listen(&mut self, deadline: Instant) -> io::Result<Said> {
        let mut output = Pipe::new(self.child.stdout.take().map(OwnedFd::from), MAX_OUTPUT)?;
        let mut errors = Pipe::new(self.child.stderr.take().map(OwnedFd::from), MAX_ERRORS)?;
        let mut pause = Duration::from_millis(1);
        loop {
            let has_ended = self.has_ended()?;
            // Looked at after that: what was said before its end is all there.
            let something = output.drain()? | errors.drain()?;
            if output.overflown {
                return Ok(Said::TooMuch);
            }
            if has_ended {
                return Ok(Said::All { output: output.kept, errors: errors.kept });
            }
            if Instant::now() >= deadline {
                return Ok(Said::Overdue);
            }
            pause = if something {
                Duration::from_millis(1)
            } else {
                (pause * 2).min(Duration::from_millis(20))
            };
            thread::sleep(pause);
        }
    }

    /// It is not waited for yet: until then nobody else can have its number.
    fn has_ended(&self) -> io::Result<bool> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        match waitid(Id::Pid(self.pid()), flags) {
            Ok(WaitStatus::StillAlive) => Ok(false),
            Ok(_) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
    }

    fn pid(&self) -> Pid {
        // A process number fits: pid_t is what it came as.
        Pid::from_raw(i32::try_from(self.child.id()).unwrap_or(i32::MAX))
    }

    /// Ends it with all that it has started, as far as that has not left its process group.
    fn end(&mut self) -> io::Result<ExitStatus> {
        let _ = killpg(self.pid(), Signal::SIGKILL);
        self.ended = true;
        self.child.wait()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.end();
        }
    }
}

/// One end of a pipe that never holds us up.
struct Pipe {
    file: Option<File>,
    kept: Vec<u8>,
    room: usize,
    overflown: bool,
}

impl Pipe {
    fn new(end: Option<OwnedFd>, room: usize) -> io::Result<Self> {
        if let Some(end) = &end {
            fcntl(end.as_fd(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        Ok(Self { file: end.map(File::from), kept: Vec::new(), room, overflown: false })
    }

    /// Reads what is there now, up to a bound; whether there was something.
    fn drain(&mut self) -> io::Result<bool> {
        let Some(file) = &mut self.file else { return Ok(false) };
        let mut buffer = [0; 8192];
        let mut something = false;
        for _ in 0..16 {
            match file.read(&mut buffer) {
                Ok(0) => {
                    self.file = None;
                    break;
                }
                Ok(length) => {
                    something = true;
                    let fits = length.min(self.room - self.kept.len());
                    self.kept.extend_from_slice(&buffer[..fits]);
                    self.overflown |= fits < length;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(something)
    }
}
