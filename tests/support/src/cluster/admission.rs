//! The admission webhooks of this project as a process, and their webhook configurations.

use crate::driver::binary;
use std::process::Command;

use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde_json::{Value, json};

use super::Cluster;
use super::access::{rule, shipped, shipped_rules};
use super::programs::{Process, Served, free_port};
use crate::path;

/// The driver name in deploy/admission.
const DRIVER: &str = "loopback.csi.local";
/// Paths of the webhooks for pods of any driver.
const MUTATE_DEFERRAL: &str = "/mutate-deferral";
pub const VALIDATE_DEFERRAL: &str = "/validate-deferral";
/// The ConfigMap of the policy; deploy/admission uses this name for all objects.
pub const CONFIG_MAP: &str = "csi-loopback-admission";

/// The cluster rights of deploy/admission for this driver and configuration, and the rights in the
/// webhooks' namespace, including the creation of their Secret.
fn admission_rules(driver: &str, configuration: &str) -> Vec<PolicyRule> {
    let mut rules = shipped_rules("deploy/admission/rbac.yaml");
    for name in rules.iter_mut().filter_map(|rule| rule.resource_names.as_mut()).flatten() {
        *name = match name.as_str() {
            DRIVER => driver.to_owned(),
            CONFIG_MAP => configuration.to_owned(),
            other => panic!("{other}"),
        };
    }
    rules.push(PolicyRule {
        resource_names: Some(vec![CONFIG_MAP.to_owned()]),
        ..rule("", &["configmaps"], &["get", "list", "watch"])
    });
    rules.push(rule("", &["secrets"], &["get", "create", "update"]));
    rules
}

/// Options of the webhooks.
#[derive(Default)]
pub struct With<'s> {
    pub flags: &'s [&'s str],
    /// The content of the policy's ConfigMap, if any.
    pub policy: Option<&'s str>,
    /// Flags of a provided certificate. None: self-signed.
    pub certificate: Option<[&'s str; 4]>,
    /// Without the mutating webhooks.
    pub without_mutating: bool,
    /// Address of the API server for the webhooks, if not the default.
    pub server: Option<&'s str>,
}

/// The webhooks for a driver, in a separate namespace and with minimal rights.
pub struct Webhooks {
    /// Their namespace.
    pub home: String,
    pub driver: String,
    pub configuration: String,
    /// The ClusterRole of the webhooks.
    pub role: String,
    pub served: Served,
}

impl Webhooks {
    /// Starts the process without waiting, and without webhook configurations.
    pub fn start(cluster: &Cluster, driver: String, with: &With<'_>) -> Self {
        let (home, configuration) = (cluster.namespace("webhooks"), cluster.unique("inline"));
        let account = cluster.account(&home, "webhooks");
        let role = cluster.grant(&account, &admission_rules(&driver, &configuration));
        let kubeconfig = match with.server {
            Some(server) => cluster.kubeconfig_at(server, &account),
            None => cluster.kubeconfig_of(&account),
        };
        if let Some(policy) = with.policy {
            set_policy(cluster, &home, policy);
        }
        let (port, http_port) = (free_port(), free_port());
        let address = format!("localhost:{port}");
        let mut command = Command::new(binary());
        command
            .args(["--mode", "admission", "--kubeconfig", path(&kubeconfig)])
            .args(["--namespace", &home, "--driver-name", &driver])
            .args(["--webhook-configuration", &configuration])
            .args(["--port", &port.to_string()])
            .args(["--http-endpoint", &format!("127.0.0.1:{http_port}")])
            .args(with.flags);
        if !with.flags.contains(&"--kube-api-qps") {
            command.args(["--kube-api-qps", "1000", "--kube-api-burst", "1000"]);
        }
        match with.certificate {
            Some(flags) => command.args(flags),
            None => command.args(["--self-signed", "--service-address", &address]),
        };
        let process = Process::spawn(&cluster.unique("admission"), command, cluster.scratch());
        let served = Served { process, port, http_port };
        Self { home, driver, configuration, role, served }
    }

    /// Creates the webhook configurations. The webhooks for opt-ins, which apply to all drivers,
    /// apply only to pods of the namespace `apps`.
    pub fn configure(&self, cluster: &Cluster, without_mutating: bool, apps: &str) {
        let object = |kind: &str| {
            let webhooks: Vec<_> = shipped_webhooks(kind)
                .into_iter()
                .filter(|webhook| webhook["clientConfig"]["service"]["path"] != VALIDATE_DEFERRAL)
                .map(|webhook| self.here(webhook, apps))
                .collect();
            json!({ "metadata": { "name": self.configuration }, "webhooks": webhooks })
        };
        if !without_mutating {
            let api = cluster.api::<MutatingWebhookConfiguration>();
            cluster.create(&api, object("MutatingWebhookConfiguration"));
        }
        let api = cluster.api::<ValidatingWebhookConfiguration>();
        cluster.create(&api, object("ValidatingWebhookConfiguration"));
    }

    /// A webhook of deploy/admission, changed to this driver and this machine's port.
    pub fn here(&self, webhook: Value, apps: &str) -> Value {
        let path = webhook["clientConfig"]["service"]["path"].as_str().unwrap().to_owned();
        let text =
            webhook.to_string().replace(DRIVER, &self.driver).replace(CONFIG_MAP, &self.home);
        let mut webhook: Value = serde_json::from_str(&text).unwrap();
        let url = format!("https://localhost:{}{path}", self.served.port);
        webhook["clientConfig"] = json!({ "url": url });
        if [MUTATE_DEFERRAL, VALIDATE_DEFERRAL].contains(&path.as_str()) {
            let labels = json!({ "kubernetes.io/metadata.name": apps });
            webhook["namespaceSelector"] = json!({ "matchLabels": labels });
        }
        webhook
    }
}

/// Creates or changes the policy.
pub fn set_policy(cluster: &Cluster, home: &str, document: &str) {
    let api = cluster.api_in::<ConfigMap>(home);
    let data = json!({ "policy.yaml": document });
    match cluster.get(&api, CONFIG_MAP) {
        Some(_) => drop(cluster.merge(&api, CONFIG_MAP, &json!({ "data": data }))),
        None => {
            let object = json!({ "metadata": { "name": CONFIG_MAP }, "data": data });
            cluster.create(&api, object);
        }
    }
}

/// The webhooks of deploy/admission in the configuration of this kind.
pub fn shipped_webhooks(kind: &str) -> Vec<Value> {
    let objects = shipped("deploy/admission/webhooks.yaml").into_iter();
    let mut found = objects.filter(|object| object["kind"] == kind);
    serde_json::from_value(found.next().expect(kind)["webhooks"].take()).unwrap()
}
