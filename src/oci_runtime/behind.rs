//! The runtime behind: everything is passed on to it, in its place or, where there is something left to do afterwards, as a
//! child.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;
use serde::Deserialize;

use crate::backend::sys;

/// How long it may take to say how a container is.
const STATE_DEADLINE: Duration = Duration::from_secs(10);
/// What it says of one has less.
const STATE_BYTES: u64 = 1 << 20;

/// What it is asked to do, in its own words.
#[derive(Debug, Clone, Copy)]
pub struct Behind<'a> {
    pub program: &'a Path,
    pub arguments: &'a [OsString],
}

impl Behind<'_> {
    /// Becomes it. Returns only where that fails.
    pub fn exec(&self) -> Result<ExitCode> {
        let error = Command::new(self.program).args(self.arguments).exec();
        Err(error).with_context(|| format!("starting {} (runtime)", self.program.display()))
    }

    /// Runs it to its end, with all signals passed on. It ends when this process does.
    pub fn run(&self) -> Result<ExitStatus> {
        // Those that tell of this process's own faults, and those that stop it, are not for others.
        let mut passed = SigSet::all();
        for own in [
            Signal::SIGSEGV,
            Signal::SIGBUS,
            Signal::SIGFPE,
            Signal::SIGILL,
            Signal::SIGTRAP,
            Signal::SIGSYS,
            Signal::SIGABRT,
            Signal::SIGTSTP,
            Signal::SIGTTIN,
            Signal::SIGTTOU,
            Signal::SIGCONT,
            Signal::SIGPIPE,
        ] {
            passed.remove(own);
        }
        sigprocmask(SigmaskHow::SIG_BLOCK, Some(&passed), None).context("blocking signals")?;
        let signals = SignalFd::with_flags(&passed, SfdFlags::SFD_CLOEXEC).context("signalfd")?;
        let mut command = Command::new(self.program);
        sys::end_with_caller(command.args(self.arguments));
        let mut child = command
            .spawn()
            .with_context(|| format!("starting {} (runtime)", self.program.display()))?;
        loop {
            if let Some(status) = child.try_wait().context("waiting for the runtime")? {
                return Ok(status);
            }
            let Some(signal) = signals.read_signal().context("reading signals")? else { continue };
            // What comes from a terminal has reached the child by itself.
            let Ok(number) = i32::try_from(signal.ssi_signo) else { continue };
            if number != libc::SIGCHLD && signal.ssi_code <= 0 {
                pass_on(&child, number);
            }
        }
    }
}

fn pass_on(child: &Child, number: i32) {
    if let (Ok(pid), Ok(signal)) = (i32::try_from(child.id()), Signal::try_from(number)) {
        // It may have ended just now.
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

/// The exit code of a process in whose place this one is called.
pub fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// What `state` says (OCI runtime specification, State).
#[derive(Debug, Deserialize)]
struct State {
    status: String,
    #[serde(default)]
    pid: u32,
}

/// The first process of a container, as the runtime knows it. None: there is no such container, or it has ended.
pub fn process_of(program: &Path, root: Option<&str>, container: &str) -> Result<Option<u32>> {
    let mut command = Command::new(program);
    if let Some(root) = root {
        command.args(["--root", root]);
    }
    command.args(["state", container]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child =
        command.spawn().with_context(|| format!("starting {} (runtime)", program.display()))?;
    let Some(output) = child.stdout.take() else { bail!("{} has no output", program.display()) };
    let reader = std::thread::spawn(move || -> io::Result<Vec<u8>> {
        let mut said = Vec::new();
        output.take(STATE_BYTES).read_to_end(&mut said)?;
        Ok(said)
    });
    let until = Instant::now() + STATE_DEADLINE;
    let status = loop {
        match child.try_wait().context("waiting for the runtime")? {
            Some(status) => break status,
            None if Instant::now() > until => {
                let _ = child.kill();
                let _ = child.wait();
                bail!("{} state {container}: takes too long", program.display());
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let said = reader.join().map_err(|_| anyhow::anyhow!("reading a container's state"))?;
    if !status.success() {
        return Ok(None);
    }
    let state: State = serde_json::from_slice(&said?)
        .with_context(|| format!("{} state {container}", program.display()))?;
    Ok(Some(state.pid).filter(|pid| *pid != 0 && state.status != "stopped"))
}
