//! The next runtime, runc by default. It replaces this process or, if work remains afterwards, runs
//! as a child.

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

/// Timeout of the `state` command.
const STATE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of the output of `state`.
const STATE_BYTES: u64 = 1 << 20;

/// The next runtime and its command line.
#[derive(Debug, Clone, Copy)]
pub struct NextRuntime<'a> {
    pub program: &'a Path,
    pub arguments: &'a [OsString],
}

impl NextRuntime<'_> {
    /// Replaces this process. Returns only on failure.
    pub fn exec(&self) -> Result<ExitCode> {
        let error = Command::new(self.program).args(self.arguments).exec();
        Err(error).with_context(|| format!("starting {} (next runtime)", self.program.display()))
    }

    /// Runs it as a child and forwards all signals. The child is killed when this process ends.
    pub fn run(&self) -> Result<ExitStatus> {
        // Signals about this process's own faults, and job control, are not forwarded.
        let mut forwarded = SigSet::all();
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
            forwarded.remove(own);
        }
        sigprocmask(SigmaskHow::SIG_BLOCK, Some(&forwarded), None).context("blocking signals")?;
        let signals =
            SignalFd::with_flags(&forwarded, SfdFlags::SFD_CLOEXEC).context("signalfd")?;
        let mut command = Command::new(self.program);
        sys::kill_with_parent(command.args(self.arguments));
        let mut child = command
            .spawn()
            .with_context(|| format!("starting {} (next runtime)", self.program.display()))?;
        loop {
            if let Some(status) = child.try_wait().context("waiting for the next runtime")? {
                return Ok(status);
            }
            let Some(signal) = signals.read_signal().context("reading signals")? else { continue };
            // The child receives the terminal's signals itself.
            let Ok(number) = i32::try_from(signal.ssi_signo) else { continue };
            if number != libc::SIGCHLD && signal.ssi_code <= 0 {
                forward_signal(&child, number);
            }
        }
    }
}

fn forward_signal(child: &Child, number: i32) {
    if let (Ok(pid), Ok(signal)) = (i32::try_from(child.id()), Signal::try_from(number)) {
        // The child may have just ended.
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

/// The exit code of this process for the exit status of the child.
pub fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// The output of `state` (OCI runtime specification, State).
#[derive(Debug, Deserialize)]
struct State {
    status: String,
    #[serde(default)]
    pid: u32,
}

/// The first process of a container, as reported by the runtime. `None`: the container does not
/// exist or has ended.
pub fn container_process(
    program: &Path,
    root: Option<&str>,
    container: &str,
) -> Result<Option<u32>> {
    let mut command = Command::new(program);
    if let Some(root) = root {
        command.args(["--root", root]);
    }
    command.args(["state", container]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command
        .spawn()
        .with_context(|| format!("starting {} (next runtime)", program.display()))?;
    let Some(output) = child.stdout.take() else {
        bail!("{} has no standard output", program.display())
    };
    let reader = std::thread::spawn(move || -> io::Result<Vec<u8>> {
        let mut stdout = Vec::new();
        output.take(STATE_BYTES).read_to_end(&mut stdout)?;
        Ok(stdout)
    });
    let until = Instant::now() + STATE_TIMEOUT;
    let status = loop {
        match child.try_wait().context("waiting for the next runtime")? {
            Some(status) => break status,
            None if Instant::now() > until => {
                let _ = child.kill();
                let _ = child.wait();
                bail!(
                    "{} state {container}: exceeded its timeout of {STATE_TIMEOUT:?}",
                    program.display()
                );
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let stdout = reader.join().map_err(|_| anyhow::anyhow!("reading a container's state"))?;
    if !status.success() {
        return Ok(None);
    }
    let state: State = serde_json::from_slice(&stdout?)
        .with_context(|| format!("{} state {container}", program.display()))?;
    Ok(Some(state.pid).filter(|pid| *pid != 0 && state.status != "stopped"))
}
