//! The admission webhooks of this project as a process, and what makes the API server call them.

use crate::driver::binary;
use std::process::Command;

use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde_json::{Value, json};

use super::Cluster;
use super::access::rule;
use super::programs::{Process, Served, free_port};
use crate::path;

/// Where the policy is.
pub const CONFIG_MAP: &str = "csi-loopback-admission";

/// What the webhooks need, the first two and the last one in the namespace of their own.
fn admission_rules(driver: &str, configuration: &str) -> Vec<PolicyRule> {
    let named = |rule: PolicyRule, name: &str| PolicyRule {
        resource_names: Some(vec![name.to_owned()]),
        ..rule
    };
    let read = ["get", "list", "watch"];
    vec![
        named(rule("", &["configmaps"], &read), CONFIG_MAP),
        rule("", &["secrets"], &["get", "create", "update"]),
        rule("", &["namespaces"], &read),
        named(rule("storage.k8s.io", &["csidrivers"], &read), driver),
        rule("snapshot.storage.k8s.io", &["volumesnapshots", "volumesnapshotcontents"], &read),
        named(
            rule(
                "admissionregistration.k8s.io",
                &["mutatingwebhookconfigurations", "validatingwebhookconfigurations"],
                &["get", "list", "watch", "patch"],
            ),
            configuration,
        ),
    ]
}

/// How the webhooks are to be.
#[derive(Default)]
pub struct With<'s> {
    pub flags: &'s [&'s str],
    /// The ConfigMap, where there is one.
    pub policy: Option<&'s str>,
    /// Flags of a certificate that is provided; else an authority of their own makes one.
    pub certificate: Option<[&'s str; 4]>,
    /// Nothing sets what the other webhook asks for.
    pub without_mutating: bool,
}

/// The webhooks for a driver, in a namespace of their own and with the rights that they need and no others.
pub struct Webhooks {
    /// Their namespace.
    pub home: String,
    pub driver: String,
    pub configuration: String,
    pub served: Served,
}

impl Webhooks {
    /// Starts them and does not wait for them. Nobody calls them yet.
    pub fn start(cluster: &Cluster, driver: String, with: &With<'_>) -> Self {
        let (home, configuration) = (cluster.namespace("webhooks"), cluster.unique("inline"));
        let account = cluster.account(&home, "webhooks");
        cluster.grant(&account, &admission_rules(&driver, &configuration));
        let kubeconfig = cluster.kubeconfig_of(&account);
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
            .args(["--kube-api-qps", "1000", "--kube-api-burst", "1000"])
            .args(with.flags);
        match with.certificate {
            Some(flags) => command.args(flags),
            None => command.args(["--self-signed", "--service-address", &address]),
        };
        let process = Process::spawn(&cluster.unique("admission"), command, cluster.scratch());
        let served = Served { process, port, http_port };
        Self { home, driver, configuration, served }
    }

    /// Has the API server call them.
    pub fn configure(&self, cluster: &Cluster, without_mutating: bool) {
        let of = |mutating| webhooks(&self.driver, &self.home, self.served.port, mutating);
        let object =
            |webhooks| json!({ "metadata": { "name": self.configuration }, "webhooks": webhooks });
        if !without_mutating {
            let api = cluster.api::<MutatingWebhookConfiguration>();
            cluster.create(&api, object(of(true)));
        }
        let api = cluster.api::<ValidatingWebhookConfiguration>();
        cluster.create(&api, object(of(false)));
    }
}

/// Says what the policy is, from then on.
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

/// The webhooks of a configuration as deploy/admission has them, but for this driver and at this machine's port.
fn webhooks(driver: &str, home: &str, port: u16, mutating: bool) -> Vec<Value> {
    let of_pods = json!([
        { "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"],
          "resources": ["pods"], "scope": "Namespaced" },
        { "apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"],
          "resources": ["pods/ephemeralcontainers"], "scope": "Namespaced" },
    ]);
    let has = |spec: &str| {
        format!(
            "has({spec}.volumes) && {spec}.volumes.exists(v, has(v.csi) && v.csi.driver == '{driver}')"
        )
    };
    let webhook = |name: &str, path: &str, rules: &Value, expression: &str, policy: &str| {
        json!({
            "name": format!("{name}.inline.cbt.storage.k8s.io"),
            "admissionReviewVersions": ["v1"],
            "clientConfig": { "url": format!("https://localhost:{port}{path}") },
            "failurePolicy": policy,
            "matchConditions": [{ "name": "inline-volumes-of-the-driver", "expression": expression }],
            "matchPolicy": "Equivalent",
            "namespaceSelector": { "matchExpressions": [
                { "key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": [home] },
            ] },
            "rules": rules, "sideEffects": "None", "timeoutSeconds": 5,
        })
    };
    let pods = has("object.spec");
    if mutating {
        let mut mutate = webhook("mutate-pods", "/mutate-pod", &of_pods, &pods, "Fail");
        mutate["reinvocationPolicy"] = "IfNeeded".into();
        return vec![mutate];
    }
    vec![webhook("validate-pods", "/validate-pod", &of_pods, &pods, "Fail")]
}
