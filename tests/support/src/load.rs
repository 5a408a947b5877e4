//! Load by independent tools, fio and stress-ng, on a filesystem or a device. They run until they
//! are stopped, also after a panic.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::path;

/// Longer than every test, in seconds: the tools end by themselves if the test process was killed.
const LONGEST: &str = "3600";

/// Time limit for a tool to clean up.
const PATIENCE: Duration = Duration::from_secs(30);

/// Whether the machine has the tools; otherwise reports a skip.
pub fn have_load() -> bool {
    for tool in ["fio", "stress-ng"] {
        if Command::new(tool).arg("--version").output().is_err() {
            super::skip(&format!("needs {tool}"));
            return false;
        }
    }
    true
}

/// Running tools.
pub struct Load(Vec<Tool>);

struct Tool {
    name: &'static str,
    child: Child,
    log: PathBuf,
}

impl Load {
    /// Uses about 60 MiB of the filesystem at `directory`. Logs are in `scratch`.
    pub fn on_filesystem(directory: &Path, scratch: &Path) -> Self {
        let mut fio = fio();
        // Threads, because fio's processes leave the process group.
        fio.args(["--thread", "--size=8m", "--fallocate=none", "--rate=8m", "--directory"])
            .arg(directory)
            .args(["--name=buffered", "--rw=randwrite", "--bsrange=512-64k", "--bs_unaligned=1"])
            .args(["--ioengine=psync", "--fsync=32"])
            .args(["--name=mapped", "--rw=randwrite", "--bs=4k", "--ioengine=mmap"])
            .args(["--name=direct", "--rw=randwrite", "--bs=4k", "--ioengine=libaio"])
            .args(["--direct=1", "--iodepth=4"]);
        let mut stress = Command::new("stress-ng");
        stress.args(["--timeout", LONGEST, "--temp-path"]).arg(directory);
        // One of each, with limits where the default is too large.
        for (stressor, bound) in [
            ("hdd", Some(("bytes", "4m"))),
            ("fallocate", Some(("bytes", "4m"))),
            ("fpunch", None),
            ("rename", None),
            ("dirmany", None),
            ("xattr", None),
        ] {
            stress.args([&format!("--{stressor}"), "1"]);
            if let Some((what, much)) = bound {
                stress.args([&format!("--{stressor}-{what}"), much]);
            }
        }
        stress.args(["--dentry", "1", "--dentries", "200"]);
        Self(vec![Tool::start("fio", fio, scratch), Tool::start("stress-ng", stress, scratch)])
    }

    /// Writes to the first `bytes` of a device: without `pause`, continuously and with discards;
    /// otherwise in bursts with pauses.
    pub fn on_device(device: &Path, bytes: u64, pause: Option<Duration>, scratch: &Path) -> Self {
        let mut fio = fio();
        if let Some(pause) = pause {
            fio.arg(format!("--thinktime={}us", pause.as_micros())).arg("--thinktime_blocks=64");
        }
        fio.args(["--thread", "--rate=16m", &format!("--size={bytes}"), "--filename"])
            .arg(device)
            .args(["--name=direct", "--rw=randwrite", "--bs=4k", "--ioengine=libaio"])
            .args(["--direct=1", "--iodepth=8"]);
        if pause.is_none() {
            fio.args(["--name=buffered", "--rw=randwrite", "--bsrange=512-64k"])
                .args(["--bs_unaligned=1", "--ioengine=psync", "--fsync=32"])
                .args(["--name=discard", "--rw=randtrim", "--bsrange=4k-256k", "--ioengine=psync"])
                .args(["--direct=1", "--rate=4m"]);
        }
        Self(vec![Tool::start("fio", fio, scratch)])
    }

    /// Stops the tools, and asserts that they have run until now.
    pub fn stop(mut self) {
        for tool in &mut self.0 {
            let ended = tool.child.try_wait().unwrap();
            let log = || fs::read_to_string(&tool.log).unwrap_or_default();
            assert!(ended.is_none(), "{} ended by itself: {ended:?}\n{}", tool.name, log());
        }
    }
}

fn fio() -> Command {
    let mut fio = Command::new("fio");
    fio.args(["--time_based", "--eta=never", &format!("--runtime={LONGEST}")]);
    fio.args(["--randrepeat=0", "--refill_buffers", "--norandommap"]);
    fio
}

impl Tool {
    fn start(name: &'static str, mut command: Command, scratch: &Path) -> Self {
        let log = scratch.join(format!("{name}.log"));
        let output = File::create(&log).unwrap();
        command.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output);
        // A new process group, so that its child processes are stopped too. In the scratch
        // directory, because tools create files in their working directory.
        command.process_group(0).current_dir(path(scratch));
        Self { name, child: command.spawn().unwrap(), log }
    }

    fn signal(&self, signal: Signal) {
        let _ = killpg(Pid::from_raw(self.child.id() as i32), signal);
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.iter().for_each(|tool| tool.signal(Signal::SIGTERM));
        let until = Instant::now() + PATIENCE;
        for tool in &mut self.0 {
            while matches!(tool.child.try_wait(), Ok(None)) && Instant::now() < until {
                thread::sleep(Duration::from_millis(5));
            }
            // The rest of the process group.
            tool.signal(Signal::SIGKILL);
            let _ = tool.child.wait();
        }
    }
}
