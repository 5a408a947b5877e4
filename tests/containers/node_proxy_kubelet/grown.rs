//! Expansion of volumes.

use super::rig::{Rig, SIZE};
use support::cluster::kubelet::CreatedPod;
use support::cluster::shared;
use support::driver::wait_for;

const LARGER: u64 = 2 * SIZE;

/// Size of the filesystem in KiB, as a container reports it.
fn kib(rig: &Rig<'_>, pod: &CreatedPod) -> u64 {
    let line = rig.exec(pod, "df -k /data | tail -n 1");
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
#[ignore = "full tier"]
fn a_deferred_volume_is_expanded_and_its_claim_updated() {
    let Some(rig) = shared().and_then(Rig::new) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("grows");
    rig.exec(&pod, "echo before >/data/file");
    let before = kib(&rig, &pod);
    rig.grow("data", &id, LARGER);
    wait_for("the filesystem's growth", || kib(&rig, &pod) > before + SIZE / 1024 / 2);
    wait_for("the capacity of the claim", || rig.capacity("data") == Some(LARGER.to_string()));
    assert_eq!(rig.condition("data", "NodeResizeError"), None);
    assert_eq!(rig.exec(&pod, "cat /data/file"), "before\n");
    rig.cluster.wait_for("kubelet's statistics", || {
        rig.summary(&pod, "data").filter(|(bytes, _)| *bytes > SIZE)
    });
    rig.delete_and_wait(&pod, &[]);
    rig.wait_until_detached(&id);
    watch.assert_no_mounts();
}

#[test]
#[ignore = "full tier"]
fn an_unused_claim_is_expanded_when_its_pod_starts() {
    let Some(rig) = shared().and_then(Rig::new) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("before");
    let before = kib(&rig, &pod);
    rig.delete_and_wait(&pod, &[]);
    rig.wait_until_detached(&id);
    rig.grow("data", &id, LARGER);
    let pod = rig.run_opted("after");
    wait_for("the filesystem's growth", || kib(&rig, &pod) > before + SIZE / 1024 / 2);
    wait_for("the capacity of the claim", || rig.capacity("data") == Some(LARGER.to_string()));
    rig.delete_and_wait(&pod, &[]);
    rig.wait_until_detached(&id);
    watch.assert_no_mounts();
}
