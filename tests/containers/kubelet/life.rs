//! The life of a pod with inline volumes.

use std::fs;
use std::process::Command;
use support::cluster::shared;

use csi_loopback::proto::csi::v1 as csi;
use serde_json::json;

use support::MIB;
use support::cluster::kubelet::{NodeRig, handle};
use support::driver::mounted;
use support::inline::is_mounted;

/// The backing file of a loop device, with its filesystem.
fn backing(device: &str) -> Option<String> {
    let columns = "NAME,BACK-MAJ:MIN,BACK-FILE";
    let listed = Command::new("losetup").args(["-a", "-n", "-O", columns]).output().unwrap();
    let devices = String::from_utf8(listed.stdout).unwrap();
    let mut of_device = devices.lines().filter_map(|line| line.split_once(char::is_whitespace));
    of_device.find(|(name, _)| *name == device).map(|(_, file)| file.trim().to_owned())
}

#[test]
fn an_inline_volume_is_writable_and_ends_with_its_pod() {
    let Some(rig) = shared().and_then(NodeRig::new) else { return };
    let volume = rig.inline("scratch", json!({ "volumeAttributes": { "size": "64Mi" } }));
    let pod = rig.run("writer", &[volume], &json!({}));

    assert_eq!(
        rig.exec(&pod, "echo by the pod >/scratch/written && cat /scratch/written"),
        "by the pod\n"
    );
    let mount = rig.exec(&pod, "grep ' /scratch ' /proc/mounts");
    assert!(mount.contains(" rw,"), "{mount}");
    let device = mount.split(' ').next().unwrap();
    let file = backing(device);
    assert!(file.is_some(), "{mount}");
    let target = rig.target(&pod, "scratch");
    assert_eq!(fs::read_to_string(target.join("written")).unwrap(), "by the pod\n");
    assert!(rig.is_published(&pod, "scratch"), "under kubelet's handle, in the pod's directory");
    assert!(rig.driver.ok(csi::ListVolumesRequest::default()).entries.is_empty());

    rig.delete(&pod);
    rig.wait_until_cleaned_up(&pod, &["scratch"]);
    // Another volume may use the device now.
    assert_ne!(backing(device), file);
    let called = |method: &str| rig.calls(&[method, &handle(&pod, "scratch")]);
    assert!(called("NodePublishVolume") > 0 && called("NodeUnpublishVolume") > 0);
    for method in ["NodeStageVolume", "NodeUnstageVolume", "ControllerPublishVolume"] {
        assert_eq!(rig.calls(&[method]), 0, "{method} of an inline volume");
    }
}

#[test]
#[ignore = "full tier"]
fn volumes_with_equal_attributes_are_separate() {
    let Some(rig) = shared().and_then(NodeRig::new) else { return };
    let volumes = ["a", "b"].map(|name| {
        rig.inline(name, json!({ "volumeAttributes": { "size": "32Mi" }, "fsType": "ext4" }))
    });
    let first = rig.run("first", &volumes, &json!({}));
    let second = rig.run("second", &volumes, &json!({}));
    for pod in [&first, &second] {
        let name = &pod.name;
        rig.exec(pod, &format!("echo {name} a >/a/file; echo {name} b >/b/file"));
    }
    assert_eq!(rig.exec(&first, "cat /a/file /b/file"), "first a\nfirst b\n");
    assert_eq!(rig.exec(&second, "cat /a/file /b/file"), "second a\nsecond b\n");
    rig.delete(&first);
    rig.wait_until_cleaned_up(&first, &["a", "b"]);
    assert_eq!(rig.exec(&second, "cat /a/file /b/file"), "second a\nsecond b\n");
    rig.delete(&second);
    rig.wait_until_cleaned_up(&second, &["a", "b"]);
}

#[test]
#[ignore = "full tier"]
fn persistent_and_inline_volumes_work_in_one_pod() {
    let Some(rig) = shared().and_then(NodeRig::new) else { return };
    let size = 32 * MIB;
    let id = rig.driver.volume("kept", size, mounted("ext4"));
    rig.cluster.claim_as("Filesystem", &rig.namespace, "kept", &rig.driver_name, &id, size);
    let claim = json!({ "name": "kept", "persistentVolumeClaim": { "claimName": "kept" } });
    let volumes = [rig.inline("scratch", json!({})), claim];

    let first = rig.run("first", &volumes, &json!({}));
    rig.exec(&first, "echo of the first >/kept/file; echo of the first >/scratch/file");
    rig.delete(&first);
    rig.wait_until_cleaned_up(&first, &["scratch"]);

    let second = rig.run("second", &volumes, &json!({}));
    assert_eq!(
        rig.exec(&second, "cat /kept/file; ls /scratch/file"),
        "of the first\nls: /scratch/file: No such file or directory\n"
    );
    rig.delete(&second);
    rig.wait_until_cleaned_up(&second, &["scratch"]);
    assert!(rig.calls(&["NodeStageVolume", &id]) > 0, "a persistent volume is staged");
    rig.wait_until_detached(&id);
}

#[test]
#[ignore = "full tier"]
fn a_pod_of_any_user_and_group_writes_to_its_volume() {
    let Some(rig) = shared().and_then(NodeRig::new) else { return };
    let volume = rig.inline("scratch", json!({}));
    let pods = [
        ("user", json!({ "runAsUser": 1234, "runAsGroup": 1234 }), "1234"),
        ("group", json!({ "runAsUser": 1234, "runAsGroup": 1234, "fsGroup": 4321 }), "4321"),
    ];
    for (name, context, group) in pods {
        let pod =
            rig.run(name, std::slice::from_ref(&volume), &json!({ "securityContext": context }));
        let output =
            rig.exec(&pod, "cd /scratch && echo mine >file && stat -c '%u %g' file && cat file");
        assert_eq!(output, format!("1234 {group}\nmine\n"), "{name}");
        rig.delete(&pod);
        rig.wait_until_cleaned_up(&pod, &["scratch"]);
    }
}

#[test]
#[ignore = "full tier"]
fn a_refusal_of_the_driver_is_an_event_of_the_pod() {
    let Some(cluster) = shared() else { return };
    let flags = ["--inline-max-size", "32Mi"];
    let Some(rig) = NodeRig::with(cluster, &flags, None) else { return };
    let refused = [
        ("too-large", json!({ "size": "64Mi" }), ["ResourceExhausted", "--inline-max-size"]),
        ("misspelt", json!({ "sise": "16Mi" }), ["InvalidArgument", "sise"]),
    ];
    for (name, attributes, words) in refused {
        let volume = rig.inline("scratch", json!({ "volumeAttributes": attributes }));
        let pod = rig.create(name, &[volume], &json!({}));
        rig.wait_for_event(&pod, &words);
        assert!(!is_mounted(&rig.target(&pod, "scratch")));
        rig.delete(&pod);
        rig.wait_until_cleaned_up(&pod, &["scratch"]);
    }
}

#[test]
fn kubelet_refuses_inline_volumes_without_ephemeral_mode() {
    let Some(cluster) = shared() else { return };
    let modes = Some(&["Persistent"][..]);
    let Some(rig) = NodeRig::with(cluster, &[], modes) else { return };
    let pod = rig.create("refused", &[rig.inline("scratch", json!({}))], &json!({}));
    rig.wait_for_event(
        &pod,
        &["volume mode \"Ephemeral\" not supported by driver", &rig.driver_name],
    );
    rig.delete(&pod);
    rig.wait_until_cleaned_up(&pod, &["scratch"]);
    assert_eq!(rig.calls(&["NodePublishVolume"]), 0);
}
