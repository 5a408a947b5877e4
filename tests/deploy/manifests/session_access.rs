//! Who learns what about permissions from the webhook of deploy/session-manager, which any pod can
//! call.

use support::cluster::shared;

use csi_loopback::kubernetes::session::SnapshotSessionRequest;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::Api;
use kube::api::PostParams;
use serde_json::json;
use support::cluster::Cluster;
use support::cluster::access::{Account, rule};
use support::cluster::manager::{self, Start};
use support::cluster::programs::stdout_of;
use support::cluster::tls;

use super::sessions;

const SNAPSHOTS: &str = "snapshot.storage.k8s.io";
const POLICY: &str = "csi-loopback-session-access";

/// A namespace, and a manager with the rights and the objects of deploy/.
struct Stage<'a> {
    cluster: &'a Cluster,
    apps: String,
    port: u16,
    pem: String,
}

impl Stage<'_> {
    /// A user who may create requests, and has these rights.
    fn user(&self, name: &str, rules: &[PolicyRule]) -> Account {
        let account = self.cluster.account(&self.apps, name);
        let create = rule("cbt.storage.k8s.io", &["snapshotsessionrequests"], &["create"]);
        self.cluster.grant_in(&self.apps, &account, &[&[create], rules].concat());
        account
    }

    /// The answer of the API server to a request of this user, by a dry run.
    fn create(&self, user: &Account, snapshots: &[&str]) -> Result<(), String> {
        let api: Api<SnapshotSessionRequest> =
            Api::namespaced(self.cluster.client_as(user), &self.apps);
        let spec = serde_json::from_value(json!({ "snapshots": snapshots })).unwrap();
        let params = PostParams { dry_run: true, ..PostParams::default() };
        let request = SnapshotSessionRequest::new("dry", spec);
        let answer = self.cluster.block_on(api.create(&params, &request));
        answer.map(drop).map_err(|error| error.to_string())
    }

    /// The webhook's answer to a pod that posts a review in the name of this user.
    fn post(&self, user: &Account) -> String {
        let (group, version) = ("cbt.storage.k8s.io", "v1alpha2");
        let kind = json!({ "group": group, "version": version, "kind": "SnapshotSessionRequest" });
        let resource =
            json!({ "group": group, "version": version, "resource": "snapshotsessionrequests" });
        let review = json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "u", "kind": kind, "resource": resource, "operation": "CREATE",
                "namespace": self.apps, "name": "r", "oldObject": null,
                "userInfo": { "username": user.user() },
                "object": { "metadata": { "name": "r" }, "spec": { "snapshots": ["monday"] } },
            },
        });
        let path = "/validate-snapshotsessionrequest";
        let body = review.to_string();
        let sent = tls::post(self.port, &self.pem, path, &body);
        let answer = self.cluster.block_on(sent);
        answer.split_once("\r\n\r\n").expect("a complete answer").1.to_owned()
    }
}

/// Certificates that the manager has published in the webhook configuration.
fn published(cluster: &Cluster) -> Option<String> {
    let name = "csi-loopback-session-manager";
    let found = cluster.get(&cluster.api::<ValidatingWebhookConfiguration>(), name)?;
    let ByteString(pem) = found.webhooks?.remove(0).client_config.ca_bundle?;
    Some(String::from_utf8(pem).unwrap())
}

#[test]
#[ignore = "full tier"]
fn the_webhook_reveals_no_permission_to_a_pod() {
    let Some(cluster) = shared() else { return };
    sessions::apply_fresh(cluster);
    let kubeconfig = cluster.kubeconfig_of(&sessions::manager());
    let flags = ["--self-signed-secret", "csi-loopback-session-manager-tls"];
    let namespace = sessions::MANAGERS;
    let start = Start { kubeconfig: &kubeconfig, namespace, flags: &flags, ahead: None };
    let manager = manager::spawn(cluster, &start);
    sessions::call_webhook_at(cluster, manager.port);
    let pem = cluster.wait_for("the certificate", || published(cluster));
    cluster.wait_for("the webhook", || sessions::is_served(cluster).then_some(()));
    let stage = Stage { cluster, apps: cluster.namespace("apps"), port: manager.port, pem };

    let get = rule(SNAPSHOTS, &["volumesnapshots"], &["get"]);
    let names = Some(["monday", "tuesday", "friday"].map(str::to_owned).to_vec());
    let backup = stage.user("backup", std::slice::from_ref(&get));
    let named = stage.user("named", &[PolicyRule { resource_names: names, ..get }]);
    let stranger = stage.user("stranger", &[]);
    cluster.wait_for("the rights", || stage.create(&named, &["friday"]).ok());
    cluster.wait_for("the rights", || stage.create(&backup, &["monday"]).ok());

    // The API servers apply the policy 30 s after it was created.
    cluster
        .wait_for("equal answers", || (stage.post(&stranger) == stage.post(&backup)).then_some(()));
    let answer = stage.post(&stranger);
    assert!(answer.contains("\"allowed\":true"), "{answer}");
    let refused = |user: &Account, snapshots: &[&str], by: &str| {
        let message = stage.create(user, snapshots).unwrap_err();
        for part in [by, "may not get the volumesnapshots", &user.user(), "the verb get"] {
            assert!(message.contains(part), "{part} is not in: {message}");
        }
    };
    refused(&stranger, &["monday"], POLICY);
    assert_eq!(stage.create(&backup, &["monday", "tuesday", "any"]), Ok(()));
    assert_eq!(stage.create(&named, &["monday", "tuesday"]), Ok(()));
    refused(&named, &["monday", "sunday"], POLICY);
    refused(&named, &["monday", "tuesday", "friday"], POLICY);

    // Without the policy the webhook decides.
    let binding = "validatingadmissionpolicybinding";
    stdout_of(cluster.kubectl(&["delete", binding, POLICY]));
    cluster.wait_for("the end of the policy", || {
        stage.create(&named, &["monday", "tuesday", "friday"]).ok()
    });
    refused(&stranger, &["monday"], "admission webhook");
    assert!(stage.post(&stranger).contains("\"code\":403"));
    assert!(manager.process.log().contains("its binding is missing"));
    drop(manager);
    sessions::apply_fresh(cluster);
}
