//! Content volumes, which only the driver may write.

use kube::ResourceExt;
use serde_json::{Value, json};
use support::cluster::shared;

use super::rig::{Rig, With, assert_refused, pod};

fn content() -> Value {
    json!({ "content/app.conf": "a=b" })
}

/// A pod whose init container and both containers mount the volume, one of them twice.
fn with_many_mounts(volume: &Value) -> Value {
    let mount = |path: &str| json!({ "name": volume["name"], "mountPath": path });
    let container = |name: &str, mounts: &[Value]| json!({ "name": name, "image": "x", "volumeMounts": mounts });
    json!({ "spec": {
        "volumes": [{ "name": "empty", "emptyDir": {} }, volume],
        "containers": [
            container("a", &[mount("/1"), json!({ "name": "empty", "mountPath": "/2" }), mount("/3")]),
            container("b", &[json!({ "name": volume["name"], "mountPath": "/1", "readOnly": false })]),
        ],
        "initContainers": [container("i", &[mount("/1")])],
        "automountServiceAccountToken": false,
    } })
}

/// `readOnly` of the second volume, and of every mount of the volume.
fn read_only(pod: &Value) -> (Value, Vec<(String, bool)>) {
    let lists = ["containers", "initContainers", "ephemeralContainers"];
    let containers = lists.iter().filter_map(|list| pod["spec"][list].as_array()).flatten();
    let mounts = containers.flat_map(|container| container["volumeMounts"].as_array().unwrap());
    let mounts = mounts.map(|mount| {
        (mount["name"].as_str().unwrap().to_owned(), mount["readOnly"] == json!(true))
    });
    (pod["spec"]["volumes"][1]["csi"]["readOnly"].clone(), mounts.collect())
}

#[test]
fn volumes_of_content_are_read_only_in_every_container() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, With::default());
    for volume in [rig.volume(content()), rig.with_secret()] {
        let made = rig.make(&rig.apps, &with_many_mounts(&volume)).unwrap();
        let stored = cluster.get(&rig.pods(&rig.apps), &made.name_any()).unwrap();
        let (of_volume, mounts) = read_only(&serde_json::to_value(stored).unwrap());
        assert_eq!(of_volume, json!(true));
        assert_eq!(mounts.len(), 5);
        assert!(mounts.iter().all(|(name, read_only)| *read_only == (name == "v")), "{mounts:?}");
    }
}

#[test]
fn volumes_of_other_drivers_are_not_changed() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, With::default());
    let mut other = rig.volume(content());
    other["csi"]["driver"] = "other.example".into();
    let own = json!({ "content/a": "x", "readOnlyContent": "false" });
    for volume in [other, rig.volume(json!({ "size": "1Gi" })), rig.volume(own)] {
        let made = rig.make(&rig.apps, &with_many_mounts(&volume)).unwrap();
        let (of_volume, mounts) = read_only(&serde_json::to_value(made).unwrap());
        assert_eq!(of_volume, Value::Null, "{volume}");
        assert!(mounts.iter().all(|(_, read_only)| !read_only), "{volume}");
    }
}

#[test]
fn an_ephemeral_container_gets_content_read_only() {
    let Some(cluster) = shared() else { return };
    // Created before the webhooks were installed.
    let rig = Rig::started(cluster, &With::default());
    let old = rig.make(&rig.apps, &pod(&rig.volume(content()))).unwrap().name_any();
    rig.debug(&old, "before", None).unwrap();
    rig.configure(false);
    rig.wait_until_judging();
    for said in [None, Some(false), Some(true)] {
        let container = cluster.unique("debug");
        let debugged = rig.debug(&old, &container, said).unwrap().spec.unwrap();
        let containers = debugged.ephemeral_containers.unwrap();
        let of = |name: &str| {
            let found = containers.iter().find(|one| one.name == name).unwrap();
            found.volume_mounts.as_ref().unwrap()[0].read_only
        };
        assert_eq!(of(&container), Some(true), "{said:?}");
        assert_ne!(of("before"), Some(true));
        let csi = debugged.volumes.unwrap()[0].csi.clone().unwrap();
        assert_ne!(csi.read_only, Some(true), "it cannot be changed");
    }
}

#[test]
fn writable_content_is_refused_without_mutation() {
    let Some(cluster) = shared() else { return };
    let with = With { without_mutating: true, ..With::default() };
    let rig = Rig::new(cluster, with);
    let mut volume = rig.volume(content());
    let refused = rig.make(&rig.apps, &pod(&volume));
    let words = [
        "422",
        "spec.volumes[0].csi.readOnly",
        "spec.containers[0].volumeMounts[0].readOnly",
        "must be true",
    ];
    assert_refused(refused, &words);
    volume["csi"]["readOnly"] = true.into();
    let mut good = pod(&volume);
    assert_refused(rig.make(&rig.apps, &good), &["containers[0].volumeMounts[0].readOnly"]);
    good["spec"]["containers"][0]["volumeMounts"][0]["readOnly"] = true.into();
    let made = rig.make(&rig.apps, &good).unwrap().name_any();
    assert_refused(
        rig.debug(&made, "d", Some(false)),
        &["spec.ephemeralContainers[0].volumeMounts[0].readOnly"],
    );
    rig.debug(&made, "d", Some(true)).unwrap();
}

#[test]
fn a_sub_path_of_content_causes_a_warning() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, With::default());
    let mut part = pod(&rig.volume(content()));
    part["apiVersion"] = "v1".into();
    part["kind"] = "Pod".into();
    part["metadata"] = json!({ "name": "part" });
    part["spec"]["containers"][0]["volumeMounts"][0]["subPath"] = "app.conf".into();
    let (taken, error) = rig.apply(&part);
    let warning = "Warning: spec.containers[0].volumeMounts[0].subPath: is not updated";
    assert!(taken && error.contains(warning), "{error}");
}
