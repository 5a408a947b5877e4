//! Volumes that grow.

use super::rig::{Rig, SIZE};
use support::cluster::kubelet::Made;
use support::cluster::shared;
use support::driver::wait_for;

const LARGER: u64 = 2 * SIZE;

/// KiB of the filesystem, as a container sees it.
fn kib(rig: &Rig<'_>, pod: &Made) -> u64 {
    let line = rig.exec(pod, "df -k /data | tail -n 1");
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
#[ignore = "full tier"]
fn a_volume_is_grown_while_only_its_containers_see_it_and_the_claim_says_so() {
    let Some(cluster) = shared() else { return };
    let Some(rig) = Rig::new(cluster) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("grows");
    rig.exec(&pod, "echo before >/data/file");
    let before = kib(&rig, &pod);
    rig.grow("data", &id, LARGER);
    wait_for("the filesystem's growth", || kib(&rig, &pod) > before + SIZE / 1024 / 2);
    wait_for("kubelet's word of it", || rig.capacity("data") == Some(LARGER.to_string()));
    assert_eq!(rig.condition("data", "NodeResizeError"), None);
    assert_eq!(rig.exec(&pod, "cat /data/file"), "before\n");
    cluster.wait_for("kubelet's figures", || {
        rig.summary(&pod, "data").filter(|(bytes, _)| *bytes > SIZE)
    });
    rig.gone(&pod, &[]);
    rig.wait_until_detached(&id);
    watch.saw_nothing();
}

#[test]
#[ignore = "full tier"]
fn a_claim_that_grew_while_nobody_used_it_has_its_size_once_its_pod_runs() {
    let Some(cluster) = shared() else { return };
    let Some(rig) = Rig::new(cluster) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("before");
    let before = kib(&rig, &pod);
    rig.gone(&pod, &[]);
    rig.wait_until_detached(&id);
    rig.grow("data", &id, LARGER);
    let pod = rig.run_opted("after");
    wait_for("the filesystem's growth", || kib(&rig, &pod) > before + SIZE / 1024 / 2);
    wait_for("kubelet's word of it", || rig.capacity("data") == Some(LARGER.to_string()));
    rig.gone(&pod, &[]);
    rig.wait_until_detached(&id);
    watch.saw_nothing();
}
