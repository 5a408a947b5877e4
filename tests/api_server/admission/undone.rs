//! Another mutating webhook, which is called after ours and reverts its changes.

use std::time::Duration;
use support::cluster::shared;

use axum::Router;
use csi_loopback::kubernetes::admission::{Allowed, Refusal, ReviewRequest, Set, Webhook};
use csi_loopback::kubernetes::https::Limits;
use csi_loopback::kubernetes::pod::Pod;
use csi_loopback::telemetry::shutdown::Phase;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::watch;

use super::rig::{Rig, With, assert_refused, pod};
use support::cluster::Cluster;
use support::cluster::tls::{Authority, serve};

const LIMITS: Limits = Limits { body: 7 << 20, request: Duration::from_secs(4) };

/// The reverting webhook, which runs until it is dropped.
struct Undoing<'a> {
    cluster: &'a Cluster,
    configuration: String,
    phase: watch::Sender<Phase>,
}

/// Its change of each pod.
fn undo() -> Allowed {
    let volume = ["spec", "volumes", "0", "csi", "readOnly"];
    let mount = ["spec", "containers", "0", "volumeMounts", "0", "readOnly"];
    Allowed { changes: vec![Set::new(volume, false), Set::new(mount, false)], warnings: Vec::new() }
}

impl<'a> Undoing<'a> {
    /// For pods of the rig's namespace. `again`: whether it is called again after another webhook's
    /// change.
    fn start(rig: &Rig<'a>, again: &str) -> Self {
        let cluster = rig.cluster;
        let authority = Authority::new("undoing");
        let directory = TempDir::with_prefix_in("undoing-", cluster.scratch()).unwrap();
        let certificate = authority.certify(directory.path(), "undoing");
        let judge = |_: ReviewRequest<Pod>| async { Ok::<_, Refusal>(undo()) };
        let routes = Router::new().route("/", Webhook::of::<Pod>(LIMITS.request).route(judge));
        let (port, phase) = serve(cluster, &certificate, routes, LIMITS);
        // Webhooks are called in the order of their configurations' names.
        let configuration = cluster.unique("undoing");
        assert!(configuration > rig.configuration);
        let webhook = json!({
            "name": "undoing.example.com",
            "admissionReviewVersions": ["v1"],
            "clientConfig": {
                "url": format!("https://localhost:{port}/"),
                "caBundle": ByteString(authority.pem().into_bytes()),
            },
            "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": rig.apps } },
            "reinvocationPolicy": again,
            "rules": [{ "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"] }],
            "sideEffects": "None",
        });
        let object = json!({ "metadata": { "name": configuration }, "webhooks": [webhook] });
        cluster.create(&cluster.api::<MutatingWebhookConfiguration>(), object);
        Self { cluster, configuration, phase }
    }
}

impl Drop for Undoing<'_> {
    fn drop(&mut self) {
        let api = self.cluster.api::<MutatingWebhookConfiguration>();
        self.cluster.delete(&api, &self.configuration);
        self.phase.send_replace(Phase::Ending);
    }
}

#[test]
fn reverted_mutations_are_repeated_or_refused() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster, With::default());
    let content = pod(&rig.volume(json!({ "content/a": "x" })));
    let scratch = pod(&rig.volume(json!({})));
    let corrected = || {
        let made = rig.dry(&rig.apps, &content).ok()?.spec?;
        Some([
            made.volumes?[0].csi.as_ref()?.read_only?,
            made.containers[0].volume_mounts.as_ref()?[0].read_only?,
        ])
    };
    // Wait until the API server applies the configuration: the mark is a field with the value
    // false.
    let is_called = || {
        let made = rig.dry(&rig.apps, &scratch).unwrap().spec.unwrap();
        (made.volumes?[0].csi.as_ref()?.read_only == Some(false)).then_some(())
    };
    {
        let _undoing = Undoing::start(&rig, "Never");
        cluster.wait_for("the webhook that undoes", is_called);
        assert_eq!(corrected(), Some([true, true]), "ours is called again");
    }
    {
        let _undoing = Undoing::start(&rig, "IfNeeded");
        let words = [
            "422",
            "spec.volumes[0].csi.readOnly",
            "spec.containers[0].volumeMounts[0].readOnly",
            "must be true",
        ];
        rig.refused_once(&rig.apps, &rig.volume(json!({ "content/a": "x" })), "must be true");
        assert_refused(rig.make(&rig.apps, &content), &words);
    }
    cluster.wait_for("the end of the webhook that undoes", corrected);
}
