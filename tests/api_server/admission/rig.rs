//! Webhooks for a separate driver, called by the API server, and helpers to create pods.

use std::ops::{Deref, DerefMut};

use csi_loopback::kubernetes::client::{Rate, connect_as_user_once};
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use support::cluster::Cluster;
use support::cluster::admission::{Webhooks, set_policy};
use support::cluster::sidecar::http_at;
use support::cluster::tls::post;

pub use support::cluster::admission::With;

pub struct Rig<'a> {
    pub cluster: &'a Cluster,
    /// The namespace whose pods are reviewed.
    pub apps: String,
    webhooks: Webhooks,
    client: Client,
}

impl Deref for Rig<'_> {
    type Target = Webhooks;

    fn deref(&self) -> &Webhooks {
        &self.webhooks
    }
}

impl DerefMut for Rig<'_> {
    fn deref_mut(&mut self) -> &mut Webhooks {
        &mut self.webhooks
    }
}

impl<'a> Rig<'a> {
    /// A rig whose webhooks are called.
    pub fn new(cluster: &'a Cluster, with: With<'_>) -> Self {
        let rig = Self::started(cluster, &with);
        rig.configure(with.without_mutating);
        if with.certificate.is_none() {
            rig.wait_until_judging();
        }
        rig
    }

    /// A rig whose webhooks are not called yet.
    pub fn started(cluster: &'a Cluster, with: &With<'_>) -> Self {
        let webhooks = Webhooks::start(cluster, cluster.unique("driver"), with);
        // The default client would retry a pod that is refused with 503.
        let rate = Rate { per_second: 1000.0, burst: 1000 };
        let kubeconfig = cluster.kubeconfig();
        let client = cluster
            .block_on(connect_as_user_once(Some(kubeconfig.as_path()).into(), rate))
            .unwrap();
        Self { cluster, apps: namespace(cluster, json!({})), webhooks, client }
    }

    /// Makes the API server call the webhooks.
    pub fn configure(&self, without_mutating: bool) {
        self.webhooks.configure(self.cluster, without_mutating, &self.apps);
    }

    /// Waits until the API server applies the configuration.
    pub fn wait_until_judging(&self) {
        let wrong = self.volume(json!({ "size": "wrong" }));
        self.cluster.wait_for("the webhooks", || {
            let refused = self.dry(&self.apps, &pod(&wrong)).err()?;
            refused.contains("denied the request").then_some(())
        });
        let mutating = self.cluster.api::<MutatingWebhookConfiguration>();
        if self.cluster.get(&mutating, &self.configuration).is_none() {
            return;
        }
        let content = self.volume(json!({ "content/a": "x" }));
        self.cluster.wait_for("the mutating webhook", || {
            let made = self.dry(&self.apps, &pod(&content)).ok()?;
            (made.spec?.volumes?[0].csi.as_ref()?.read_only == Some(true)).then_some(())
        });
    }

    /// Sets the policy.
    pub fn policy(&self, document: &str) {
        set_policy(self.cluster, &self.home, document);
    }

    /// An inline volume of the driver, named v.
    pub fn volume(&self, attributes: Value) -> Value {
        json!({ "name": "v", "csi": { "driver": self.driver, "volumeAttributes": attributes } })
    }

    pub fn with_secret(&self) -> Value {
        let secret = json!({ "name": "s" });
        json!({ "name": "v", "csi": { "driver": self.driver, "nodePublishSecretRef": secret } })
    }

    pub fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Creates the pod, or returns the error.
    pub fn make(&self, namespace: &str, pod: &Value) -> Result<Pod, String> {
        self.post(namespace, pod, false)
    }

    /// The same as a dry run.
    pub fn dry(&self, namespace: &str, pod: &Value) -> Result<Pod, String> {
        self.post(namespace, pod, true)
    }

    fn post(&self, namespace: &str, pod: &Value, dry_run: bool) -> Result<Pod, String> {
        let mut pod = pod.clone();
        pod["metadata"]["name"] = self.cluster.unique("pod").into();
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let params = PostParams { dry_run, ..PostParams::default() };
        refusal(self.cluster.block_on(self.pods(namespace).create(&params, &pod)))
    }

    /// Adds an ephemeral container that mounts v.
    pub fn debug(
        &self,
        pod: &str,
        container: &str,
        read_only: Option<bool>,
    ) -> Result<Pod, String> {
        let mut mount = json!({ "name": "v", "mountPath": "/v" });
        if let Some(read_only) = read_only {
            mount["readOnly"] = read_only.into();
        }
        let container = json!({ "name": container, "image": "x", "volumeMounts": [mount] });
        let patch = Patch::Strategic(json!({ "spec": { "ephemeralContainers": [container] } }));
        let pods = self.pods(&self.apps);
        let params = PatchParams::default();
        refusal(self.cluster.block_on(pods.patch_ephemeral_containers(pod, &params, &patch)))
    }

    /// The output of `kubectl apply` for the object.
    pub fn apply(&self, object: &Value) -> (bool, String) {
        let file = self.cluster.write("object", &object.to_string());
        let line = ["create", "-n", &self.apps, "-f", support::path(&file)];
        let output = self.cluster.kubectl(&line);
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    }

    pub fn ca_bundle(&self) -> Option<String> {
        let api = self.cluster.api::<ValidatingWebhookConfiguration>();
        let webhook = self.cluster.get(&api, &self.configuration)?.webhooks?.remove(0);
        String::from_utf8(webhook.client_config.ca_bundle?.0).ok().filter(|pem| !pem.is_empty())
    }

    pub fn page(&self, page: &str) -> String {
        http_at(self.served.http_port, page).unwrap_or_default()
    }

    pub fn is_healthy(&self) -> bool {
        self.page("/health").starts_with("HTTP/1.1 200")
    }

    /// Waits until a pod with this volume is refused with these words.
    pub fn refused_once(&self, namespace: &str, volume: &Value, words: &str) {
        self.cluster.wait_for(words, || {
            let refused = self.dry(namespace, &pod(volume)).err()?;
            refused.contains(words).then_some(())
        });
    }

    pub fn allowed_once(&self, namespace: &str, volume: &Value) {
        self.cluster.wait_for("the pod", || self.dry(namespace, &pod(volume)).ok());
    }
}

fn refusal(made: kube::Result<Pod>) -> Result<Pod, String> {
    match made {
        Ok(pod) => Ok(pod),
        Err(kube::Error::Api(status)) => Err(format!("{}: {}", status.code, status.message)),
        Err(error) => panic!("{error}"),
    }
}

/// A namespace in which pods can be created.
pub fn namespace(cluster: &Cluster, labels: Value) -> String {
    use k8s_openapi::api::core::v1::Namespace;
    let name = cluster.unique("apps");
    let object = json!({ "metadata": { "name": name, "labels": labels } });
    cluster.create(&cluster.api::<Namespace>(), object);
    cluster.account(&name, "default");
    name
}

/// A pod with this volume, mounted by its only container.
pub fn pod(volume: &Value) -> Value {
    let mount = json!({ "name": volume["name"], "mountPath": "/v" });
    let container = json!({ "name": "c", "image": "x", "volumeMounts": [mount] });
    // No controller would provide the token's volume.
    json!({ "spec": {
        "volumes": [volume], "containers": [container], "automountServiceAccountToken": false,
    } })
}

#[track_caller]
pub fn assert_refused<T: std::fmt::Debug>(made: Result<T, String>, words: &[&str]) {
    let refused = made.expect_err("it was taken");
    for word in words {
        assert!(refused.contains(word), "{word:?} is not in: {refused}");
    }
}

/// The response to a request of a separate client.
pub fn posted(rig: &Rig<'_>, path: &str, body: &str) -> String {
    let pem = rig.ca_bundle().unwrap();
    rig.cluster.block_on(post(rig.served.port, &pem, path, body))
}
