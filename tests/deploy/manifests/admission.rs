//! Inline volumes: rights of the admission webhooks, and the objects of deploy/admission. No
//! webhook runs here, so the configurations exist only while a test needs them.

use csi_loopback::kubernetes::defer_annotation::ANNOTATION;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Api;
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};
use support::cluster::shared;

use super::rights::exactly;
use super::{DRIVER, NAMESPACE, account, apply, apply_base, deploy, objects, pods, shown};
use support::cluster::Cluster;
use support::cluster::access::Account;
use support::cluster::programs::stdout_of;
use support::path;

/// Namespace of the webhooks, and name of all their objects.
const WEBHOOKS: &str = "csi-loopback-admission";
const SECRET: &str = "csi-loopback-admission-tls";
const MUTATING: &str = "mutatingwebhookconfigurations";
const VALIDATING: &str = "validatingwebhookconfigurations";
/// The API server's response if a required webhook is unavailable.
const WEBHOOK_UNAVAILABLE: &str = "failed calling webhook";

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

/// Without a webhook, pods with inline volumes are rejected, which would affect other tests.
pub fn without_webhooks(cluster: &Cluster) {
    for kind in [MUTATING, VALIDATING] {
        stdout_of(cluster.kubectl(&["delete", "--ignore-not-found", kind, WEBHOOKS]));
    }
}

#[test]
fn the_webhooks_have_exactly_the_rights_of_the_list() {
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
fn the_webhooks_pods_are_admitted_as_restricted() {
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

/// A webhook's full name.
fn full(name: &str) -> String {
    let inline = if name.ends_with("-deferral") { "" } else { "inline." };
    format!("{name}.{inline}cbt.storage.k8s.io")
}

/// The webhooks of both configurations, as the API server returns them. The last one, for opt-ins,
/// applies to all drivers.
fn registered(cluster: &Cluster) -> Vec<Value> {
    let mut found = Vec::new();
    for kind in [MUTATING, VALIDATING] {
        let mut shown = shown(cluster, &[kind, WEBHOOKS]);
        found.extend(serde_json::from_value::<Vec<Value>>(shown["webhooks"].take()).unwrap());
    }
    found
}

#[test]
fn webhooks_rights_and_arguments_name_the_same_driver() {
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
        // This driver's name only.
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

// --- Without a webhook ----------------------------------------------------------------------------

pub fn inline(driver: &str) -> Value {
    json!([
        { "name": "scratch", "emptyDir": {} },
        { "name": "own", "csi": { "driver": driver, "volumeAttributes": { "size": "16Mi" } } },
    ])
}

/// Volumes that the webhooks ignore.
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

/// The API server's response to an object, by a dry run.
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

fn is_rejected_without_webhook(verdict: &Result<(), String>, webhook: &str) -> bool {
    let webhook = format!("\"{}\"", full(webhook));
    verdict
        .as_ref()
        .is_err_and(|message| message.contains(WEBHOOK_UNAVAILABLE) && message.contains(&webhook))
}

/// A namespace in which pods can be created.
pub fn namespace_for_pods(cluster: &Cluster) -> String {
    let namespace = cluster.namespace("inline");
    cluster.account(&namespace, "default");
    namespace
}

#[test]
fn an_outage_of_the_webhooks_rejects_only_pods_they_validate() {
    let Some(cluster) = shared() else { return };
    without_webhooks(cluster);
    let here = namespace_for_pods(cluster);
    // Two existing pods.
    let all: Api<Pod> = cluster.api_in(&here);
    for (name, driver) in [("ours", DRIVER), ("anothers", "another.example")] {
        let object = json!({ "metadata": { "name": name }, "spec": pod_spec(&inline(driver)) });
        cluster.create(&all, object);
    }
    apply_webhooks(cluster);
    cluster.wait_for("the webhooks", || {
        is_rejected_without_webhook(&verdict(cluster, &here, &pod(&inline(DRIVER))), "mutate-pods")
            .then_some(())
    });
    for volumes in others() {
        assert_eq!(verdict(cluster, &here, &pod(&volumes)), Ok(()), "{volumes}");
    }
    // With a RuntimeClass, the runtime may mount a claim.
    let class = cluster.unique("runtime");
    let object = json!({ "metadata": { "name": class }, "handler": "none" });
    cluster.create(&cluster.api::<RuntimeClass>(), object);
    for (volumes, is_sent) in others().into_iter().zip([false, false, false, true]) {
        let mut pod = pod(&volumes);
        pod["spec"]["runtimeClassName"] = class.as_str().into();
        let verdict = verdict(cluster, &here, &pod);
        assert_eq!(
            is_rejected_without_webhook(&verdict, "mutate-deferral"),
            is_sent,
            "{verdict:?}"
        );
    }
    // An opt-in is validated for every driver.
    let mut opted = pod(&inline("another.example"));
    opted["metadata"]["annotations"] = json!({ ANNOTATION: "own" });
    let message = verdict(cluster, &here, &opted);
    assert!(is_rejected_without_webhook(&message, "validate-deferral"), "{message:?}");
    // Ephemeral containers of a pod with such volumes are validated, and no other change of a pod.
    let debug = |name: &str| {
        let container = json!({ "name": "d", "image": "i" });
        let patch = json!({ "spec": { "ephemeralContainers": [container] } });
        let patch = Patch::Strategic(patch);
        let params = PatchParams { dry_run: true, ..PatchParams::default() };
        let patched = all.patch_ephemeral_containers(name, &params, &patch);
        cluster.block_on(patched).map(drop).map_err(|error| error.to_string())
    };
    assert!(is_rejected_without_webhook(&debug("ours"), "mutate-pods"), "{:?}", debug("ours"));
    assert_eq!(debug("anothers"), Ok(()));
    stdout_of(cluster.kubectl(&["label", "-n", &here, "pod", "ours", "any=one"]));
    stdout_of(cluster.kubectl(&["delete", "-n", &here, "--wait=false", "pod", "ours", "anothers"]));

    // The validating webhook is required, too.
    stdout_of(cluster.kubectl(&["delete", MUTATING, WEBHOOKS]));
    cluster.wait_for("the other webhook", || {
        is_rejected_without_webhook(
            &verdict(cluster, &here, &pod(&inline(DRIVER))),
            "validate-pods",
        )
        .then_some(())
    });
    assert_eq!(verdict(cluster, &here, &pod(&inline("another.example"))), Ok(()));
    apply_webhooks(cluster);

    // Pods in the webhooks' namespace can always be created.
    cluster.wait_for("both webhooks", || {
        is_rejected_without_webhook(&verdict(cluster, &here, &pod(&inline(DRIVER))), "mutate-pods")
            .then_some(())
    });
    let mut own = pod(&inline(DRIVER));
    own["spec"]["serviceAccountName"] = json!(WEBHOOKS);
    assert_eq!(verdict(cluster, WEBHOOKS, &own), Ok(()));
    without_webhooks(cluster);
}

#[test]
fn an_apply_keeps_what_the_webhooks_have_written() {
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
