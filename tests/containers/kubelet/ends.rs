//! Driver and kubelet stop while pods run.

use k8s_openapi::api::storage::v1::CSIDriver;
use serde_json::json;
use support::cluster::shared;

use support::cluster::kubelet::{CreatedPod, NodeRig, definition, handle};
use support::driver::wait_for;
use support::inline::is_mounted;

#[test]
#[ignore = "full tier"]
fn a_killed_driver_does_not_disturb_pods_with_inline_volumes() {
    let Some(mut rig) = shared().and_then(NodeRig::new) else { return };
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
    rig.wait_until_cleaned_up(&pod, &["scratch"]);
}

#[test]
#[ignore = "full tier"]
fn a_pod_deleted_while_kubelet_is_down_leaves_no_volume() {
    let Some(rig) = shared().and_then(NodeRig::new) else { return };
    let stays = rig.run("stays", &[rig.inline("scratch", json!({}))], &json!({}));
    let goes = rig.run("goes", &[rig.inline("scratch", json!({}))], &json!({}));
    rig.exec(&stays, "echo before >/scratch/file");
    rig.node.halt();
    rig.forget(&goes);
    assert!(is_mounted(&rig.target(&goes, "scratch")), "not unpublished yet");
    rig.node.resume();
    // kubelet reads the pod's directory after its restart.
    rig.wait_until_cleaned_up(&goes, &["scratch"]);
    assert_eq!(rig.exec(&stays, "cat /scratch/file"), "before\n");
    assert!(rig.is_published(&stays, "scratch"));
    rig.delete(&stays);
    rig.wait_until_cleaned_up(&stays, &["scratch"]);
}

/// Creates a pod whose volume kubelet refuses with these words. kubelet learns of a CSIDriver by a
/// watch; pods that it accepted before are deleted.
fn refused(rig: &NodeRig<'_>, words: &[&str]) -> CreatedPod {
    rig.cluster.wait_for("a pod that is refused", || {
        let name = rig.cluster.unique("new");
        let pod = rig.create(&name, &[rig.inline("scratch", json!({}))], &json!({}));
        let mut is_refused = false;
        wait_for("the pod runs or is refused", || {
            is_refused = rig.event(&pod, words).is_some();
            is_refused || rig.is_ready(&name)
        });
        if is_refused {
            return Some(pod);
        }
        rig.delete(&pod);
        None
    })
}

#[test]
#[ignore = "full tier"]
fn removing_ephemeral_mode_affects_only_new_inline_volumes() {
    let Some(rig) = shared().and_then(NodeRig::new) else { return };
    let old = rig.run("old", &[rig.inline("scratch", json!({}))], &json!({}));
    rig.exec(&old, "echo before >/scratch/file");
    // The modes of a CSIDriver are immutable.
    let definitions = rig.cluster.api::<CSIDriver>();
    rig.cluster.delete(&definitions, &rig.driver_name);
    rig.cluster.wait_until_gone(&definitions, &rig.driver_name);
    rig.cluster.create(&definitions, definition(&rig.driver_name, Some(&["Persistent"])));

    let words = ["volume mode \"Ephemeral\" not supported by driver", &rig.driver_name];
    let new = refused(&rig, &words);
    assert_eq!(rig.calls(&["NodePublishVolume", &handle(&new, "scratch")]), 0);
    assert_eq!(rig.exec(&old, "echo after >>/scratch/file; cat /scratch/file"), "before\nafter\n");
    rig.delete(&old);
    rig.wait_until_cleaned_up(&old, &["scratch"]);
    rig.delete(&new);
    rig.wait_until_cleaned_up(&new, &["scratch"]);
}
