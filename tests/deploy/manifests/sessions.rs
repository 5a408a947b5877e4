//! Snapshot sessions: rights of session manager, driver and backup application, and the objects of
//! deploy/session-manager.

use std::process::Command;
use support::cluster::shared;
use support::driver::binary;

use csi_loopback::kubernetes::metadata_service::DRIVER_LABEL;
use csi_loopback::kubernetes::session::{
    FINALIZER, SnapshotServiceConfiguration, SnapshotSessionData, SnapshotSessionRequest,
};
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::rbac::v1::RoleBinding;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use super::rights::{Right, holds};
use super::{DRIVER, NAMESPACE, account, apply, apply_base, deploy, objects, pods, shown, sidecar};
use support::cluster::Cluster;
use support::cluster::access::Account;
use support::cluster::programs::{finish, stdout_of};

/// Namespace of the session manager.
pub const MANAGERS: &str = "csi-loopback-sessions";
/// Name of all its objects.
const MANAGER: &str = "csi-loopback-session-manager";
/// The namespace whose snapshots the backup application may read.
const DEMO: &str = "backup-demo";

const CBT: &str = "cbt.storage.k8s.io";
const TOKEN: &str = "abcdefghijklmnopqrstuvwxyz234567abcdefghijklmnopqrst";

pub fn manager() -> Account {
    account(MANAGERS, MANAGER)
}

/// The application of examples/backup-app-session.
pub fn session_backup() -> Account {
    account("backup-app-session", "backup-app")
}

pub fn apply_sessions(cluster: &Cluster) {
    stdout_of(apply(cluster, &deploy("session-manager")));
    stdout_of(apply(cluster, &deploy("examples/backup-app-session")));
}

/// Makes the API server, which cannot reach pods here, call the webhook at a port of this machine.
pub fn call_webhook_at(cluster: &Cluster, port: u16) {
    let url = format!("https://localhost:{port}/validate-snapshotsessionrequest");
    let patch = json!([
        { "op": "replace", "path": "/webhooks/0/clientConfig", "value": { "url": url } },
    ]);
    let object = ["patch", "validatingwebhookconfiguration", MANAGER, "--type=json", "-p"];
    stdout_of(cluster.kubectl(&[&object[..], &[&patch.to_string()]].concat()));
}

/// Whether a manager serves the webhook.
pub fn is_served(cluster: &Cluster) -> bool {
    verdict(cluster).is_ok()
}

/// The webhook and the manager's Secret as in the manifests, and no configuration of a driver.
pub fn apply_fresh(cluster: &Cluster) {
    for object in [
        ["validatingwebhookconfiguration", MANAGER],
        ["secret", "csi-loopback-session-manager-tls"],
        ["snapshotserviceconfiguration", DRIVER],
    ] {
        let delete = ["delete", "--ignore-not-found", "--namespace", MANAGERS];
        stdout_of(cluster.kubectl(&[&delete[..], &object].concat()));
    }
    apply_sessions(cluster);
}

/// An account with the built-in roles view, edit and admin in the driver's namespace still has no
/// token. The test adds no custom aggregation to these roles.
#[test]
fn the_built_in_roles_give_no_access_to_sessions() {
    let Some(cluster) = shared() else { return };
    apply_base(cluster);
    apply_sessions(cluster);
    let roles = shown(cluster, &["clusterroles"]);
    for role in roles["items"].as_array().unwrap() {
        let ours = role["rules"].to_string().contains(CBT);
        let adds_up = role["metadata"]["labels"].to_string().contains("/aggregate-to-");
        assert!(!(ours && adds_up), "{}", role["metadata"]["name"]);
    }
    for role in ["view", "edit", "admin"] {
        let who = cluster.account(&cluster.namespace("deploy"), role);
        let binding = json!({
            "metadata": { "name": cluster.unique(role) },
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
                "name": format!("system:aggregate-to-{role}"),
            },
            "subjects": [{ "kind": "ServiceAccount", "namespace": who.namespace, "name": who.name }],
        });
        cluster.create(&cluster.api_in::<RoleBinding>(NAMESPACE), binding);
        let (verb, group, resource) = match role {
            "view" => ("list", "", "pods"),
            "edit" => ("create", "", "pods"),
            _ => ("create", "rbac.authorization.k8s.io", "roles"),
        };
        let table: &[Right] = &[
            (true, NAMESPACE, verb, group, resource, ""),
            (false, NAMESPACE, "get", CBT, "snapshotsessiondata", TOKEN),
            (false, NAMESPACE, "list", CBT, "snapshotsessiondata", ""),
            (false, NAMESPACE, "watch", CBT, "snapshotsessiondata", ""),
            (false, NAMESPACE, "create", CBT, "snapshotsessiondata", ""),
            (false, NAMESPACE, "list", CBT, "snapshotsessionrequests", ""),
        ];
        holds(cluster, &who, table);
    }
}

fn configuration(name: &str, labels: &Value) -> Value {
    json!({
        "apiVersion": "cbt.storage.k8s.io/v1alpha2", "kind": "SnapshotServiceConfiguration",
        "metadata": { "name": name, "labels": labels },
        "spec": { "address": "h:1", "caCert": "YQ==", "driverNamespace": "csi" },
    })
}

#[test]
fn a_configuration_labelled_for_another_driver_is_rejected() {
    let Some(cluster) = shared() else { return };
    apply_base(cluster);
    apply_sessions(cluster);
    let write = |client: &Client, name: &str, labels: Value| {
        let api: Api<SnapshotServiceConfiguration> = Api::all(client.clone());
        let params = PatchParams { dry_run: true, ..PatchParams::apply("test").force() };
        let object = configuration(name, &labels);
        let answer = cluster.block_on(api.patch(name, &params, &Patch::Apply(&object)));
        answer.map(drop).map_err(|error| error.to_string())
    };
    let driver = cluster.client_as(&sidecar());
    let anothers = json!({ DRIVER_LABEL: "another.example" });
    let why = "has the name of its CSI driver, and the label";
    cluster.wait_for("the policy", || {
        write(&driver, DRIVER, anothers.clone())
            .is_err_and(|message| message.contains(why))
            .then_some(())
    });
    assert_eq!(write(&driver, DRIVER, json!({ DRIVER_LABEL: DRIVER })), Ok(()));
    // For any user.
    let administrator = cluster.client();
    for labels in [anothers, json!({ "any": "one" }), json!({})] {
        let message = write(&administrator, DRIVER, labels.clone());
        assert!(message.is_err_and(|message| message.contains(why)), "{labels}");
    }
    let message = write(&driver, "another.example", json!({ DRIVER_LABEL: "another.example" }));
    assert!(message.is_err_and(|message| message.contains("forbidden")));
}

/// Whether such a request is accepted, by a dry run.
fn verdict(cluster: &Cluster) -> Result<(), String> {
    let requests: Api<SnapshotSessionRequest> = cluster.api_in(DEMO);
    let spec = serde_json::from_value(json!({ "snapshots": ["monday"] })).unwrap();
    let params = PostParams { dry_run: true, ..PostParams::default() };
    let request = SnapshotSessionRequest::new("dry", spec);
    let answer = cluster.block_on(requests.create(&params, &request));
    answer.map(drop).map_err(|error| error.to_string())
}

#[test]
fn without_a_manager_sessions_can_only_be_removed() {
    let Some(cluster) = shared() else { return };
    // A session from a time with a manager, or without a webhook.
    stdout_of(apply(cluster, &deploy("examples/backup-app-session")));
    apply_base(cluster);
    let webhook = ["delete", "--ignore-not-found", "validatingwebhookconfiguration", MANAGER];
    stdout_of(cluster.kubectl(&webhook));
    cluster.wait_for("the end of the webhook", || verdict(cluster).is_ok().then_some(()));
    let requests: Api<SnapshotSessionRequest> = cluster.api_in(DEMO);
    let metadata = json!({ "name": "left", "finalizers": [FINALIZER] });
    let spec = json!({ "snapshots": ["monday"] });
    let made = cluster.create(&requests, json!({ "metadata": metadata, "spec": spec }));
    let data: Api<SnapshotSessionData> = cluster.api_in(NAMESPACE);
    let object = json!({
        "metadata": { "name": TOKEN },
        "spec": {
            "driver": DRIVER, "expirationTime": "2030-01-01T00:00:00Z",
            "request": { "namespace": DEMO, "name": "left", "uid": made.metadata.uid },
            "snapshots": [{ "namespace": DEMO, "name": "monday", "uid": "u", "handle": "h" }],
        },
    });
    cluster.create(&data, object);

    stdout_of(apply(cluster, &deploy("session-manager")));
    cluster.wait_for("the webhook", || verdict(cluster).is_err().then_some(()));
    let message = verdict(cluster).unwrap_err();
    assert!(message.contains("failed calling webhook"), "{message}");
    // Other requests do not wait for the webhook.
    cluster.merge(&requests, "left", &json!({ "metadata": { "labels": { "any": "one" } } }));

    let mut clean_up = Command::new(binary());
    clean_up.args(["--mode", "session-manager", "--clean-up", "--kubeconfig"]);
    clean_up.arg(cluster.kubeconfig());
    let message = stdout_of(finish(clean_up));
    assert!(
        message.contains("deleted 1 SnapshotSessionRequests and 1 SnapshotSessionData"),
        "{message}"
    );
    cluster.wait_until_gone(&requests, "left");
    cluster.wait_until_gone(&data, TOKEN);
}

#[test]
fn the_managers_pods_are_admitted_as_restricted() {
    let Some(cluster) = shared() else { return };
    stdout_of(apply(cluster, &deploy("session-manager")));
    let all = objects(cluster, "session-manager");
    pods::of_deployment(cluster, MANAGERS, &all, &[]);
    let webhook = &pods::only(&all, "ValidatingWebhookConfiguration")["webhooks"][0];
    let service = &webhook["clientConfig"]["service"];
    let port = &pods::only(&all, "Service")["spec"]["ports"][0]["port"];
    assert_eq!((&service["namespace"], &service["name"]), (&json!(MANAGERS), &json!(MANAGER)));
    assert_eq!(&service["port"], port);
}

#[test]
fn an_apply_keeps_what_the_manager_has_written() {
    let Some(cluster) = shared() else { return };
    stdout_of(apply(cluster, &deploy("session-manager")));
    // As the manager writes them.
    let client = cluster.client_as(&manager());
    let (leases, secrets): (Api<Lease>, Api<Secret>) =
        (Api::namespaced(client.clone(), MANAGERS), Api::namespaced(client.clone(), MANAGERS));
    let webhooks: Api<ValidatingWebhookConfiguration> = Api::all(client);
    let secret = "csi-loopback-session-manager-tls";
    cluster.wait_for("the manager's rights", || {
        cluster.block_on(leases.get(MANAGER)).is_ok().then_some(())
    });
    let mut lease = cluster.block_on(leases.get(MANAGER)).unwrap();
    lease.spec.get_or_insert_default().holder_identity = Some("one".to_owned());
    cluster.block_on(leases.replace(MANAGER, &PostParams::default(), &lease)).unwrap();
    let mut kept = cluster.block_on(secrets.get(secret)).unwrap();
    kept.string_data = Some([("tls.crt".to_owned(), "kept".to_owned())].into());
    cluster.block_on(secrets.replace(secret, &PostParams::default(), &kept)).unwrap();
    let bundle = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": { "name": MANAGER },
        "webhooks": [{
            "name": "snapshotsessionrequests.cbt.storage.k8s.io", "sideEffects": "None",
            "admissionReviewVersions": ["v1"], "clientConfig": { "caBundle": pem(cluster) },
        }],
    });
    let params = PatchParams::apply("manager").force();
    cluster.block_on(webhooks.patch(MANAGER, &params, &Patch::Apply(&bundle))).unwrap();

    stdout_of(apply(cluster, &deploy("session-manager")));
    let lease = cluster.block_on(leases.get(MANAGER)).unwrap();
    assert_eq!(lease.spec.unwrap().holder_identity.as_deref(), Some("one"));
    let data = cluster.block_on(secrets.get(secret)).unwrap().data.unwrap();
    assert_eq!(data["tls.crt"].0, b"kept");
    let webhook = cluster.block_on(webhooks.get(MANAGER)).unwrap().webhooks.unwrap().remove(0);
    assert!(webhook.client_config.ca_bundle.is_some());
    assert!(webhook.client_config.service.is_some() && webhook.match_conditions.is_some());
    assert_eq!(webhook.failure_policy.as_deref(), Some("Fail"));
}

/// Certificates of an authority, encoded as in an object.
fn pem(cluster: &Cluster) -> Value {
    json!(k8s_openapi::ByteString(std::fs::read(cluster.directory().join("pki/ca.crt")).unwrap()))
}
