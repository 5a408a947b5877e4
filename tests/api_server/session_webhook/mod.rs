//! The session manager's webhook, called by a real API server: who may create a request, what is
//! refused and with which message, and how the API server comes to trust the webhook.

mod abuse;
mod page;

use support::cluster::shared;

use std::time::{Duration, Instant};

use csi_loopback::kubernetes::session::SnapshotSessionRequest;
use csi_loopback::kubernetes::tls;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};
use support::cluster::Cluster;
use support::cluster::access::{Account, rule};
use support::cluster::manager::{self, Start, manager_rules};
use support::cluster::programs::{Served, free_port};
use support::cluster::tls::{Authority, connect};
use support::path;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const VOLUME_SNAPSHOTS: &str = "snapshot.storage.k8s.io";
const OURS: &str = "cbt.storage.k8s.io";
const PATH: &str = "/validate-snapshotsessionrequest";

/// A manager, and a namespace whose requests it reviews.
struct Rig<'a> {
    cluster: &'a Cluster,
    apps: String,
    configuration: String,
    /// May create requests, but not get VolumeSnapshots.
    stranger: Account,
    /// The manager's.
    account: Account,
    manager: Served,
}

impl<'a> Rig<'a> {
    /// A rig whose webhook is called.
    fn new(cluster: &'a Cluster) -> Self {
        let rig = Self::with(cluster, manager_rules(), &[]);
        rig.configure("Fail");
        rig.wait_until_judging();
        rig
    }

    fn with(cluster: &'a Cluster, rules: Vec<PolicyRule>, flags: &[&str]) -> Self {
        Self::started_by(cluster, rules, flags, manager::spawn)
    }

    fn started_by(
        cluster: &'a Cluster,
        rules: Vec<PolicyRule>,
        flags: &[&str],
        spawn: impl FnOnce(&Cluster, &Start<'_>) -> Served,
    ) -> Self {
        let home = cluster.namespace("manager");
        let account = cluster.account(&home, "manager");
        cluster.grant(&account, &rules);
        let kubeconfig = cluster.kubeconfig_of(&account);
        let configuration = cluster.unique("webhook");
        let flags = [&["--webhook-configuration", &configuration], flags].concat();
        let start = Start { kubeconfig: &kubeconfig, namespace: &home, flags: &flags, ahead: None };
        let manager = spawn(cluster, &start);
        let apps = cluster.namespace("apps");
        let stranger = cluster.account(&apps, "stranger");
        let rig = Self { cluster, apps, configuration, stranger, account, manager };
        rig.may_create(&rig.stranger);
        rig
    }

    fn may_create(&self, account: &Account) {
        let requests = rule(OURS, &["snapshotsessionrequests"], &["create", "get", "patch"]);
        self.cluster.grant_in(&self.apps, account, &[requests]);
    }

    fn configurations(&self) -> Api<ValidatingWebhookConfiguration> {
        self.cluster.api()
    }

    /// Creates the configuration, for this rig's namespace only.
    fn configure(&self, failure_policy: &str) {
        let url = format!("https://localhost:{}{PATH}", self.manager.port);
        self.configure_as(failure_policy, json!({ "url": url }));
    }

    /// The same with this clientConfig.
    fn configure_as(&self, failure_policy: &str, client_config: Value) {
        self.cluster.create(
            &self.configurations(),
            json!({
                "metadata": { "name": self.configuration },
                "webhooks": [{
                    "name": "snapshotsessionrequests.cbt.storage.k8s.io",
                    "admissionReviewVersions": ["v1"],
                    "clientConfig": client_config,
                    "failurePolicy": failure_policy,
                    "namespaceSelector": {
                        "matchLabels": { "kubernetes.io/metadata.name": self.apps },
                    },
                    "rules": [{
                        "apiGroups": [OURS], "apiVersions": ["v1alpha2"],
                        "operations": ["CREATE", "UPDATE", "DELETE"],
                        "resources": ["snapshotsessionrequests"], "scope": "Namespaced",
                    }],
                    "sideEffects": "None",
                    "timeoutSeconds": 10,
                }],
            }),
        );
    }

    /// Waits until the API server applies the configuration.
    fn wait_until_judging(&self) {
        let client = self.cluster.client_as(&self.stranger);
        self.cluster.wait_for("the webhook", || {
            let refused = self.ask(&client, &["x"], true).err()?;
            refused.contains("denied the request").then_some(())
        });
    }

    fn found(&self) -> Option<ValidatingWebhookConfiguration> {
        self.cluster.get(&self.configurations(), &self.configuration)
    }

    fn ca_bundle(&self) -> Option<String> {
        let bundle = self.found()?.webhooks?.remove(0).client_config.ca_bundle?;
        Some(String::from_utf8(bundle.0).unwrap())
    }

    /// Whether a request for these snapshots is accepted, or the error.
    fn ask(&self, client: &Client, snapshots: &[&str], dry_run: bool) -> Result<String, String> {
        let name = self.cluster.unique("request");
        let spec = json!({ "snapshots": snapshots });
        let request: SnapshotSessionRequest = serde_json::from_value(json!({
            "apiVersion": "cbt.storage.k8s.io/v1alpha2", "kind": "SnapshotSessionRequest",
            "metadata": { "name": name }, "spec": spec,
        }))
        .unwrap();
        let api: Api<SnapshotSessionRequest> = Api::namespaced(client.clone(), &self.apps);
        let post = PostParams { dry_run, ..PostParams::default() };
        match self.cluster.block_on(api.create(&post, &request)) {
            Ok(_) => Ok(name),
            Err(kube::Error::Api(status)) => Err(format!("{}: {}", status.code, status.message)),
            Err(error) => panic!("{error}"),
        }
    }

    fn exists(&self, name: &str) -> bool {
        self.cluster.get(&self.cluster.api_in::<SnapshotSessionRequest>(&self.apps), name).is_some()
    }

    fn log_has(&self, words: &str) {
        self.cluster.wait_for(words, || self.manager.process.log().contains(words).then_some(()));
    }
}

fn assert_refused(answer: Result<String, String>, words: &[&str]) {
    let refused = answer.expect_err("it was taken");
    for word in words {
        assert!(refused.contains(word), "{word:?} is not in: {refused}");
    }
}

#[test]
fn only_users_who_may_get_all_snapshots_are_admitted() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let backup = cluster.account(&rig.apps, "backup");
    rig.may_create(&backup);
    cluster.grant_in(&rig.apps, &backup, &[rule(VOLUME_SNAPSHOTS, &["volumesnapshots"], &["get"])]);
    let name = rig.ask(&cluster.client_as(&backup), &["monday", "tuesday"], false).unwrap();
    assert!(rig.exists(&name));
    let stranger = cluster.client_as(&rig.stranger);
    let expected = [
        "403",
        &rig.stranger.user(),
        "volumesnapshots.snapshot.storage.k8s.io",
        "\"a\", \"b\", \"c\" and 1 more",
        &format!("namespace {}", rig.apps),
        "the verb get",
    ];
    assert_refused(rig.ask(&stranger, &["d", "a", "c", "b"], false), &expected);
    // The permission is limited to its own namespace.
    let elsewhere = cluster.namespace("elsewhere");
    let account = cluster.account(&rig.apps, "elsewhere");
    rig.may_create(&account);
    cluster.grant_in(
        &elsewhere,
        &account,
        &[rule(VOLUME_SNAPSHOTS, &["volumesnapshots"], &["get"])],
    );
    assert_refused(rig.ask(&cluster.client_as(&account), &["monday"], false), &["403", "monday"]);
}

#[test]
fn permissions_for_single_names_are_enough() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let limited = cluster.account(&rig.apps, "limited");
    rig.may_create(&limited);
    let get = rule(VOLUME_SNAPSHOTS, &["volumesnapshots"], &["get"]);
    let only = PolicyRule { resource_names: Some(vec!["monday".to_owned()]), ..get };
    cluster.grant_in(&rig.apps, &limited, &[only]);
    let client = cluster.client_as(&limited);
    cluster.wait_for("the right to monday", || rig.ask(&client, &["monday"], false).ok());
    let refused = rig.ask(&client, &["monday", "tuesday"], false);
    assert!(!refused.clone().unwrap_err().contains("monday"), "{refused:?}");
    assert_refused(refused, &["403", "\"tuesday\""]);
}

#[test]
fn all_fields_except_the_spec_may_change() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let name = rig.ask(&cluster.client(), &["monday"], false).unwrap();
    // The updating user's permission to get snapshots does not matter.
    let api: Api<SnapshotSessionRequest> =
        Api::namespaced(cluster.client_as(&rig.stranger), &rig.apps);
    cluster.merge(&api, &name, &json!({ "metadata": { "labels": { "team": "a" } } }));
    let keep = json!({ "metadata": { "finalizers": ["example.com/keep"] } });
    cluster.merge(&api, &name, &keep);
    let patch = json!({ "spec": { "snapshots": ["tuesday"] } });
    let changed = cluster.try_merge(&api, &name, &patch);
    let error = changed.unwrap_err().to_string();
    assert!(error.contains("cannot be changed"), "{error}");
    let all = cluster.api_in::<SnapshotSessionRequest>(&rig.apps);
    cluster.delete(&all, &name);
    cluster.merge(&all, &name, &json!({ "metadata": { "finalizers": null } }));
    cluster.wait_until_gone(&all, &name);
}

#[test]
fn without_review_permission_requests_are_refused() {
    let Some(cluster) = shared() else { return };
    let mut rules = manager_rules();
    rules.retain(|rule| rule.resources.as_deref() != Some(&["subjectaccessreviews".to_owned()]));
    let rig = Rig::with(cluster, rules, &[]);
    rig.configure("Fail");
    rig.wait_until_judging();
    let expected =
        ["500", "the ServiceAccount of the", "may not create SubjectAccessReviews", "ClusterRole"];
    assert_refused(rig.ask(&cluster.client(), &["monday"], false), &expected);
    rig.log_has("may not create SubjectAccessReviews");
}

#[test]
fn a_namespace_has_at_most_the_maximum_of_requests() {
    let Some(cluster) = shared() else { return };
    let requests = "snapshotsessionrequests";
    let mut without_watch = manager_rules();
    without_watch.retain(|rule| rule.resources != Some(vec![requests.to_owned()]));
    for rules in [manager_rules(), without_watch] {
        let rig = Rig::with(cluster, rules, &["--max-sessions-per-namespace", "2"]);
        cluster.grant_in(&rig.apps, &rig.account, &[rule(OURS, &[requests], &["list"])]);
        rig.configure("Fail");
        rig.wait_until_judging();
        let client = cluster.client();
        cluster.wait_for("the rights of the manager", || rig.ask(&client, &["x"], true).ok());
        let first = rig.ask(&client, &["monday"], false).unwrap();
        rig.ask(&client, &["tuesday"], false).unwrap();
        let refused = cluster.wait_for("the refusal", || rig.ask(&client, &["x"], true).err());
        let expected = format!("the namespace {} has 2 SnapshotSessionRequests", rig.apps);
        assert_refused(Err(refused), &["403", &expected, "the maximum is 2", "delete some"]);
        let all = cluster.api_in::<SnapshotSessionRequest>(&rig.apps);
        cluster.merge(&all, &first, &json!({ "metadata": { "labels": { "team": "a" } } }));
        cluster.delete(&all, &first);
        cluster.wait_for("room", || rig.ask(&client, &["x"], true).ok());
        cluster.delete(&rig.configurations(), &rig.configuration);
    }
}

#[test]
fn with_a_client_ca_only_the_api_server_is_answered() {
    let Some(cluster) = shared() else { return };
    let rig = |authority: &str| {
        let file = cluster.directory().join("pki").join(authority);
        let rig = Rig::with(cluster, manager_rules(), &["--client-ca", path(&file)]);
        rig.configure("Fail");
        rig
    };
    let trusting = rig("ca.crt");
    trusting.wait_until_judging();
    let (port, pem) = (trusting.manager.port, trusting.ca_bundle().unwrap());
    let answer = cluster.block_on(async {
        let mut stream = connect(port, &pem).await;
        // The connection may be closed before the request is sent.
        let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
        stream.read_u8().await
    });
    assert!(answer.is_err(), "a client without a certificate is answered");
    // The API server has no certificate of this authority.
    let other = rig("front-proxy-ca.crt");
    cluster.wait_for("the authority of the webhook", || other.ca_bundle());
    let expected = ["failed calling webhook", "tls: "];
    cluster.wait_for("a refused API server", || {
        let refused = other.ask(&cluster.client(), &["monday"], true).err()?;
        expected.iter().all(|part| refused.contains(part)).then_some(())
    });
}

#[test]
#[ignore = "full tier"]
fn only_the_ca_bundle_is_written() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, manager_rules(), &[]);
    rig.log_has("does not exist");
    assert!(rig.found().is_none(), "the session manager created the configuration");
    rig.configure("Ignore");
    let without = |mut configuration: ValidatingWebhookConfiguration| {
        let webhooks = configuration.webhooks.take().unwrap_or_default();
        let webhooks = webhooks.into_iter().map(|mut webhook| {
            webhook.client_config.ca_bundle = None;
            webhook
        });
        webhooks.collect::<Vec<_>>()
    };
    let before = without(rig.found().unwrap());
    let published = cluster.wait_for("the bundle", || rig.ca_bundle());
    assert!(tls::client_config(published.as_bytes()).is_ok());
    assert_eq!(without(rig.found().unwrap()), before);
    rig.log_has("failurePolicy is not Fail");
    let api = rig.configurations();
    let started = Instant::now();
    for (path, value) in [
        ("clientConfig/caBundle", json!(ByteString(published.replace('A', "B").into_bytes()))),
        ("timeoutSeconds", json!(7)),
        ("failurePolicy", json!("Fail")),
    ] {
        let path = format!("/webhooks/0/{path}");
        let patch = json!([{ "op": "replace", "path": path, "value": value }]);
        let patch: kube::api::Patch<()> =
            kube::api::Patch::Json(serde_json::from_value(patch).unwrap());
        cluster.block_on(api.patch(&rig.configuration, &Default::default(), &patch)).unwrap();
    }
    cluster.wait_for("the bundle again", || rig.ca_bundle().filter(|now| *now == published));
    assert!(started.elapsed() < Duration::from_secs(25), "it was the resync that found it");
    let webhook = rig.found().unwrap().webhooks.unwrap().remove(0);
    assert_eq!(webhook.timeout_seconds, Some(7));
    assert_eq!(webhook.failure_policy.as_deref(), Some("Fail"));
    cluster.delete(&api, &rig.configuration);
    std::thread::sleep(Duration::from_secs(3));
    assert!(rig.found().is_none(), "it was created again");
    let warnings = rig.manager.process.log().matches("failurePolicy is not").count();
    assert_eq!(warnings, 1);
}

#[test]
fn a_provided_certificate_keeps_the_ca_bundle() {
    let Some(cluster) = shared() else { return };
    let authorities = ["before", "after"].map(Authority::new);
    let directory = TempDir::with_prefix_in("provided-", cluster.scratch()).unwrap();
    let provided = authorities[0].certify(directory.path(), "webhook");
    let flags = ["--tls-cert", path(&provided.file), "--tls-key", path(&provided.key)];
    let spawn = |cluster: &Cluster, start: &Start<'_>| {
        manager::spawn_with_certificate(cluster, start, free_port(), &flags)
    };
    let rig = Rig::started_by(cluster, manager_rules(), &[], spawn);
    rig.configure("Fail");
    let provide = |pem: String| {
        let bundle = json!(ByteString(pem.into_bytes()));
        let patch = json!([
            { "op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle },
        ]);
        let patch: kube::api::Patch<()> =
            kube::api::Patch::Json(serde_json::from_value(patch).unwrap());
        let api = rig.configurations();
        cluster.block_on(api.patch(&rig.configuration, &Default::default(), &patch)).unwrap();
    };
    let administrators = cluster.client();
    let ask = || rig.ask(&administrators, &["monday"], true);
    provide(authorities[0].pem());
    rig.wait_until_judging();
    ask().unwrap();
    // A renewed certificate is loaded from the files; only an administrator changes the API
    // server's caBundle.
    authorities[1].certify(directory.path(), "webhook");
    provide(authorities[1].pem());
    cluster.wait_for("the new certificate", || ask().ok());
    assert_eq!(rig.ca_bundle(), Some(authorities[1].pem()));
    let fields = rig.found().unwrap().metadata.managed_fields.unwrap_or_default();
    let managers: Vec<_> = fields.into_iter().filter_map(|field| field.manager).collect();
    assert!(!managers.iter().any(|name| name.contains("session-manager")), "{managers:?}");
}
