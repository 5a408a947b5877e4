//! Driver and kubelet that end while pods run.

use serde_json::json;

use crate::cluster::Cluster;
use crate::cluster::kubelet::NodeRig;
use crate::support::inline::is_mounted;

pub fn a_driver_that_is_killed_does_not_disturb_the_pod_and_takes_its_volume_away_later(
    cluster: &Cluster,
) {
    const TEST: &str =
        "a_driver_that_is_killed_does_not_disturb_the_pod_and_takes_its_volume_away_later";
    let Some(mut rig) = NodeRig::new(cluster, TEST) else { return };
    let pod = rig.run("writer", &[rig.inline("scratch", json!({}))], &json!({}));
    rig.exec(&pod, "echo before >/scratch/file");
    rig.driver.kill();
    assert_eq!(
        rig.exec(&pod, "echo without >>/scratch/file; cat /scratch/file"),
        "before\nwithout\n"
    );
    rig.driver.start_again();
    assert_eq!(rig.exec(&pod, "sync; cat /scratch/file"), "before\nwithout\n");
    assert!(rig.is_published(&pod, "scratch"));
    rig.delete(&pod);
    rig.wait_until_nothing_is_left(&pod, &["scratch"]);
}

pub fn a_pod_that_is_deleted_while_kubelet_is_away_leaves_no_volume(cluster: &Cluster) {
    const TEST: &str = "a_pod_that_is_deleted_while_kubelet_is_away_leaves_no_volume";
    let Some(rig) = NodeRig::new(cluster, TEST) else { return };
    let stays = rig.run("stays", &[rig.inline("scratch", json!({}))], &json!({}));
    let goes = rig.run("goes", &[rig.inline("scratch", json!({}))], &json!({}));
    rig.exec(&stays, "echo before >/scratch/file");
    rig.node.halt();
    rig.forget(&goes);
    assert!(is_mounted(&rig.target(&goes, "scratch")), "nobody has taken it away yet");
    rig.node.resume();
    // From what the last one has left in the pod's directory.
    rig.wait_until_nothing_is_left(&goes, &["scratch"]);
    assert_eq!(rig.exec(&stays, "cat /scratch/file"), "before\n");
    assert!(rig.is_published(&stays, "scratch"));
    rig.delete(&stays);
    rig.wait_until_nothing_is_left(&stays, &["scratch"]);
}
