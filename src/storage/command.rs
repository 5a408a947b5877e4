//! Runs the tools that create, check and grow filesystems, with limits on time and output.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::error::{Error, Result};
use super::fail_point::reach;

/// mkfs of 64 TiB takes seconds. A tool that exceeds this hangs.
const DEADLINE: Duration = Duration::from_secs(300);

/// Maximum length of the stderr output that is kept, in bytes.
const OUTPUT_BYTES: u64 = 4096;

/// Runs a tool and waits for it. An error contains the beginning of its stderr output.
pub fn run(command: &mut Command) -> Result<()> {
    run_with(command, &[0])
}

/// Runs a tool that reports success by any of the exit codes `success`.
pub fn run_with(command: &mut Command, success: &[i32]) -> Result<()> {
    run_within(DEADLINE, command, success)
}

/// As [`run_with`], for a tool that may take so long.
pub fn run_within(limit: Duration, command: &mut Command, success: &[i32]) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| Error::Failed(format!("{name}: {e} (is it installed?)")))?;
    let pipe = child.stderr.take();
    let reader = thread::spawn(move || {
        let mut text = Vec::new();
        if let Some(mut pipe) = pipe {
            // Discard the rest: a full pipe would block the tool.
            let _ = pipe.by_ref().take(OUTPUT_BYTES).read_to_end(&mut text);
            let _ = std::io::copy(&mut pipe, &mut std::io::sink());
        }
        String::from_utf8_lossy(&text).trim().to_owned()
    });
    let status = wait(&mut child, &name, limit).inspect_err(|_| {
        // Reap it: no other code waits for it.
        let _ = child.kill();
        let _ = child.wait();
    })?;
    let stderr = reader.join().unwrap_or_default();
    if status.code().is_some_and(|code| success.contains(&code)) {
        Ok(())
    } else {
        Err(Error::Failed(format!("{name} failed ({status}): {stderr}")))
    }
}

/// The whole output of a tool that only describes itself, whatever its exit code.
pub fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Error::Failed(format!("{name}: {e} (is it installed?)")))?;
    let text = [output.stdout, output.stderr].concat();
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn wait(child: &mut Child, name: &str, limit: Duration) -> Result<ExitStatus> {
    reach("tool.started")?;
    let deadline = Instant::now() + limit;
    let mut pause = Duration::from_millis(1);
    loop {
        let waited = child.try_wait().map_err(|e| Error::Failed(format!("{name}: {e}")))?;
        if let Some(status) = waited {
            return Ok(status);
        }
        if Instant::now() > deadline {
            return Err(Error::Failed(format!("{name} took longer than {limit:?}")));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}
