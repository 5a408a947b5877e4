//! The cluster that the tests of a binary share, since one takes seconds to start. The first test that needs it
//! starts it. Nothing drops a static, and a process may be killed: so a guard, a process with a pipe to this one,
//! ends the cluster and removes its directory once this process has ended, however it ended.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

use csi_loopback::kubernetes::tls;
use nix::unistd::Pid;

use super::{Cluster, NoCluster};
use crate::{have_root, keep, skip};

/// Reads the ids of processes, one a line, until the writer has ended. Then ends them, the last one first, and
/// removes the directory. A process that does not end within 30 s is killed.
const GUARD: &str = r#"
trap '' INT TERM HUP
pids=
while read -r pid; do pids="$pid $pids"; done
runs() { grep -qs '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$1/status"; }
for pid in $pids; do
    kill -TERM "$pid"
    for _ in $(seq 300); do
        runs "$pid" || break
        sleep 0.1
    done
    kill -KILL "$pid"
done
rm -rf --one-file-system "$1"
"#;

static SHARED: OnceLock<Result<Cluster, NoCluster>> = OnceLock::new();

/// The cluster of this test binary, for one test at a time. `None`, which is reported, where the machine lacks what
/// it needs.
///
/// # Panics
///
/// When the cluster does not start.
pub fn shared() -> Option<&'static Cluster> {
    if !have_root() {
        return None;
    }
    tls::install_provider();
    match SHARED.get_or_init(Cluster::start_guarded) {
        Ok(cluster) => {
            cluster.forget_requests();
            Some(cluster)
        }
        Err(NoCluster::Lacking(why)) => {
            skip(why);
            None
        }
        Err(NoCluster::Failed(why)) => panic!("{why}"),
    }
}

/// The process that ends what this one leaves, with the pipe to it.
pub struct Guard(Mutex<Child>);

impl Guard {
    pub fn new(directory: &Path) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", GUARD, "guard"]).arg(directory);
        // Of a group of its own: an interrupt from the terminal is not for it.
        command.process_group(0).stdin(Stdio::piped());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Self(Mutex::new(command.spawn().unwrap()))
    }

    /// A process that is to be ended, before those that were given earlier.
    pub fn add(&self, pid: Pid) {
        let mut guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(guard.stdin.as_mut().unwrap(), "{pid}").unwrap();
    }
}

impl Cluster {
    /// One that is ended by a guard and never dropped.
    fn start_guarded() -> Result<Self, NoCluster> {
        let mut cluster = Self::start()?;
        if !keep() {
            let guard = Guard::new(cluster.scratch());
            guard.add(cluster.process.pid());
            cluster.guard = Some(guard);
        }
        Ok(cluster)
    }
}
