//! Load by tools that know nothing of this project: fio and stress-ng, on a filesystem or on a device.
//! They run until they are stopped, and are stopped whatever happens.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::path;

/// Longer than any test, in seconds: the tools end by themselves if nobody is left to stop them.
const LONGEST: &str = "3600";

/// How long a tool may take to undo what it has made.
const PATIENCE: Duration = Duration::from_secs(30);

/// Whether the machine has the tools; says so when not.
pub fn have_load() -> bool {
    for tool in ["fio", "stress-ng"] {
        if Command::new(tool).arg("--version").output().is_err() {
            super::skip(&format!("needs {tool}"));
            return false;
        }
    }
    true
}

/// Tools that run.
pub struct Load(Vec<Tool>);

struct Tool {
    name: &'static str,
    child: Child,
    log: PathBuf,
}

impl Load {
    /// Takes about 60 MiB of the filesystem at `directory`. Logs go to `scratch`.
    pub fn on_filesystem(directory: &Path, scratch: &Path) -> Self {
        let mut fio = fio();
        // Threads: its processes would leave the group that is stopped.
        fio.args(["--thread", "--size=8m", "--fallocate=none", "--rate=8m", "--directory"])
            .arg(directory)
            .args(["--name=buffered", "--rw=randwrite", "--bsrange=512-64k", "--bs_unaligned=1"])
            .args(["--ioengine=psync", "--fsync=32"])
            .args(["--name=mapped", "--rw=randwrite", "--bs=4k", "--ioengine=mmap"])
            .args(["--name=direct", "--rw=randwrite", "--bs=4k", "--ioengine=libaio"])
            .args(["--direct=1", "--iodepth=4"]);
        let mut stress = Command::new("stress-ng");
        stress.args(["--timeout", LONGEST, "--temp-path"]).arg(directory);
        // How many of each, and how many bytes or entries where the default is too much.
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

    /// Writes to and discards the first `bytes` of a device, without a pause or in bursts with
    /// `pause` between them.
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

    /// Stops the tools, which have to have run until now.
    pub fn stop(mut self) {
        for tool in &mut self.0 {
            let ended = tool.child.try_wait().unwrap();
            let said = || fs::read_to_string(&tool.log).unwrap_or_default();
            assert!(ended.is_none(), "{} ended by itself: {ended:?}\n{}", tool.name, said());
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
        // A group of its own, so that what it starts is stopped with it. Where it leaves files of its
        // own it is no business of the directory that the tests are run in.
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
            // Also what is left of its group.
            tool.signal(Signal::SIGKILL);
            let _ = tool.child.wait();
        }
    }
}
