//! The cluster that the tests of a binary share, because a start takes seconds. The first test that
//! needs it starts it. Statics are not dropped, and this process can be killed. Therefore a guard
//! process with a pipe to this process stops the cluster and removes its directory when this
//! process ends.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

use csi_loopback::kubernetes::tls;
use nix::unistd::Pid;

use super::{Cluster, NoCluster};
use crate::{have_root, keep};

/// Reads process ids, one per line, until the pipe closes. Then stops these processes in reverse
/// order, kills a process that does not stop within 30 s, and removes the directory.
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

/// The cluster of this test binary, for one test at a time. Reports a skip and returns `None` if
/// the machine does not meet the requirements.
///
/// # Panics
///
/// If the cluster does not start.
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
        Err(why) => {
            why.report();
            None
        }
    }
}

/// The guard process with its pipe.
pub struct Guard(Mutex<Child>);

impl Guard {
    pub fn new(directory: &Path) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", GUARD, "guard"]).arg(directory);
        // In a new process group, so that an interrupt from the terminal does not reach it.
        command.process_group(0).stdin(Stdio::piped());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Self(Mutex::new(command.spawn().unwrap()))
    }

    /// Adds a process, which the guard stops before the earlier ones.
    pub fn add(&self, pid: Pid) {
        let mut guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(guard.stdin.as_mut().unwrap(), "{pid}").unwrap();
    }
}

impl Cluster {
    /// Starts a cluster that a guard stops, because it is never dropped.
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
