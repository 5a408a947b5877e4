//! Which claims and inline volumes the webhook defers to a pod's runtime (KEP-2857), by the
//! policy's entries.

use support::cluster::shared;

use csi_loopback::kubernetes::defer_annotation::ANNOTATION;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule};
use k8s_openapi::api::storage::v1::StorageClass;
use serde_json::{Value, json};

use super::rig::{Rig, With, assert_refused, pod};
use support::cluster::Cluster;

/// A RuntimeClass that no other test uses.
fn runtime_class(cluster: &Cluster) -> String {
    let name = cluster.unique("microvm");
    let object = json!({ "metadata": { "name": name }, "handler": "none" });
    cluster.create(&cluster.api::<RuntimeClass>(), object);
    name
}

/// An entry with all fields.
fn entry(storage_class: &str, runtime_class: &str) -> Value {
    json!({
        "storageClass": storage_class, "runtimeClass": runtime_class, "fsGroup": true,
        "fsGroupChangePolicies": ["Always", "OnRootMismatch"], "subPath": true, "seLinux": true,
    })
}

/// A policy with these entries. JSON is valid YAML.
fn policy(entries: &[Value]) -> String {
    json!({ "deferral": entries }).to_string()
}

fn started<'a>(cluster: &'a Cluster, entries: &[Value]) -> Rig<'a> {
    let document = policy(entries);
    Rig::new(cluster, With { policy: Some(&document), ..With::default() })
}

/// A change of a pod's spec.
type Need<'n> = &'n dyn Fn(&mut Value);

/// A pod of the class with this volume and a need.
fn of_class(volume: &Value, class: &str, need: impl Fn(&mut Value)) -> Value {
    let mut pod = pod(volume);
    pod["spec"]["runtimeClassName"] = class.into();
    need(&mut pod["spec"]);
    pod
}

/// The volumes that the created pod defers.
fn named(made: Result<Pod, String>) -> Option<String> {
    made.unwrap().metadata.annotations.unwrap_or_default().remove(ANNOTATION)
}

/// A StorageClass of this provisioner.
fn storage_class(cluster: &Cluster, provisioner: &str) -> String {
    let name = cluster.unique("class");
    let object = json!({ "metadata": { "name": name }, "provisioner": provisioner });
    cluster.create(&cluster.api::<StorageClass>(), object);
    name
}

/// A claim with these fields in its spec, and a pod's volume for it.
fn claim(rig: &Rig<'_>, fields: &Value) -> Value {
    let name = rig.cluster.unique("claim");
    let mut spec = json!({
        "accessModes": ["ReadWriteOncePod"], "resources": { "requests": { "storage": "1Gi" } },
    });
    spec.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let claims = rig.cluster.api_in::<PersistentVolumeClaim>(&rig.apps);
    rig.cluster.create(&claims, json!({ "metadata": { "name": name }, "spec": spec }));
    claimed(&name)
}

fn claimed(name: &str) -> Value {
    json!({ "name": "v", "persistentVolumeClaim": { "claimName": name } })
}

fn ephemeral(fields: &Value) -> Value {
    let mut spec = json!({
        "accessModes": ["ReadWriteOncePod"], "resources": { "requests": { "storage": "1Gi" } },
    });
    spec.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    json!({ "name": "v", "ephemeral": { "volumeClaimTemplate": { "spec": spec } } })
}

/// The common part of story 1 and the next three: a group, and a part of the volume.
fn demanding(spec: &mut Value) {
    spec["securityContext"] = json!({ "fsGroup": 1234, "fsGroupChangePolicy": "OnRootMismatch" });
    spec["containers"][0]["volumeMounts"][0]["subPath"] = "part".into();
}

fn yes() -> Option<String> {
    Some("v".to_owned())
}

#[test]
fn a_claim_is_deferred_by_classes_and_driver() {
    let Some(cluster) = shared() else { return };
    let (class, other) = (runtime_class(cluster), runtime_class(cluster));
    let rig = started(cluster, &[]);
    let [ours, unlisted] = [(); 2].map(|()| storage_class(cluster, &rig.driver));
    let foreign = storage_class(cluster, "another.example");
    rig.policy(&policy(&[entry(&ours, &class), entry(&foreign, &class), entry("", &other)]));
    let of = |storage: &str| claim(&rig, &json!({ "storageClassName": storage }));
    let made = |volume: &Value, class: &str| {
        named(rig.make(&rig.apps, &of_class(volume, class, demanding)))
    };
    let fitting = of(&ours);
    cluster.wait_for("the policy", || {
        (named(rig.dry(&rig.apps, &of_class(&fitting, &class, demanding))) == yes()).then_some(())
    });
    assert_eq!(made(&fitting, &class), yes());
    assert_eq!(made(&ephemeral(&json!({ "storageClassName": ours })), &class), yes());
    // Another StorageClass, another driver, another RuntimeClass, and no class.
    for volume in [of(&unlisted), of(&foreign), of("")] {
        assert_eq!(made(&volume, &class), None, "{volume}");
    }
    assert_eq!(made(&ephemeral(&json!({ "storageClassName": foreign })), &class), None);
    assert_eq!(made(&fitting, &other), None);
    assert_eq!(named(rig.make(&rig.apps, &pod(&fitting))), None);
    let page = rig.page("/metrics");
    assert!(page.contains("webhook=\"mutate_deferral\",verdict=\"changed\""), "{page}");
}

#[test]
fn a_claim_without_a_known_class_is_refused() {
    let Some(cluster) = shared() else { return };
    let class = runtime_class(cluster);
    let rig = started(cluster, &[]);
    let storage = storage_class(cluster, &rig.driver);
    rig.policy(&policy(&[entry(&storage, &class), entry("gone", &class)]));
    let make = |volume: &Value| rig.make(&rig.apps, &of_class(volume, &class, |_| ()));
    let field = "spec.volumes[0].persistentVolumeClaim.claimName: ";
    cluster.wait_for("the policy", || make(&claimed("none")).err());
    let none = make(&claimed("none"));
    assert_refused(none, &["503", field, "\"none\" does not exist", "try again"]);
    // A claim that may get the default class, and one that cannot get one.
    assert_refused(make(&claim(&rig, &json!({}))), &["503", field, "spec.storageClassName"]);
    assert_eq!(named(make(&claim(&rig, &json!({ "volumeName": "static" })))), None);
    let gone = make(&claim(&rig, &json!({ "storageClassName": "gone" })));
    assert_refused(gone, &["503", "spec.volumes[0]: ", "\"gone\" does not exist", "try again"]);
    let field = "spec.volumes[0].ephemeral.volumeClaimTemplate.spec.storageClassName: is missing";
    assert_refused(make(&ephemeral(&json!({}))), &["422", field, "name the StorageClass"]);
    // After the claim exists, the same pod is admitted: its controller retries.
    let later = claim(&rig, &json!({ "storageClassName": storage }));
    assert_eq!(named(make(&later)), yes());
    // Pods that the policy does not match do not depend on a claim.
    let other = runtime_class(cluster);
    assert_eq!(named(rig.make(&rig.apps, &of_class(&claimed("none"), &other, |_| ()))), None);
    assert_eq!(named(rig.make(&rig.apps, &pod(&claimed("none")))), None);
}

#[test]
fn unreadable_claims_refuse_only_pods_of_the_policy() {
    let Some(cluster) = shared() else { return };
    let class = runtime_class(cluster);
    let rig = started(cluster, &[]);
    let storage = storage_class(cluster, &rig.driver);
    rig.policy(&policy(&[entry(&storage, &class)]));
    let volume = claim(&rig, &json!({ "storageClassName": storage }));
    let make = || rig.make(&rig.apps, &of_class(&volume, &class, |_| ()));
    cluster.wait_for("the policy", || (named(make()) == yes()).then_some(()));
    let roles = cluster.api::<ClusterRole>();
    let full = cluster.get(&roles, &rig.role).unwrap().rules.unwrap();
    let allow =
        |rules: &[&PolicyRule]| cluster.merge(&roles, &rig.role, &json!({ "rules": rules }));
    for (resource, what) in [
        ("storageclasses", "get StorageClasses"),
        ("persistentvolumeclaims", "get PersistentVolumeClaims"),
    ] {
        let others: Vec<_> = full.iter().filter(|rule| !is_for(rule, resource)).collect();
        allow(&others);
        cluster.wait_for("the end of the right", || make().is_err().then_some(()));
        assert_refused(
            make(),
            &["500", "spec.volumes[0]", "cannot determine", what, "ClusterRole"],
        );
        let other = runtime_class(cluster);
        rig.make(&rig.apps, &of_class(&volume, &other, |_| ())).unwrap();
        let inline = rig.volume(json!({ "size": "1Gi" }));
        assert_eq!(named(rig.make(&rig.apps, &of_class(&inline, &class, |_| ()))), None);
    }
    allow(&full.iter().collect::<Vec<_>>());
    cluster.wait_for("the rights", || make().is_ok().then_some(()));
    assert_eq!(named(make()), yes());
}

fn is_for(rule: &PolicyRule, resource: &str) -> bool {
    rule.resources.iter().flatten().any(|one| one == resource)
}

#[test]
fn an_inline_volume_is_deferred_in_addition_to_named_ones() {
    let Some(cluster) = shared() else { return };
    let class = runtime_class(cluster);
    let rig = started(cluster, &[entry("", &class)]);
    let sized = of_class(&rig.volume(json!({ "size": "1Gi" })), &class, demanding);
    let made = rig.make(&rig.apps, &sized).unwrap();
    let csi = made.spec.clone().unwrap().volumes.unwrap().remove(0).csi.unwrap();
    assert_eq!(csi.volume_attributes, Some([("size".to_owned(), "1Gi".to_owned())].into()));
    assert_eq!(named(Ok(made)), yes());
    let bare = json!({ "name": "v", "csi": { "driver": rig.driver } });
    assert_eq!(named(rig.make(&rig.apps, &of_class(&bare, &class, |_| ()))), yes());
    let mut both = sized.clone();
    let second = json!({ "name": "a", "persistentVolumeClaim": { "claimName": "any" } });
    both["spec"]["volumes"].as_array_mut().unwrap().push(second);
    both["metadata"] = json!({ "annotations": { ANNOTATION: "a", "other": "kept" } });
    let made = rig.make(&rig.apps, &both).unwrap();
    assert_eq!(made.metadata.annotations.as_ref().unwrap()["other"], "kept");
    assert_eq!(named(Ok(made)).as_deref(), Some("a,v"));
}

#[test]
#[ignore = "full tier"]
fn a_pod_with_unsupported_needs_is_not_changed() {
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
            (named(rig.dry(&rig.apps, &demanding)) == yes()).then_some(())
        });
        // Story 2: the runtime does not support it, so the driver mounts.
        rig.policy(&policy(&[lacking]));
        cluster.wait_for(&format!("the policy without {what}"), || {
            named(rig.dry(&rig.apps, &demanding)).is_none().then_some(())
        });
        // A pod without the need is still opted in.
        assert_eq!(named(rig.dry(&rig.apps, &of_class(&volume, &class, |_| ()))), yes(), "{what}");
    }
}

#[test]
fn inline_volumes_are_deferred_only_with_a_policy_entry() {
    let Some(cluster) = shared() else { return };
    let class = runtime_class(cluster);
    // Story 3: this driver's inline volumes are not deferred, only volumes of another class.
    let rig = started(cluster, &[entry("fast-storage", &class)]);
    let pod = of_class(&rig.volume(json!({})), &class, demanding);
    assert_eq!(named(rig.make(&rig.apps, &pod)), None);
    // Another pod's runtime does not matter for this pod.
    let other = of_class(&rig.volume(json!({})), &runtime_class(cluster), demanding);
    // Story 4: driver and policy are upgraded.
    rig.policy(&policy(&[entry("", &class)]));
    cluster.wait_for("the new policy", || (named(rig.dry(&rig.apps, &pod)) == yes()).then_some(()));
    assert_eq!(named(rig.make(&rig.apps, &other)), None);
}

#[test]
fn content_volumes_and_raw_devices_are_not_deferred() {
    let Some(cluster) = shared() else { return };
    let class = runtime_class(cluster);
    let rig = started(cluster, &[]);
    let storage = storage_class(cluster, &rig.driver);
    rig.policy(&policy(&[entry("", &class), entry(&storage, &class)]));
    let plain = of_class(&rig.volume(json!({})), &class, |_| ());
    cluster.wait_for("the policy", || (named(rig.dry(&rig.apps, &plain)) == yes()).then_some(()));
    let of = |volume: &Value| rig.make(&rig.apps, &of_class(volume, &class, |_| ()));
    let own = rig.volume(json!({ "readOnlyContent": "true" }));
    let memory = rig.volume(json!({ "medium": "Memory" }));
    for volume in [rig.volume(json!({ "content/a": "x" })), own, memory, rig.with_secret()] {
        assert_eq!(named(of(&volume)), None, "{volume}");
    }
    let raw = claim(&rig, &json!({ "storageClassName": storage, "volumeMode": "Block" }));
    let device = of_class(&raw, &class, |spec| {
        let container = spec["containers"][0].as_object_mut().unwrap();
        container.remove("volumeMounts");
        let devices = json!([{ "name": "v", "devicePath": "/dev/v" }]);
        container.insert("volumeDevices".into(), devices);
    });
    assert_eq!(named(rig.make(&rig.apps, &device)), None);
}
