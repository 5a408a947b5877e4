//! Who ends while pods run, and comes back.

use support::cluster::shared;
use tonic::Code;

use crate::node_proxy_kubelet::rig::{Rig, SIZE};
use support::cluster::runtime::device_of;
use support::driver::{stats, wait_for};
use support::path;

#[test]
#[ignore = "full tier"]
fn whoever_of_kubelet_driver_and_crust_ops_is_killed_the_pod_runs_on_and_all_is_as_before() {
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
    let is_told = |rig: &Rig<'_>| {
        let answer = rig.driver.call_patiently(stats(&id, path(&target))).unwrap();
        assert!(!answer.usage.is_empty() && !answer.volume_condition.unwrap().abnormal);
    };
    works(&rig, "all");
    is_told(&rig);

    rig.driver.kill();
    works(&rig, "without the driver");
    rig.driver.start_again();
    is_told(&rig);

    rig.kill_ops();
    works(&rig, "without crust_ops");
    rig.driver.refused(stats(&id, path(&target)), Code::Unavailable, "");
    rig.start_ops();
    is_told(&rig);

    rig.node.halt();
    is_told(&rig);
    rig.node.resume();
    wait_for("another kubelet's figures", || rig.summary(&pod, "data").is_some());
    works(&rig, "with another kubelet");
    is_told(&rig);
    rig.gone(&pod, &[]);
    rig.wait_until_detached(&id);
    watch.saw_nothing();
}

#[test]
#[ignore = "full tier"]
fn a_pod_that_is_deleted_while_kubelet_is_away_leaves_its_claim_whole_and_nothing_handed_over() {
    let Some(cluster) = shared() else { return };
    let Some(rig) = Rig::new(cluster) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("goes");
    rig.exec(&pod, "echo kept >/data/kept; sync");
    rig.node.halt();
    rig.forget(&pod);
    assert_eq!(rig.handed_over(), 1, "nobody has taken it back yet");
    rig.node.resume();
    // Kubelet unpublishes by what it finds in the pod's directory: nothing that is mounted there.
    rig.wait_until_nothing_is_left(&pod, &[]);
    rig.wait_until_detached(&id);
    assert_eq!(rig.handed_over(), 0);
    let again = rig.run_opted("comes");
    assert_eq!(rig.exec(&again, "cat /data/kept"), "kept\n");
    rig.gone(&again, &[]);
    watch.saw_nothing();
}
