//! The next runtime, runc by default. It replaces this process or, if work remains afterwards, runs
//! as a child.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;
use serde::Deserialize;

use storage::sys;

/// Timeout of the `state` command.
const STATE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of the output of `state`.
const STATE_BYTES: u64 = 1 << 20;
/// Maximum bytes of the runtime's message in an error.
const MAX_MESSAGE: usize = 512;

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
        self.run_with(None)
    }

    /// The same. When the reading end of a pipe becomes readable, calls the function.
    pub fn run_with(&self, mut report: Option<Report<'_>>) -> Result<ExitStatus> {
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
            if let Some((pipe, _)) = &report
                && wait_for_either(&signals, pipe)?
                && let Some((_, reported)) = report.take()
            {
                reported();
                continue;
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

/// A pipe, and what to do when it is readable.
pub type Report<'a> = (&'a File, Box<dyn FnOnce() + 'a>);

/// Waits for a signal or for data in the pipe. Returns whether there is data.
fn wait_for_either(signals: &SignalFd, pipe: &File) -> Result<bool> {
    let mut both = [signals.as_fd(), pipe.as_fd()].map(|one| PollFd::new(one, PollFlags::POLLIN));
    match poll(&mut both, PollTimeout::NONE) {
        Ok(_) | Err(nix::Error::EINTR) => {}
        Err(error) => return Err(error).context("waiting for the next runtime"),
    }
    Ok(both[1].revents().is_some_and(|events| events.contains(PollFlags::POLLIN)))
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

/// Deletes a container, whatever its state.
pub fn delete_container(program: &Path, root: Option<&str>, container: &str) -> Result<()> {
    let mut command = Command::new(program);
    if let Some(root) = root {
        command.args(["--root", root]);
    }
    command.args(["delete", "--force", container]).stdin(Stdio::null()).stdout(Stdio::null());
    let status = command.status().context("starting the next runtime")?;
    anyhow::ensure!(status.success(), "{} delete --force {container}: {status}", program.display());
    Ok(())
}

/// The output of `state` (OCI runtime specification, State).
#[derive(Debug, Deserialize)]
struct State {
    status: String,
    #[serde(default)]
    pid: u32,
}

/// The first process of a container, as reported by the runtime. `None`: the runtime reports that
/// the container does not exist or has ended.
///
/// # Errors
/// The runtime reports anything else: the container may live.
pub fn container_process(
    program: &Path,
    root: Option<&str>,
    container: &str,
) -> Result<Option<u32>> {
    let what = || format!("{} state {container}", program.display());
    let (status, stdout, stderr) = query_state(program, root, container).with_context(what)?;
    if !status.success() {
        let message = String::from_utf8_lossy(&stderr);
        let message = message.trim_end();
        if status.code() == Some(1) && reports_absence(message, root, container) {
            return Ok(None);
        }
        let last = message.lines().last().unwrap_or("no message on standard error");
        bail!("{}: {status}: {}", what(), common::text::truncate(last, MAX_MESSAGE));
    }
    let state: State = serde_json::from_slice(&stdout).with_context(what)?;
    match (state.status.as_str(), state.pid) {
        ("stopped", _) => Ok(None),
        (status, 0) => bail!("{}: reports the status {status:?} without a process", what()),
        (_, pid) => Ok(Some(pid)),
    }
}

/// Whether a runtime's error says that the container does not exist. Every other error, such as one
/// about memory or file descriptors, leaves open whether it exists.
fn reports_absence(message: &str, root: Option<&str>, container: &str) -> bool {
    let Some(line) = message.lines().last() else { return false };
    let Some((_, text)) = line.split_once("level=error msg=").or(Some(("", line))) else {
        return false;
    };
    let text = text.trim().trim_matches('"');
    // runc.
    if text == "container does not exist" {
        return true;
    }
    // crun 1.9 and later, and youki, with causes and times around the text.
    let named = [
        format!("container `{container}` does not exist"),
        format!("container {container} does not exist"),
    ];
    if named.iter().any(|named| text.contains(named.as_str())) {
        return true;
    }
    // Older crun.
    let status = Path::new(root.unwrap_or("/run/crun")).join(container).join("status");
    text.ends_with(&format!("error opening file `{}`: No such file or directory", status.display()))
}

/// Runs `state`. Returns the exit status, standard output and standard error.
fn query_state(
    program: &Path,
    root: Option<&str>,
    container: &str,
) -> Result<(ExitStatus, Vec<u8>, Vec<u8>)> {
    let mut command = Command::new(program);
    if let Some(root) = root {
        command.args(["--root", root]);
    }
    // The words of errors are compared.
    command.args(["state", container]).env("LC_ALL", "C");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("starting the next runtime")?;
    let stdout = child.stdout.take().map(read_in_background);
    let stderr = child.stderr.take().map(read_in_background);
    let until = Instant::now() + STATE_TIMEOUT;
    let status = loop {
        match child.try_wait().context("waiting for the next runtime")? {
            Some(status) => break status,
            None if Instant::now() > until => {
                let _ = child.kill();
                let _ = child.wait();
                bail!("exceeded its timeout of {STATE_TIMEOUT:?}");
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let text = |reader: Option<Receiver<io::Result<Vec<u8>>>>| {
        // A process that the runtime started may still hold the pipe.
        let read = reader.context("no output")?.recv_timeout(STATE_TIMEOUT);
        read.context("reading its output")?.context("reading its output")
    };
    Ok((status, text(stdout)?, text(stderr)?))
}

/// Reads at most [`STATE_BYTES`].
fn read_in_background(output: impl Read + Send + 'static) -> Receiver<io::Result<Vec<u8>>> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = output.take(STATE_BYTES).read_to_end(&mut bytes);
        // The receiver has given up if this fails.
        let _ = sender.send(read.map(|_| bytes));
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_runtimes_words_report_absence() {
        let absent = |message: &str| reports_absence(message, Some("/r"), "c1");
        for words in [
            "time=\"2026-01-01T00:00:00Z\" level=error msg=\"container does not exist\"",
            "container does not exist",
            "container `c1` does not exist: error opening file `/r/c1/status`: No such file or directory",
            "Error: container c1 does not exist.",
            "error opening file `/r/c1/status`: No such file or directory",
        ] {
            assert!(absent(words), "{words}");
        }
        for words in [
            "",
            "runc: too many open files in system",
            "time=\"2026-01-01T00:00:00Z\" level=error msg=\"unable to open state: container does not exist in cache\"",
            "container `c2` does not exist",
            "error opening file `/elsewhere/c1/status`: No such file or directory",
            "error opening file `/r/c1/status`: Too many open files",
            "No such file or directory",
            "container does not exist\nfatal error: out of memory",
        ] {
            assert!(!absent(words), "{words}");
        }
    }

    #[test]
    fn an_unknown_failure_of_state_is_no_absence() {
        let state = |program: &str| container_process(Path::new(program), None, "c1");
        assert!(state("/bin/false").is_err() && state("/not/there").is_err());
        // It prints no state.
        assert!(state("/bin/true").is_err());
    }
}
