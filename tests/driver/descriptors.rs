//! A process without a free file descriptor for another connection.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use nix::unistd::Pid;
use support::driver::*;
use support::ops::Ops;
use support::{have_root, run};

/// Limit of descriptors; the serving process uses some of them.
const LIMIT: usize = 96;
/// More connections than the limit allows, but few enough for the queue of the socket.
const CLIENTS: usize = 200;

/// CPU time of a process in ticks of 10 ms (proc(5), stat).
fn ticks(process: Pid) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let (_, rest) = stat.rsplit_once(')').unwrap();
    let fields: Vec<&str> = rest.split_whitespace().collect();
    [11, 12].map(|at| fields[at].parse::<u64>().unwrap()).iter().sum()
}

fn descriptors(process: Pid) -> usize {
    fs::read_dir(format!("/proc/{process}/fd")).unwrap().count()
}

/// Exhausts the descriptors of a server with connections, and watches it for a while. The caller
/// must close the connections.
fn exhaust(process: Pid, socket: &Path, log: impl Fn() -> String) -> Vec<UnixStream> {
    run("prlimit", &["--pid", &process.to_string(), &format!("--nofile={LIMIT}:{LIMIT}")]);
    let clients: Vec<UnixStream> =
        (0..CLIENTS).map(|_| UnixStream::connect(socket).unwrap()).collect();
    wait_for("all descriptors are in use", || descriptors(process) >= LIMIT - 1);
    wait_for("the failure is logged", || log().contains("failed to accept connections"));
    let before = ticks(process);
    sleep(Duration::from_secs(3));
    // A loop without pauses would use all 300 ticks of a processor.
    let took = ticks(process) - before;
    assert!(took < 60, "{took} ticks in 3 s");
    assert!(log().matches("failed to accept connections").count() <= 2, "{}", log());
    clients
}

#[test]
#[ignore = "full tier"]
fn a_driver_recovers_from_descriptor_exhaustion() {
    let Some(driver) = driver_with(PoolKind::Copy, &[]) else { return };
    driver.ok(csi::ProbeRequest {});
    for round in 0..2 {
        let clients = exhaust(driver.pid(), &driver.socket(), || driver.log());
        // A client that was connected before is served all the time.
        driver.ok(csi::GetPluginInfoRequest {});
        drop(clients);
        let listed = driver.cli(&["volume", "list"]);
        assert!(listed.status.success(), "{listed:?}");
        driver.volume(&format!("v{round}"), 1 << 20, block());
    }
}

#[test]
#[ignore = "full tier"]
fn crust_ops_recovers_from_descriptor_exhaustion() {
    if !have_root() {
        return;
    }
    let ops = Ops::start(&[]);
    let clients = exhaust(ops.pid(), &ops.socket(), || ops.log());
    drop(clients);
    let stats = ops.stats(&ops.target("nothing"));
    assert!(stats.is_err_and(|status| status.code() == tonic::Code::NotFound));
}
