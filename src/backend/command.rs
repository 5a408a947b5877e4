//! Runs the tools that make, check and grow filesystems: bounded in time and in output.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::error::{Error, Result};
use super::fail_point::reach;

/// mkfs of 64 TiB takes seconds; more than this is a hang.
const DEADLINE: Duration = Duration::from_secs(300);

/// What is kept of a tool's output, in bytes.
const OUTPUT_BYTES: u64 = 4096;

/// Runs a tool to its end. An error carries the first part of what it said.
pub fn run(command: &mut Command) -> Result<()> {
    run_with(command, &[0])
}

/// Runs a tool whose exit codes `good` all mean success.
pub fn run_with(command: &mut Command, good: &[i32]) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| Error::Failed(format!("{name}: {e} (is it installed?)")))?;
    let stderr = child.stderr.take();
    let reader = thread::spawn(move || {
        let mut text = Vec::new();
        if let Some(mut stderr) = stderr {
            // Keeps the head, drops the rest, never blocks the tool.
            let _ = stderr.by_ref().take(OUTPUT_BYTES).read_to_end(&mut text);
            let _ = std::io::copy(&mut stderr, &mut std::io::sink());
        }
        String::from_utf8_lossy(&text).trim().to_owned()
    });
    let status = ended(&mut child, &name).inspect_err(|_| {
        // Nobody would wait for it any more.
        let _ = child.kill();
        let _ = child.wait();
    })?;
    let said = reader.join().unwrap_or_default();
    if status.code().is_some_and(|code| good.contains(&code)) {
        Ok(())
    } else {
        Err(Error::Failed(format!("{name} {status}: {said}")))
    }
}

fn ended(child: &mut Child, name: &str) -> Result<ExitStatus> {
    reach("tool.started")?;
    let deadline = Instant::now() + DEADLINE;
    let mut pause = Duration::from_millis(1);
    loop {
        let waited = child.try_wait().map_err(|e| Error::Failed(format!("{name}: {e}")))?;
        if let Some(status) = waited {
            return Ok(status);
        }
        if Instant::now() > deadline {
            return Err(Error::Failed(format!("{name} took longer than {DEADLINE:?}")));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}
