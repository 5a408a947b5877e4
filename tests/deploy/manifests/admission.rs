//! Inline volumes: what the admission webhooks may do, and what deploy/admission sees to. Nobody serves the webhooks here, so their
//! configurations are there only while a test needs them.

use csi_loopback::kubernetes::defer_annotation::ANNOTATION;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Api;
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};
use support::cluster::shared;

use super::rights::{Right, exactly, holds};
use super::{DRIVER, NAMESPACE, account, apply, apply_base, deploy, objects, pods};
use support::cluster::Cluster;
use support::cluster::access::Account;
use support::cluster::programs::stdout_of;
use support::path;

/// Where the webhooks are installed, and the name of all that belongs to them.
const WEBHOOKS: &str = "csi-loopback-admission";
const SECRET: &str = "csi-loopback-admission-tls";
const MUTATING: &str = "mutatingwebhookconfigurations";
const VALIDATING: &str = "validatingwebhookconfigurations";
const REGISTRATION: &str = "admissionregistration.k8s.io";
/// What the API server says where a webhook that must answer does not.
const NOBODY_ANSWERS: &str = "failed calling webhook";

const RIGHTS: &[&str] = &[
    "/namespaces get list watch",
    "/persistentvolumeclaims get",
    "admissionregistration.k8s.io/mutatingwebhookconfigurations[csi-loopback-admission] get list watch patch",
    "admissionregistration.k8s.io/validatingwebhookconfigurations[csi-loopback-admission] get list watch patch",
    "storage.k8s.io/csidrivers[loopback.csi.local] get list watch",
    "storage.k8s.io/storageclasses get",
];

const RIGHTS_AT_HOME: &[&str] = &[
    "/configmaps[csi-loopback-admission] get list watch",
    "/secrets[csi-loopback-admission-tls] get update",
];

fn webhooks() -> Account {
    account(WEBHOOKS, WEBHOOKS)
}

fn apply_webhooks(cluster: &Cluster) {
    stdout_of(apply(cluster, &deploy("admission")));
}

/// While nobody answers, pods with inline volumes are refused, which is not what the other tests are about.
pub fn without_webhooks(cluster: &Cluster) {
    for kind in [MUTATING, VALIDATING] {
        stdout_of(cluster.kubectl(&["delete", "--ignore-not-found", kind, WEBHOOKS]));
    }
}

#[test]
fn the_admission_webhooks_have_the_rights_of_this_list_and_no_more() {
    let Some(cluster) = shared() else { return };
    apply_webhooks(cluster);
    without_webhooks(cluster);
    exactly(
        cluster,
        &[
            (&webhooks(), WEBHOOKS, RIGHTS, RIGHTS_AT_HOME),
            (&webhooks(), NAMESPACE, RIGHTS, &[]),
            (&webhooks(), "default", RIGHTS, &[]),
        ],
    );
}

#[test]
fn what_would_give_the_admission_webhooks_more_is_refused_to_them() {
    let Some(cluster) = shared() else { return };
    apply_webhooks(cluster);
    without_webhooks(cluster);
    let table: &[Right] = &[
        (true, WEBHOOKS, "get", "", "secrets", SECRET),
        (true, WEBHOOKS, "update", "", "secrets", SECRET),
        (false, WEBHOOKS, "get", "", "secrets", "another"),
        (false, WEBHOOKS, "list", "", "secrets", ""),
        // With it goes a token of any account of the namespace.
        (false, WEBHOOKS, "create", "", "secrets", ""),
        (false, WEBHOOKS, "create", "", "serviceaccounts/token", WEBHOOKS),
        // A pod's secrets are for kubelet to read.
        (false, "default", "get", "", "secrets", "any"),
        (false, NAMESPACE, "get", "", "secrets", "csi-loopback-metadata-tls"),
        (true, WEBHOOKS, "watch", "", "configmaps", WEBHOOKS),
        // Who could write the policy would be above it.
        (false, WEBHOOKS, "update", "", "configmaps", WEBHOOKS),
        (false, WEBHOOKS, "patch", "", "configmaps", WEBHOOKS),
        (false, WEBHOOKS, "list", "", "configmaps", ""),
        (false, "default", "get", "", "configmaps", "any"),
        (true, "default", "get", "", "persistentvolumeclaims", "any"),
        (false, "default", "list", "", "persistentvolumeclaims", ""),
        (false, "default", "patch", "", "persistentvolumeclaims", "any"),
        (true, "", "get", "storage.k8s.io", "storageclasses", "any"),
        (false, "", "list", "storage.k8s.io", "storageclasses", ""),
        (false, "", "get", "", "persistentvolumes", "any"),
        (true, "", "watch", "", "namespaces", ""),
        (false, "", "patch", "", "namespaces", "default"),
        (true, "", "watch", "storage.k8s.io", "csidrivers", DRIVER),
        (false, "", "list", "storage.k8s.io", "csidrivers", ""),
        (false, "", "patch", "storage.k8s.io", "csidrivers", DRIVER),
        (false, "default", "get", "snapshot.storage.k8s.io", "volumesnapshots", "any"),
        (false, "", "get", "snapshot.storage.k8s.io", "volumesnapshotcontents", "any"),
        (true, "", "patch", REGISTRATION, MUTATING, WEBHOOKS),
        (true, "", "patch", REGISTRATION, VALIDATING, WEBHOOKS),
        // Who could write another would see, or change, what is none of its business.
        (false, "", "patch", REGISTRATION, MUTATING, "another"),
        (false, "", "patch", REGISTRATION, VALIDATING, "another"),
        (false, "", "create", REGISTRATION, MUTATING, WEBHOOKS),
        (false, "", "delete", REGISTRATION, VALIDATING, WEBHOOKS),
        (false, "default", "get", "", "pods", "any"),
        (false, "default", "create", "", "pods", ""),
        (false, WEBHOOKS, "get", "coordination.k8s.io", "leases", WEBHOOKS),
        (false, "", "create", "authorization.k8s.io", "subjectaccessreviews", ""),
        (false, "", "impersonate", "", "users", "admin"),
    ];
    holds(cluster, &webhooks(), table);
}

#[test]
fn the_admission_webhooks_pods_are_admitted_as_restricted() {
    let Some(cluster) = shared() else { return };
    apply_webhooks(cluster);
    let all = objects(cluster, "admission");
    without_webhooks(cluster);
    let flags = [
        format!("--driver-name={DRIVER}"),
        format!("--self-signed-secret={SECRET}"),
        format!("--webhook-configuration={WEBHOOKS}"),
        format!("--config-map={WEBHOOKS}"),
    ];
    pods::of_deployment(cluster, WEBHOOKS, &all, &flags);
    assert_eq!(pods::only(&all, "Deployment")["spec"]["replicas"], json!(2));
    let port = &pods::only(&all, "Service")["spec"]["ports"][0]["targetPort"];
    let policy = pods::only(&all, "NetworkPolicy");
    assert_eq!(policy["spec"]["ingress"][0]["ports"][0]["port"], *port);
}

/// A webhook's whole name.
fn full(name: &str) -> String {
    let inline = if name.ends_with("-deferral") { "" } else { "inline." };
    format!("{name}.{inline}cbt.storage.k8s.io")
}

/// The webhooks as the API server has them, of both configurations; that of opt-ins, which is for all drivers, is the last.
fn registered(cluster: &Cluster) -> Vec<Value> {
    let mut found = Vec::new();
    for kind in [MUTATING, VALIDATING] {
        let shown = stdout_of(cluster.kubectl(&["get", kind, WEBHOOKS, "-o", "json"]));
        let mut shown: Value = serde_json::from_str(&shown).unwrap();
        found.extend(serde_json::from_value::<Vec<Value>>(shown["webhooks"].take()).unwrap());
    }
    found
}

#[test]
fn webhooks_rights_and_arguments_are_for_the_same_driver() {
    let Some(cluster) = shared() else { return };
    apply_base(cluster);
    apply_webhooks(cluster);
    stdout_of(cluster.kubectl(&["get", "csidriver", DRIVER]));
    let mut found = registered(cluster);
    without_webhooks(cluster);
    let opt_ins = found.pop().unwrap();
    let shape = |webhook: &Value| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (
            text(&webhook["name"]),
            text(&webhook["clientConfig"]["service"]["path"]),
            text(&webhook["failurePolicy"]),
            text(&webhook["reinvocationPolicy"]),
        )
    };
    let expected = [
        ("mutate-pods", "/mutate-pod", "Fail", "IfNeeded"),
        ("mutate-deferral", "/mutate-deferral", "Fail", "IfNeeded"),
        ("validate-pods", "/validate-pod", "Fail", ""),
    ]
    .map(|(name, path, failure, again)| {
        (full(name), path.to_owned(), failure.to_owned(), again.to_owned())
    });
    assert_eq!(found.iter().map(shape).collect::<Vec<_>>(), expected);
    for webhook in &found {
        let name = &webhook["name"];
        let service = &webhook["clientConfig"]["service"];
        assert_eq!((&service["namespace"], &service["name"]), (&json!(WEBHOOKS), &json!(WEBHOOKS)));
        assert_eq!(service["port"], json!(443), "{name}");
        assert_eq!(webhook["sideEffects"], json!("None"), "{name}");
        assert_eq!(webhook["matchPolicy"], json!("Equivalent"), "{name}");
        let conditions = webhook["matchConditions"].to_string();
        // The driver's name and no other.
        assert_eq!(conditions.matches(".driver == ").count(), 1, "{name}");
        assert!(conditions.contains(&format!(".driver == '{DRIVER}'")), "{name}: {conditions}");
        let own = json!([{ "key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": [WEBHOOKS] }]);
        assert_eq!(webhook["namespaceSelector"]["matchExpressions"], own, "{name}");
    }
    assert_eq!(found[0]["rules"], found[2]["rules"], "what is set is what is judged");

    let expected = (
        full("validate-deferral"),
        "/validate-deferral".to_owned(),
        "Fail".to_owned(),
        String::new(),
    );
    assert_eq!(shape(&opt_ins), expected);
    for field in ["service", "caBundle"] {
        let ours = |webhook: &Value| {
            let mut value = webhook["clientConfig"][field].clone();
            value.as_object_mut().map(|service| service.remove("path"));
            value
        };
        assert_eq!(ours(&opt_ins), ours(&found[1]), "{field}");
    }
    assert!(!opt_ins["matchConditions"].to_string().contains(DRIVER), "of any driver");
    assert_eq!(opt_ins["namespaceSelector"], json!({}), "of any namespace");
}

// --- While nobody answers -------------------------------------------------------------------------

pub fn inline(driver: &str) -> Value {
    json!([
        { "name": "scratch", "emptyDir": {} },
        { "name": "own", "csi": { "driver": driver, "volumeAttributes": { "size": "16Mi" } } },
    ])
}

/// Volumes that are nobody's business here.
fn others() -> [Value; 4] {
    [
        Value::Null,
        json!([{ "name": "scratch", "emptyDir": {} }]),
        inline("another.example"),
        json!([
            { "name": "claim", "persistentVolumeClaim": { "claimName": "c" } },
            { "name": "generic", "ephemeral": { "volumeClaimTemplate": { "spec": {
                "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } },
            }}}},
        ]),
    ]
}

fn pod_spec(volumes: &Value) -> Value {
    let mut spec = json!({
        "automountServiceAccountToken": false,
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": 1, "seccompProfile": { "type": "RuntimeDefault" },
        },
        "containers": [{ "name": "c", "image": "i", "securityContext": {
            "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] },
        }}],
    });
    if !volumes.is_null() {
        spec["volumes"] = volumes.clone();
    }
    spec
}

/// What the API server says to an object; nothing is kept.
fn verdict(cluster: &Cluster, namespace: &str, object: &Value) -> Result<(), String> {
    let text = |field: &str| object[field].as_str().unwrap();
    let (group, version) = text("apiVersion").split_once('/').unwrap_or(("", text("apiVersion")));
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, text("kind")));
    let api: Api<DynamicObject> = Api::namespaced_with(cluster.client(), namespace, &kind);
    let params = PostParams { dry_run: true, ..PostParams::default() };
    let object = serde_json::from_value(object.clone()).unwrap();
    let answer = cluster.block_on(api.create(&params, &object));
    answer.map(drop).map_err(|error| error.to_string())
}

pub fn pod(volumes: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p" }, "spec": pod_spec(volumes),
    })
}

fn is_unanswered(verdict: &Result<(), String>, webhook: &str) -> bool {
    let webhook = format!("\"{}\"", full(webhook));
    verdict.as_ref().is_err_and(|told| told.contains(NOBODY_ANSWERS) && told.contains(&webhook))
}

/// A namespace in which pods can be made.
pub fn namespace_for_pods(cluster: &Cluster) -> String {
    let namespace = cluster.namespace("inline");
    cluster.account(&namespace, "default");
    namespace
}

#[test]
fn while_no_webhook_answers_only_pods_with_volumes_that_they_judge_are_refused() {
    let Some(cluster) = shared() else { return };
    without_webhooks(cluster);
    let here = namespace_for_pods(cluster);
    // Two that run already.
    let all: Api<Pod> = cluster.api_in(&here);
    for (name, driver) in [("ours", DRIVER), ("anothers", "another.example")] {
        let object = json!({ "metadata": { "name": name }, "spec": pod_spec(&inline(driver)) });
        cluster.create(&all, object);
    }
    apply_webhooks(cluster);
    cluster.wait_for("the webhooks", || {
        is_unanswered(&verdict(cluster, &here, &pod(&inline(DRIVER))), "mutate-pods").then_some(())
    });
    for volumes in others() {
        assert_eq!(verdict(cluster, &here, &pod(&volumes)), Ok(()), "{volumes}");
    }
    // With a RuntimeClass a claim may be its runtime's to mount.
    let class = cluster.unique("runtime");
    let object = json!({ "metadata": { "name": class }, "handler": "none" });
    cluster.create(&cluster.api::<RuntimeClass>(), object);
    for (volumes, is_sent) in others().into_iter().zip([false, false, false, true]) {
        let mut pod = pod(&volumes);
        pod["spec"]["runtimeClassName"] = class.as_str().into();
        let verdict = verdict(cluster, &here, &pod);
        assert_eq!(is_unanswered(&verdict, "mutate-deferral"), is_sent, "{verdict:?}");
    }
    // Whoever opts in is asked about, whichever the driver.
    let mut opted = pod(&inline("another.example"));
    opted["metadata"]["annotations"] = json!({ ANNOTATION: "own" });
    let told = verdict(cluster, &here, &opted);
    assert!(is_unanswered(&told, "validate-deferral"), "{told:?}");
    // An ephemeral container is asked about where a pod is; and no other change of a pod.
    let debug = |name: &str| {
        let container = json!({ "name": "d", "image": "i" });
        let patch = json!({ "spec": { "ephemeralContainers": [container] } });
        let patch = Patch::Strategic(patch);
        let params = PatchParams { dry_run: true, ..PatchParams::default() };
        let patched = all.patch_ephemeral_containers(name, &params, &patch);
        cluster.block_on(patched).map(drop).map_err(|error| error.to_string())
    };
    assert!(is_unanswered(&debug("ours"), "mutate-pods"), "{:?}", debug("ours"));
    assert_eq!(debug("anothers"), Ok(()));
    stdout_of(cluster.kubectl(&["label", "-n", &here, "pod", "ours", "any=one"]));
    stdout_of(cluster.kubectl(&["delete", "-n", &here, "--wait=false", "pod", "ours", "anothers"]));

    // The validating one holds by itself.
    stdout_of(cluster.kubectl(&["delete", MUTATING, WEBHOOKS]));
    cluster.wait_for("the other webhook", || {
        is_unanswered(&verdict(cluster, &here, &pod(&inline(DRIVER))), "validate-pods")
            .then_some(())
    });
    assert_eq!(verdict(cluster, &here, &pod(&inline("another.example"))), Ok(()));
    apply_webhooks(cluster);

    // Where the webhooks are, their own pods can always be made.
    cluster.wait_for("both webhooks", || {
        is_unanswered(&verdict(cluster, &here, &pod(&inline(DRIVER))), "mutate-pods").then_some(())
    });
    let mut own = pod(&inline(DRIVER));
    own["spec"]["serviceAccountName"] = json!(WEBHOOKS);
    assert_eq!(verdict(cluster, WEBHOOKS, &own), Ok(()));
    without_webhooks(cluster);
}

#[test]
fn what_the_admission_webhooks_have_written_survives_an_apply() {
    let Some(cluster) = shared() else { return };
    apply_webhooks(cluster);
    // As the webhooks write them.
    let client = cluster.client_as(&webhooks());
    let secrets: Api<Secret> = Api::namespaced(client, WEBHOOKS);
    cluster.wait_for("the rights of the webhooks", || {
        cluster.block_on(secrets.get(SECRET)).is_ok().then_some(())
    });
    let mut kept = cluster.block_on(secrets.get(SECRET)).unwrap();
    kept.string_data = Some([("tls.crt".to_owned(), "kept".to_owned())].into());
    cluster.block_on(secrets.replace(SECRET, &PostParams::default(), &kept)).unwrap();
    let bundle = std::fs::read(cluster.directory().join("pki/ca.crt")).unwrap();
    let bundle = json!(k8s_openapi::ByteString(bundle));
    let of = |kind: &str, names: &[&str]| {
        let webhooks: Vec<Value> = names
            .iter()
            .map(|name| {
                json!({
                    "name": full(name), "sideEffects": "None",
                    "admissionReviewVersions": ["v1"], "clientConfig": { "caBundle": bundle },
                })
            })
            .collect();
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": kind,
            "metadata": { "name": WEBHOOKS }, "webhooks": webhooks,
        })
    };
    let kubeconfig = cluster.kubeconfig_of(&webhooks());
    for object in [
        of("MutatingWebhookConfiguration", &["mutate-pods", "mutate-deferral"]),
        of("ValidatingWebhookConfiguration", &["validate-pods", "validate-deferral"]),
    ] {
        let file = cluster.write("configuration.json", &object.to_string());
        let written = ["apply", "--server-side", "--field-manager=webhooks", "-f", path(&file)];
        stdout_of(cluster.kubectl(&[&["--kubeconfig", path(&kubeconfig)], &written[..]].concat()));
    }

    apply_webhooks(cluster);
    let data = cluster.block_on(secrets.get(SECRET)).unwrap().data.unwrap();
    assert_eq!(data["tls.crt"].0, b"kept");
    let found = registered(cluster);
    without_webhooks(cluster);
    assert_eq!(found.len(), 4);
    for webhook in found {
        assert_eq!(webhook["clientConfig"]["caBundle"], bundle, "{}", webhook["name"]);
        assert!(!webhook["clientConfig"]["service"].is_null() && !webhook["rules"].is_null());
        assert!(!webhook["matchConditions"].is_null(), "{}", webhook["name"]);
    }
}
