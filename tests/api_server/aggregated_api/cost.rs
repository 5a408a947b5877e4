//! The cost of VolumeSnapshotDelta for the API server, compared with the released API, which
//! bypasses it: the published reason why the other design was chosen. No figure decides the test's
//! result.

use std::fs;
use std::time::Instant;
use support::cluster::shared;

use csi_loopback::kubernetes::snapshot_delta::VolumeSnapshotDeltaState as State;
use nix::unistd::{SysconfVar, sysconf};
use serde_json::json;

use super::rig::{FAST, Whole};
use support::cluster::Cluster;
use support::driver::block;
use support::{BLOCK, MIB, pattern, write_direct};

const BLOCKS: u64 = 25_600;
/// Blocks of a page: the KEP's default.
const LIMIT: u64 = 256;

#[test]
#[ignore = "full tier"]
fn the_cost_of_pages_for_the_api_server() {
    let Some(cluster) = shared() else { return };
    let whole = Whole::with(cluster, &[], &FAST);
    let bytes = BLOCKS * BLOCK;
    let volume = whole.driver.volume("large", bytes, block());
    cluster.claim(&whole.namespace, "large", &whole.driver_name, &volume, bytes);
    let cut = |name: &str| cluster.snapshot(&whole.namespace, name, "large", &whole.class);
    cut("empty");
    whole.driver.with_device(&volume, |device| {
        for at in 0..bytes / (4 * MIB) {
            write_direct(device, at * 4 * MIB, &pattern(at, 4 * MIB as usize));
        }
    });
    cut("full");
    let backup = cluster.client_as(&whole.backup);
    let query = || {
        let (mut pages, mut next, mut size) = (0, Some(0), 0);
        while let Some(offset) = next {
            let spec = json!({
                "baseVolumeSnapshotName": "empty", "targetVolumeSnapshotName": "full",
                "limit": LIMIT, "offset": offset,
            });
            let answer = whole.ask(&backup, &spec).unwrap();
            size += serde_json::to_vec(&answer).unwrap().len();
            let status = answer.status.unwrap();
            next = (status.state == State::Continue).then_some(status.next);
            pages += 1;
        }
        (pages, size)
    };
    // Objects that both need.
    let (expected, _) = query();
    assert_eq!(expected, BLOCKS / LIMIT);
    whole.listed(&["delta", "empty", "full"]);

    let server = api_server(cluster);
    let idle = spent_while(server, || std::thread::sleep(std::time::Duration::from_secs(2)));
    let idle = |seconds: f64| idle.0 / idle.1 * seconds;
    let mut found = (0, 0);
    let (paged, paged_for) = spent_while(server, || found = query());
    let (streamed, streamed_for) =
        spent_while(server, || drop(whole.listed(&["delta", "empty", "full"])));
    let (pages, size) = found;
    let (paged, streamed) =
        ((paged - idle(paged_for)).max(0.0) * 1e3, (streamed - idle(streamed_for)).max(0.0) * 1e3);
    println!(
        "report: {BLOCKS} changed blocks through VolumeSnapshotDelta: {pages} pages of {LIMIT}, {:.0} KiB through the API server, \
         {paged:.0} ms of its processor time ({:.1} ms a page), {paged_for:.2} s; by the released API: one stream, 0 KiB, \
         {streamed:.0} ms, {streamed_for:.2} s",
        size as f64 / 1024.0,
        paged / pages as f64,
    );
}

/// CPU seconds that a process spends during `work`, and its duration in seconds.
fn spent_while(pid: u32, work: impl FnOnce()) -> (f64, f64) {
    let (before, begun) = (spent(pid), Instant::now());
    work();
    (spent(pid) - before, begun.elapsed().as_secs_f64())
}

/// CPU seconds that a process has spent (proc(5): utime and stime).
fn spent(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum();
    ticks as f64 / sysconf(SysconfVar::CLK_TCK).unwrap().unwrap() as f64
}

/// The process of the cluster's API server.
fn api_server(cluster: &Cluster) -> u32 {
    let directory = cluster.directory();
    let directory = directory.to_str().unwrap();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let mut processes = processes.filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let line = fs::read_to_string(entry.path().join("cmdline")).ok()?;
        let program = line.split('\0').next()?;
        (program.ends_with("kube-apiserver") && line.contains(directory)).then_some(pid)
    });
    processes.next().expect("an API server")
}
