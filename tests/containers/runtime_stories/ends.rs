//! Components that stop and restart while pods run.

use support::cluster::shared;
use tonic::Code;

use crate::node_proxy_kubelet::rig::{Rig, SIZE};
use support::cluster::runtime::device_of;
use support::driver::{stats, wait_for};
use support::path;

#[test]
#[ignore = "full tier"]
fn pods_survive_kills_of_kubelet_driver_and_crust_ops() {
    let Some(cluster) = shared() else { return };
    let Some(mut rig) = Rig::new(cluster) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("runs");
    let device = device_of(&rig, &pod, "main");
    let target = rig.target_of_claim(&pod, "data");
    let works = |rig: &Rig<'_>, who: &str| {
        let wrote = rig.exec(&pod, &format!("echo {who} >/data/last; cat /data/last"));
        assert_eq!(wrote, format!("{who}\n"));
        assert_eq!(device_of(rig, &pod, "second"), device, "{who}");
    };
    let has_stats = |rig: &Rig<'_>| {
        let answer = rig.driver.call_patiently(stats(&id, path(&target))).unwrap();
        assert!(!answer.usage.is_empty() && !answer.volume_condition.unwrap().abnormal);
    };
    works(&rig, "all");
    has_stats(&rig);

    rig.driver.kill();
    works(&rig, "without the driver");
    rig.driver.start_again();
    has_stats(&rig);

    rig.kill_ops();
    works(&rig, "without crust_ops");
    rig.driver.refused(stats(&id, path(&target)), Code::Unavailable, "");
    rig.start_ops();
    has_stats(&rig);

    rig.node.halt();
    has_stats(&rig);
    rig.node.resume();
    wait_for("statistics of the new kubelet", || rig.summary(&pod, "data").is_some());
    works(&rig, "with another kubelet");
    has_stats(&rig);
    rig.delete_and_wait(&pod, &[]);
    rig.wait_until_detached(&id);
    watch.assert_no_mounts();
}

#[test]
#[ignore = "full tier"]
fn a_pod_deleted_while_kubelet_is_down_keeps_claim_data() {
    let Some(cluster) = shared() else { return };
    let Some(rig) = Rig::new(cluster) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("goes");
    rig.exec(&pod, "echo kept >/data/kept; sync");
    rig.node.halt();
    rig.forget(&pod);
    assert_eq!(rig.handed_over(), 1, "not unstaged yet");
    rig.node.resume();
    // kubelet unpublishes from the pod's directory, in which nothing is mounted.
    rig.wait_until_cleaned_up(&pod, &[]);
    rig.wait_until_detached(&id);
    assert_eq!(rig.handed_over(), 0);
    let again = rig.run_opted("comes");
    assert_eq!(rig.exec(&again, "cat /data/kept"), "kept\n");
    rig.delete_and_wait(&again, &[]);
    watch.assert_no_mounts();
}
