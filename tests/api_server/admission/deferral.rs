//! Who mounts a pod's own volumes (KEP-2857), by the policy's entries.

use std::collections::BTreeMap;
use support::cluster::shared;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use serde_json::{Value, json};

use super::rig::{Rig, With, assert_refused, pod};
use support::cluster::Cluster;

/// A runtime class of the cluster, of which nobody else knows.
fn runtime_class(cluster: &Cluster) -> String {
    let name = cluster.unique("microvm");
    let object = json!({ "metadata": { "name": name }, "handler": "none" });
    cluster.create(&cluster.api::<RuntimeClass>(), object);
    name
}

/// An entry with everything that there is to enter.
fn entry(storage_class: &str, runtime_class: &str) -> Value {
    json!({
        "storageClass": storage_class, "runtimeClass": runtime_class, "fsGroup": true,
        "fsGroupChangePolicies": ["Always", "OnRootMismatch"], "subPath": true, "seLinux": true,
    })
}

/// A policy of these entries; JSON is YAML.
fn policy(entries: &[Value]) -> String {
    json!({ "deferral": entries }).to_string()
}

fn started<'a>(cluster: &'a Cluster, entries: &[Value]) -> Rig<'a> {
    let document = policy(entries);
    let rig = Rig::started(cluster, &With { policy: Some(&document), ..With::default() });
    rig.configure(false);
    rig.wait_until_judging();
    rig
}

/// What is done to a pod's spec.
type Need<'n> = &'n dyn Fn(&mut Value);

/// A pod of the class with this volume, and a need.
fn of_class(volume: &Value, class: &str, need: impl Fn(&mut Value)) -> Value {
    let mut pod = pod(volume);
    pod["spec"]["runtimeClassName"] = class.into();
    need(&mut pod["spec"]);
    pod
}

/// What the pod says of its volume once it is made.
fn attributes(made: Result<Pod, String>) -> BTreeMap<String, String> {
    let csi = made.unwrap().spec.unwrap().volumes.unwrap().remove(0).csi.unwrap();
    csi.volume_attributes.unwrap_or_default()
}

fn opted_in(made: Result<Pod, String>) -> Option<String> {
    attributes(made).remove("deferFSMount")
}

/// What story 1 and the next three have in common: a group, and a part of the volume.
fn demanding(spec: &mut Value) {
    spec["securityContext"] = json!({ "fsGroup": 1234, "fsGroupChangePolicy": "OnRootMismatch" });
    spec["containers"][0]["volumeMounts"][0]["subPath"] = "part".into();
}

fn yes() -> Option<String> {
    Some("true".to_owned())
}

#[test]
fn a_pod_whose_runtime_does_all_that_it_needs_is_opted_in() {
    let Some(cluster) = shared() else { return };
    let class = runtime_class(cluster);
    let rig = started(cluster, &[entry("", &class)]);
    let sized = of_class(&rig.volume(json!({ "size": "1Gi" })), &class, demanding);
    let both = attributes(rig.make(&rig.apps, &sized));
    let expected = [("deferFSMount", "true"), ("size", "1Gi")];
    assert_eq!(both, expected.map(|(key, value)| (key.to_owned(), value.to_owned())).into());
    let bare = json!({ "name": "v", "csi": { "driver": rig.driver } });
    assert_eq!(opted_in(rig.make(&rig.apps, &of_class(&bare, &class, |_| ()))), yes());
}

#[test]
#[ignore = "full tier"]
fn a_pod_that_needs_what_its_runtime_does_not_do_is_left_as_it_is() {
    let Some(cluster) = shared() else { return };
    let class = runtime_class(cluster);
    let rig = started(cluster, &[]);
    let volume = rig.volume(json!({ "size": "1Gi" }));
    let selinux = |spec: &mut Value| {
        spec["containers"][0]["securityContext"] = json!({ "seLinuxOptions": { "level": "s0" } });
    };
    let needs: [(&str, Need<'_>); 4] = [
        ("fsGroup", &|spec| spec["securityContext"] = json!({ "fsGroup": 1 })),
        ("OnRootMismatch", &|spec| {
            spec["securityContext"] =
                json!({ "fsGroup": 1, "fsGroupChangePolicy": "OnRootMismatch" });
        }),
        ("subPath", &|spec| {
            let mount = &mut spec["containers"][0]["volumeMounts"][0];
            mount["subPathExpr"] = "$(NAME)".into();
            spec["containers"][0]["env"] = json!([{ "name": "NAME", "value": "x" }]);
        }),
        ("seLinux", &selinux),
    ];
    for (what, need) in needs {
        let mut lacking = entry("", &class);
        match what {
            "fsGroup" => {
                let entry = lacking.as_object_mut().unwrap();
                entry.remove("fsGroup");
                entry.remove("fsGroupChangePolicies");
            }
            "OnRootMismatch" => lacking["fsGroupChangePolicies"] = json!(["Always"]),
            key => drop(lacking.as_object_mut().unwrap().remove(key)),
        }
        let demanding = of_class(&volume, &class, need);
        rig.policy(&policy(&[entry("", &class)]));
        cluster.wait_for("the policy with all", || {
            (opted_in(rig.dry(&rig.apps, &demanding)) == yes()).then_some(())
        });
        // Story 2: the runtime does not do it, and the driver mounts.
        rig.policy(&policy(&[lacking]));
        cluster.wait_for(&format!("the policy without {what}"), || {
            opted_in(rig.dry(&rig.apps, &demanding)).is_none().then_some(())
        });
        // Who does not need it is opted in all the same.
        assert_eq!(
            opted_in(rig.dry(&rig.apps, &of_class(&volume, &class, |_| ()))),
            yes(),
            "{what}"
        );
    }
}

#[test]
fn without_an_entry_for_inline_volumes_a_pod_is_left_as_it_is_and_with_one_the_next_is_opted_in() {
    let Some(cluster) = shared() else { return };
    let class = runtime_class(cluster);
    // Story 3: of this driver's volumes none is deferred inline, only those of another class.
    let rig = started(cluster, &[entry("fast-storage", &class)]);
    let pod = of_class(&rig.volume(json!({})), &class, demanding);
    assert_eq!(opted_in(rig.make(&rig.apps, &pod)), None);
    // Of the runtime of another pod nothing follows for this one.
    let other = of_class(&rig.volume(json!({})), &runtime_class(cluster), demanding);
    // Story 4: the driver has been upgraded, and so is the policy.
    rig.policy(&policy(&[entry("", &class)]));
    cluster
        .wait_for("the new policy", || (opted_in(rig.dry(&rig.apps, &pod)) == yes()).then_some(()));
    assert_eq!(opted_in(rig.make(&rig.apps, &other)), None);
}

#[test]
fn what_a_pod_says_itself_and_what_cannot_be_deferred_are_left() {
    let Some(cluster) = shared() else { return };
    let class = runtime_class(cluster);
    let rig = started(cluster, &[entry("", &class)]);
    let of = |volume: &Value| rig.make(&rig.apps, &of_class(volume, &class, |_| ()));
    for said in ["true", "false"] {
        let volume = rig.volume(json!({ "deferFSMount": said }));
        assert_eq!(opted_in(of(&volume)).as_deref(), Some(said));
    }
    let own = rig.volume(json!({ "readOnlyContent": "true" }));
    for volume in [rig.volume(json!({ "content/a": "x" })), own, rig.with_secret()] {
        assert_eq!(opted_in(of(&volume)), None, "{volume}");
    }
    assert_refused(of(&rig.volume(json!({ "deferFSMount": "True" }))), &["422", "deferFSMount"]);
    let both = rig.volume(json!({ "deferFSMount": "true", "content/a": "x" }));
    assert_refused(of(&both), &["422", "spec.volumes[0].csi.volumeAttributes[deferFSMount]"]);
}

#[test]
fn nonsense_among_the_entries_is_not_taken_and_its_place_is_told() {
    let Some(cluster) = shared() else { return };
    let class = runtime_class(cluster);
    let rig = started(cluster, &[entry("", &class)]);
    let pod = of_class(&rig.volume(json!({})), &class, |_| ());
    assert_eq!(opted_in(rig.dry(&rig.apps, &pod)), yes());
    let mut unknown = entry("", &class);
    unknown["fsgroup"] = true.into();
    let mut policyless = entry("", &class);
    policyless["fsGroupChangePolicies"] = json!([]);
    for (entries, place) in [
        (vec![unknown], "deferral[0]"),
        (vec![policyless], "deferral[0].fsGroupChangePolicies"),
        (vec![entry("", &class), entry("", &class)], "deferral[1].storageClass"),
        (vec![entry("A_b", &class)], "deferral[0].storageClass"),
    ] {
        rig.policy(&policy(&entries));
        cluster.wait_for(&format!("the complaint of {place}"), || {
            // What was said before holds; it is read when it is asked for.
            assert_eq!(opted_in(rig.dry(&rig.apps, &pod)), yes());
            rig.served.process.log().contains(place).then_some(())
        });
    }
}

#[test]
fn what_no_runtime_would_mount_is_refused() {
    let Some(cluster) = shared() else { return };
    let class = runtime_class(cluster);
    let rig = started(cluster, &[entry("", &class), entry("fast-storage", &class)]);
    let volume = rig.volume(json!({ "deferFSMount": "true" }));
    let field = "spec.volumes[0].csi.volumeAttributes[deferFSMount]: ";
    assert_refused(rig.make(&rig.apps, &pod(&volume)), &["403", field, "runtimeClassName"]);
    let other = runtime_class(cluster);
    let refused = rig.make(&rig.apps, &of_class(&volume, &other, |_| ()));
    assert_refused(refused, &["403", field, &other]);
    rig.make(&rig.apps, &of_class(&volume, &class, demanding)).unwrap();
    // A claim that the pod makes for itself, of a class that is deferred, beside the volume for which the webhook is asked.
    let mut claiming = pod(&rig.volume(json!({})));
    let spec = json!({
        "accessModes": ["ReadWriteOncePod"], "storageClassName": "fast-storage",
        "resources": { "requests": { "storage": "1Gi" } },
    });
    let claim =
        json!({ "name": "claim", "ephemeral": { "volumeClaimTemplate": { "spec": spec } } });
    claiming["spec"]["volumes"].as_array_mut().unwrap().push(claim);
    let field = "spec.volumes[1].ephemeral.volumeClaimTemplate.spec.storageClassName: ";
    assert_refused(rig.make(&rig.apps, &claiming), &["403", field]);
}
