//! The annotation by which pods defer volumes: the webhook of deploy/admission, with another
//! address.

use csi_loopback::kubernetes::defer_annotation::ANNOTATION;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use support::cluster::shared;

use super::rig::{Rig, With, assert_refused, posted};
use support::cluster::Cluster;
use support::cluster::admission::{VALIDATE_DEFERRAL, shipped_webhooks};
use support::path;

/// The runtime that mounts deferred volumes.
const CLASS: &str = "opt-in-runtime";

/// Makes the API server call the webhook for pods of the rig's namespace.
fn guarded(cluster: &Cluster) -> Rig<'_> {
    let object = json!({
        "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": { "name": CLASS }, "handler": "none",
    });
    let classes = cluster.api::<RuntimeClass>();
    let apply = PatchParams::apply("test");
    cluster.block_on(classes.patch(CLASS, &apply, &Patch::Apply(&object))).unwrap();
    let document = format!("deferral: [{{storageClass: \"\", runtimeClass: {CLASS}}}]");
    let with = With { policy: Some(&document), without_mutating: true, ..With::default() };
    let rig = Rig::new(cluster, with);
    let mut all = shipped_webhooks("ValidatingWebhookConfiguration").into_iter();
    let of_path = |one: &Value| one["clientConfig"]["service"]["path"] == VALIDATE_DEFERRAL;
    let webhook = rig.here(all.find(of_path).expect("the webhook"), &rig.apps);
    let add = json!([{ "op": "add", "path": "/webhooks/-", "value": webhook }]);
    let add = Patch::<()>::Json(serde_json::from_value(add).unwrap());
    let api = cluster.api::<ValidatingWebhookConfiguration>();
    cluster.block_on(api.patch(&rig.configuration, &PatchParams::default(), &add)).unwrap();
    cluster.wait_for("the webhook", || {
        let refused = rig.dry(&rig.apps, &pod(Some("none"))).err()?;
        refused.contains("is not a volume of the pod").then_some(())
    });
    rig
}

/// A pod with volumes of all kinds.
fn pod(named: Option<&str>) -> Value {
    let template = json!({ "spec": {
        "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } },
    } });
    let of_claim = |claim: &str| json!({ "claimName": claim });
    let annotations = named.map(|named| json!({ ANNOTATION: named }));
    json!({
        "metadata": { "annotations": annotations, "labels": { "app": "a" } },
        "spec": {
            "automountServiceAccountToken": false,
            "runtimeClassName": CLASS,
            "containers": [{
                "name": "c", "image": "x",
                "resources": { "requests": { "cpu": "10m" } },
                "volumeMounts": [{ "name": "claim", "mountPath": "/c" }, { "name": "own", "mountPath": "/o" }],
                "volumeDevices": [
                    { "name": "raw", "devicePath": "/dev/raw" },
                    { "name": "both", "devicePath": "/dev/both" },
                ],
            }, {
                "name": "e", "image": "x",
                "volumeMounts": [{ "name": "both", "mountPath": "/b" }],
            }],
            "volumes": [
                { "name": "claim", "persistentVolumeClaim": of_claim("c") },
                { "name": "generic", "ephemeral": { "volumeClaimTemplate": template } },
                { "name": "own", "csi": { "driver": "other.example" } },
                { "name": "raw", "persistentVolumeClaim": of_claim("r") },
                { "name": "both", "persistentVolumeClaim": of_claim("b") },
                { "name": "scratch", "emptyDir": {} },
            ],
        },
    })
}

/// Patches a subresource, or the pod itself if it is empty.
fn patch(rig: &Rig<'_>, pod: &str, subresource: &str, patch: &Value) -> Result<Pod, String> {
    let (pods, params) = (rig.pods(&rig.apps), PatchParams::default());
    let patch = Patch::Strategic(patch);
    let patched = rig.cluster.block_on(async {
        match subresource {
            "" => pods.patch(pod, &params, &patch).await,
            of => pods.patch_subresource(of, pod, &params, &patch).await,
        }
    });
    patched.map_err(|error| error.to_string())
}

/// A patch of the annotation; `None` removes it.
fn naming(named: Option<&str>) -> Value {
    json!({ "metadata": { "annotations": { ANNOTATION: named } } })
}

fn named(pod: &Pod) -> Option<&str> {
    pod.annotations().get(ANNOTATION).map(String::as_str)
}

/// A status with the condition Initialized, as kubelet writes it.
fn initialised() -> Value {
    json!({ "status": { "conditions": [{ "type": "Initialized", "status": "True" }] } })
}

const STAYS: &[&str] = &["422", "cannot be removed while the pod exists"];

#[test]
fn only_volumes_that_a_runtime_can_mount_are_accepted() {
    let Some(cluster) = shared() else { return };
    let rig = guarded(cluster);
    for good in [None, Some(""), Some("claim"), Some(" claim , generic,own,"), Some("both")] {
        rig.dry(&rig.apps, &pod(good)).unwrap();
    }
    for (bad, error) in [
        ("claim,none", "\"none\" is not a volume of the pod"),
        ("scratch", "\"scratch\""),
        ("raw", "\"raw\" cannot be deferred: the pod's containers use it as a raw block device"),
        ("Claim", "\"Claim\" is not a volume of the pod"),
    ] {
        assert_refused(rig.dry(&rig.apps, &pod(Some(bad))), &["422", ANNOTATION, error]);
    }
    assert!(rig.page("/metrics").contains("webhook=\"validate_deferral\",verdict=\"refused\""));
}

#[test]
fn a_pod_without_a_policy_entry_cannot_opt_in() {
    let Some(cluster) = shared() else { return };
    let rig = guarded(cluster);
    let mut plain = pod(Some("claim"));
    plain["spec"].as_object_mut().unwrap().remove("runtimeClassName");
    assert_refused(rig.dry(&rig.apps, &plain), &["403", ANNOTATION, "runtimeClassName"]);
    rig.dry(&rig.apps, &pod(Some("claim"))).unwrap();
    rig.policy("deferral: []");
    cluster.wait_for("the policy without entries", || {
        let refused = rig.dry(&rig.apps, &pod(Some("claim"))).err()?;
        (refused.contains("403") && refused.contains(CLASS)).then_some(())
    });
    // A pod without the annotation needs no entry.
    rig.dry(&rig.apps, &pod(None)).unwrap();
    rig.dry(&rig.apps, &pod(Some(""))).unwrap();
}

#[test]
fn volumes_are_added_until_initialization_and_kept() {
    let Some(cluster) = shared() else { return };
    let rig = guarded(cluster);
    // Through the pod and its status: both can change annotations.
    for way in ["", "status"] {
        let made = rig.make(&rig.apps, &pod(None)).unwrap().name_any();
        let set = |to: Option<&str>| patch(&rig, &made, way, &naming(to));
        assert_refused(set(Some("none")), &["422", "is not a volume of the pod"]);
        assert_eq!(named(&set(Some("claim")).unwrap()), Some("claim"), "{way}");
        assert_eq!(named(&set(Some("own,claim")).unwrap()), Some("own,claim"), "{way}");
        for fewer in [Some("own"), Some(""), None] {
            assert_refused(set(fewer), STAYS);
        }
        patch(&rig, &made, "status", &initialised()).unwrap();
        assert_refused(set(Some("own,claim,generic")), &["422", "after the pod is initialized"]);
        assert_refused(set(None), STAYS);
        assert_eq!(
            named(&set(Some("claim, own")).unwrap()),
            Some("claim, own"),
            "the same volumes"
        );
        // One request with both changes: the previous state decides.
        let other = rig.make(&rig.apps, &pod(None)).unwrap().name_any();
        let mut both = initialised();
        both["metadata"] = naming(Some("claim"))["metadata"].take();
        let after = patch(&rig, &other, "status", &both).unwrap();
        assert_eq!(named(&after), Some("claim"));
        assert_refused(patch(&rig, &other, way, &naming(Some("own,claim"))), &["initialized"]);
    }
    // By replacing the whole object.
    let made = rig.make(&rig.apps, &pod(Some("claim"))).unwrap();
    let mut bare = made.clone();
    bare.metadata.annotations = None;
    let (pods, name, params) = (rig.pods(&rig.apps), made.name_any(), PostParams::default());
    let replaced =
        cluster.block_on(pods.replace(&name, &params, &bare)).map_err(|error| error.to_string());
    assert_refused(replaced, STAYS);
}

/// Posts a Binding of this pod to one of the two endpoints.
fn bind(rig: &Rig<'_>, pod: &str, at: &str, annotations: Value) -> Result<(), String> {
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding",
        "metadata": { "name": pod, "namespace": rig.apps, "annotations": annotations },
        "target": { "apiVersion": "v1", "kind": "Node", "name": "some-node" },
    });
    let file = rig.cluster.write("binding.json", &binding.to_string());
    let at = format!("/api/v1/namespaces/{}/{at}", rig.apps);
    let output = rig.cluster.kubectl(&["create", "--raw", &at, "-f", path(&file)]);
    let error = String::from_utf8(output.stderr).unwrap();
    if output.status.success() { Ok(()) } else { Err(error) }
}

#[test]
fn a_binding_cannot_change_the_annotation() {
    let Some(cluster) = shared() else { return };
    let rig = guarded(cluster);
    for legacy in [false, true] {
        let made = rig.make(&rig.apps, &pod(Some("claim"))).unwrap().name_any();
        let at = if legacy { "bindings".to_owned() } else { format!("pods/{made}/binding") };
        for value in ["", "claim,own", "claim"] {
            let error = bind(&rig, &made, &at, json!({ ANNOTATION: value }));
            assert_refused(error, &["cannot be set by a Binding", "before it is bound"]);
        }
        bind(&rig, &made, &at, json!({ "scheduler.example/any": "one" })).unwrap();
        let bound = cluster.get(&rig.pods(&rig.apps), &made).unwrap();
        assert_eq!(named(&bound), Some("claim"));
        assert_eq!(bound.annotations()["scheduler.example/any"], "one", "that is a way, then");
        assert_eq!(bound.spec.unwrap().node_name.as_deref(), Some("some-node"));
    }
}

/// The webhook is not called for these: the API server itself ignores annotations in them.
#[test]
fn subresources_cannot_change_the_annotation() {
    let Some(cluster) = shared() else { return };
    let rig = guarded(cluster);
    let made = rig.make(&rig.apps, &pod(Some("claim"))).unwrap().name_any();
    let container = json!({ "name": "d", "image": "x" });
    let grown = json!({ "name": "c", "resources": { "requests": { "cpu": "20m" } } });
    for (way, spec) in [
        ("ephemeralcontainers", json!({ "ephemeralContainers": [container] })),
        ("resize", json!({ "containers": [grown] })),
    ] {
        for other in [None, Some("own")] {
            let mut change = naming(other);
            change["spec"] = spec.clone();
            let after = patch(&rig, &made, way, &change).unwrap();
            assert_eq!(named(&after), Some("claim"), "{way}");
        }
    }
    let spec = cluster.get(&rig.pods(&rig.apps), &made).unwrap().spec.unwrap();
    assert_eq!(spec.ephemeral_containers.unwrap().len(), 1, "they were taken otherwise");
    let requests = spec.containers[0].resources.clone().unwrap().requests.unwrap();
    assert_eq!(requests["cpu"].0, "20m");
}

#[test]
fn without_a_webhook_annotation_changes_are_refused() {
    let Some(cluster) = shared() else { return };
    let mut rig = guarded(cluster);
    let plain = rig.make(&rig.apps, &pod(None)).unwrap().name_any();
    let opted = rig.make(&rig.apps, &pod(Some("claim"))).unwrap().name_any();
    rig.served.process.stop();
    let away = &["failed calling webhook", "validate-deferral"];
    assert_refused(rig.make(&rig.apps, &pod(Some("claim"))), away);
    assert_refused(patch(&rig, &plain, "", &naming(Some("claim"))), away);
    assert_refused(patch(&rig, &opted, "status", &naming(None)), away);
    let to_own = bind(&rig, &opted, "bindings", json!({ ANNOTATION: "own" }));
    assert_refused(to_own, away);

    rig.make(&rig.apps, &pod(None)).unwrap();
    for pod in [&plain, &opted] {
        let change = |way: &str, change: Value| patch(&rig, pod, way, &change).unwrap();
        let grown = json!({ "name": "c", "resources": { "requests": { "cpu": "20m" } } });
        change("resize", json!({ "spec": { "containers": [grown] } }));
        // From scheduler and kubelet.
        bind(&rig, pod, &format!("pods/{pod}/binding"), Value::Null).unwrap();
        change("status", initialised());
        let ready = json!([{ "type": "Ready", "status": "True" }]);
        change("status", json!({ "status": { "phase": "Running", "conditions": ready } }));
        // From all other clients.
        let metadata = json!({ "labels": { "app": "b" }, "annotations": { "a": "b" } });
        change("", json!({ "metadata": metadata }));
        change("", json!({ "metadata": { "finalizers": ["a.example/f"] } }));
        change("", json!({ "spec": { "activeDeadlineSeconds": 3600 } }));
        let debug = json!({ "name": "d", "image": "x" });
        change("ephemeralcontainers", json!({ "spec": { "ephemeralContainers": [debug] } }));
        change(
            "",
            json!({ "metadata": { "$deleteFromPrimitiveList/finalizers": ["a.example/f"] } }),
        );
        cluster.delete(&rig.pods(&rig.apps), pod);
    }
    assert_eq!(named(&cluster.get(&rig.pods(&rig.apps), &opted).unwrap()), Some("claim"));
}

#[test]
#[ignore = "full tier"]
fn hostile_opt_ins_are_handled_and_block_no_client() {
    let Some(cluster) = shared() else { return };
    let rig = guarded(cluster);
    let review = |kind: &str, operation: &str, object: Value, before: Value| {
        json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "u", "kind": { "group": "", "version": "v1", "kind": kind },
                "resource": { "group": "", "version": "v1", "resource": "pods" },
                "operation": operation, "userInfo": {}, "namespace": rig.apps,
                "object": object, "oldObject": before,
            },
        })
        .to_string()
    };
    let refused = |body: &str, words: &str| {
        let answer = posted(&rig, VALIDATE_DEFERRAL, body);
        let is = answer.contains("\"allowed\":false") && answer.contains(words);
        assert!(is, "{}", answer.chars().take(2000).collect::<String>());
        assert!(answer.len() < 64 << 10, "{}", answer.len());
    };
    let with = |volumes: Value, named: &str| {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "p", "annotations": { ANNOTATION: named } },
            "spec": { "containers": [], "volumes": volumes },
        })
    };
    refused(&review("Pod", "CREATE", json!({ "spec": 7 }), Value::Null), "422");
    let good = with(json!([]), "");
    refused(&review("Pod", "UPDATE", good.clone(), json!({ "spec": { "volumes": 7 } })), "422");
    refused(&review("Pod", "CREATE", with(json!([]), &"x".repeat(256 << 10)), Value::Null), "422");
    refused(
        &review(
            "Binding",
            "CREATE",
            json!({ "metadata": { "annotations": { ANNOTATION: "" } } }),
            Value::Null,
        ),
        "422",
    );
    for nothing in [
        review("Pod", "DELETE", Value::Null, Value::Null),
        review("Binding", "CREATE", json!({}), Value::Null),
    ] {
        assert!(posted(&rig, VALIDATE_DEFERRAL, &nothing).contains("\"allowed\":true"));
    }
    // About as many names and volumes as a request may have; the last one is wrong.
    let all: Vec<String> = (0..2_400).map(|number| format!("v{number:05}")).collect();
    let volumes = |last: &Value| {
        let mut volumes: Vec<_> =
            all.iter().map(|name| json!({ "name": name, "csi": { "driver": "d" } })).collect();
        volumes.last_mut().unwrap()["csi"] = last.clone();
        Value::Array(volumes)
    };
    let many = with(volumes(&Value::Null), &all.join(","));
    refused(&review("Pod", "CREATE", many.clone(), Value::Null), "v02399");
    refused(&review("Pod", "UPDATE", with(json!([]), ""), many), "cannot be removed");
    let log = rig.served.process.log();
    assert!(!log.contains("panic"), "{log}");
    rig.dry(&rig.apps, &pod(Some("claim"))).unwrap();
}
