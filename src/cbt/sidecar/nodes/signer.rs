//! The certificates of the nodes' sidecars, which kubelet requests for their pods
//! (PodCertificateRequest). A request is granted if the pod has the ServiceAccount of the nodes'
//! sidecars. The certificate names the pod's node, which the API server has verified. Each replica
//! signs, with an authority of the nodes alone: the first write wins.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use rustls::ClientConfig;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::sidecar::metrics::Metrics;
use kubernetes::cache::{Cache, Clients, Key, in_time};
use kubernetes::name;
use kubernetes::pod_certificate::{
    DENIED, ISSUED, PodCertificateRequest, PodCertificateRequestStatus,
};
use kubernetes::tls;
use kubernetes::tls::authority::{Issued, Signer};
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Names the authority and its Secret.
const MODE: &str = "nodes";
/// Interval at which the Secret is read.
const POLL: Duration = Duration::from_secs(30);
/// Pause after a failed attempt.
const RETRY: Duration = Duration::from_secs(1);
/// Timeout of the first read of the authority.
const START: Duration = Duration::from_secs(120);
/// Validity of a certificate, if the request does not limit it further.
const VALIDITY: Duration = Duration::from_secs(24 * 3600);

/// What is signed.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Name of the signer in requests.
    pub signer: String,
    /// ServiceAccount of the nodes' sidecars.
    pub account: Key,
}

/// Why a request is denied: a reason for programs, and a message.
type Denial = (&'static str, String);

impl Policy {
    /// The name for which the certificate is valid.
    fn grants(&self, request: &PodCertificateRequest) -> Result<String, Denial> {
        let spec = &request.spec;
        let found = Key::new(&request.namespace().unwrap_or_default(), &spec.service_account_name);
        if found != self.account {
            let Key { namespace, name } = &self.account;
            let message = format!(
                "the signer {} signs for the ServiceAccount {namespace}/{name}, not for {}/{}",
                self.signer, found.namespace, found.name
            );
            return Err(("OtherServiceAccount", message));
        }
        if let Some(key) = spec.unverified_user_annotations.keys().next() {
            let message = format!("userAnnotations: {key} is unknown; this signer knows none");
            return Err(("InvalidUnverifiedUserAnnotations", message));
        }
        if !name::is_object(&spec.node_name) {
            return Err(("InvalidNodeName", "the node's name is not that of an object".into()));
        }
        Ok(spec.node_name.clone())
    }
}

/// Signs until the shutdown.
pub struct NodeSigner {
    policy: Policy,
    signer: Signer,
    requests: Cache<PodCertificateRequest>,
    clients: Clients,
    metrics: Metrics,
    trusted: watch::Sender<Arc<ClientConfig>>,
}

/// Starts to sign. Returns what to trust in nodes.
///
/// # Errors
/// The Secret of the authority belongs to another party, or cannot be read for two minutes.
pub async fn start(
    policy: Policy,
    (namespace, secret): (&str, String),
    clients: Clients,
    metrics: &Metrics,
    shutdown: &Shutdown,
) -> anyhow::Result<watch::Receiver<Arc<ClientConfig>>> {
    let mut signer = Signer::new(clients.watch.clone(), namespace, secret, MODE);
    let bundle = first(&mut signer, shutdown).await.context("--node-signer")?;
    let (trusted, receiver) = watch::channel(trusting(&bundle)?);
    let select = watcher::Config::default().fields(&format!("spec.signerName={}", policy.signer));
    let lookups = clients.lookups.clone();
    let of = move |namespace: &str| Api::namespaced(lookups.clone(), namespace);
    let all = Api::all(clients.watch.clone());
    let requests = Cache::start(all, of, select, |_| None, shutdown.clone());
    let signer =
        NodeSigner { policy, signer, requests, clients, metrics: metrics.clone(), trusted };
    let shutdown = shutdown.clone();
    task::spawn(async move {
        tokio::select! {
            () = signer.run() => {}
            () = shutdown.draining() => {}
        }
    });
    Ok(receiver)
}

/// The first bundle of the authority.
async fn first(signer: &mut Signer, shutdown: &Shutdown) -> anyhow::Result<String> {
    let until = Instant::now() + START;
    loop {
        match signer.refresh().await {
            Ok(bundle) => return Ok(bundle),
            Err(error) if Signer::is_final(&error) || Instant::now() >= until => return Err(error),
            Err(_) => {}
        }
        tokio::select! {
            () = sleep(RETRY) => {}
            () = shutdown.draining() => anyhow::bail!("stopped before the authority was read"),
        }
    }
}

fn trusting(bundle: &str) -> anyhow::Result<Arc<ClientConfig>> {
    tls::client_config(bundle.as_bytes()).map(Arc::new)
}

impl NodeSigner {
    async fn run(mut self) {
        let mut changes = self.requests.changes();
        let mut read_at = Instant::now() + POLL;
        loop {
            changes.borrow_and_update();
            let is_done = self.answer_all().await;
            let pause = if is_done { POLL } else { RETRY };
            // An error means that the watch has ended, as it does at the shutdown.
            let _ = timeout(pause, changes.changed()).await;
            if Instant::now() >= read_at {
                self.read().await;
                read_at = Instant::now() + POLL;
            }
        }
    }

    /// Reads the authority, which an administrator may have replaced.
    async fn read(&mut self) {
        // The error is in the log, and the last authority remains.
        let Ok(bundle) = self.signer.refresh().await else { return };
        match trusting(&bundle) {
            Ok(config) => drop(self.trusted.send_replace(config)),
            Err(error) => tracing::error!(error = format!("{error:#}"), "--node-signer: ca.crt"),
        }
    }

    /// Returns whether no request is left for a later attempt.
    async fn answer_all(&self) -> bool {
        let mut is_done = true;
        let open = self.requests.all().unwrap_or_default();
        for request in open.iter().filter(|request| request.is_open()) {
            if let Err(error) = self.answer(request).await {
                is_done = false;
                let (namespace, name) =
                    (request.namespace().unwrap_or_default(), request.name_any());
                let error = format!("{error:#}");
                tracing::warn!(
                    error,
                    "PodCertificateRequest {namespace}/{name}: not answered; retrying"
                );
            }
        }
        is_done
    }

    async fn answer(&self, request: &PodCertificateRequest) -> anyhow::Result<()> {
        let (status, result) = match self.decide(request) {
            Ok((node, issued)) => {
                tracing::info!(node, pod = request.spec.pod_name, "signed a node's certificate");
                (granted(&node, issued)?, "issued")
            }
            Err((reason, message)) => {
                tracing::warn!(reason, message, "denied a certificate");
                (denied(reason, message), "denied")
            }
        };
        let namespace = request.namespace().unwrap_or_default();
        let api: Api<PodCertificateRequest> =
            Api::namespaced(self.clients.watch.clone(), &namespace);
        // Another replica may have answered: then the version differs.
        let version = request.resource_version();
        let patch = json!({ "metadata": { "resourceVersion": version }, "status": status });
        let (params, name) = (PatchParams::default(), request.name_any());
        let patched = in_time(api.patch_status(&name, &params, &Patch::Merge(&patch))).await;
        match patched {
            Ok(_) => self.metrics.node_certificate(result),
            Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => {}
            Err(error) => return Err(error).context("update its status"),
        }
        Ok(())
    }

    fn decide(&self, request: &PodCertificateRequest) -> Result<(String, Issued), Denial> {
        let node = self.policy.grants(request)?;
        let spec = &request.spec;
        let most = spec.max_expiration_seconds.map(|most| Duration::from_secs(most.into()));
        let validity = most.map_or(VALIDITY, |most| most.min(VALIDITY));
        let issued = self.signer.sign(&spec.stub_pkcs10_request.0, &node, validity);
        let unsupported = |error: anyhow::Error| {
            ("UnsupportedKeyType", format!("{error:#}; use keyType ECDSAP256 in the pod's volume"))
        };
        issued.map(|issued| (node, issued)).map_err(unsupported)
    }
}

fn granted(node: &str, issued: Issued) -> anyhow::Result<PodCertificateRequestStatus> {
    let Issued { certificate, not_before, not_after } = issued;
    let half = not_after.duration_since(not_before).unwrap_or_default() / 2;
    Ok(PodCertificateRequestStatus {
        conditions: vec![condition(ISSUED, "Node", format!("for node {node}"))],
        certificate_chain: certificate,
        not_before: Some(time(not_before)?),
        begin_refresh_at: Some(time(not_before + half)?),
        not_after: Some(time(not_after)?),
    })
}

fn denied(reason: &str, message: String) -> PodCertificateRequestStatus {
    let conditions = vec![condition(DENIED, reason, message)];
    PodCertificateRequestStatus { conditions, ..Default::default() }
}

fn condition(type_: &str, reason: &str, message: String) -> Condition {
    Condition {
        type_: type_.to_owned(),
        status: "True".to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: Time(Timestamp::now()),
        observed_generation: None,
    }
}

fn time(at: SystemTime) -> anyhow::Result<Time> {
    Timestamp::try_from(at).map(Time).context("a time of the certificate")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(namespace: &str, account: &str, node: &str) -> PodCertificateRequest {
        serde_json::from_value(json!({
            "metadata": { "name": "r", "namespace": namespace },
            "spec": {
                "signerName": "example.com/node", "podName": "p", "podUID": "u",
                "serviceAccountName": account, "serviceAccountUID": "u",
                "nodeName": node, "nodeUID": "u", "stubPKCS10Request": "",
            },
        }))
        .unwrap()
    }

    #[test]
    fn only_pods_of_the_account_receive_the_name_of_their_node() {
        let account = Key::new("storage", "node");
        let policy = Policy { signer: "example.com/node".into(), account };
        assert_eq!(policy.grants(&request("storage", "node", "node-1")).unwrap(), "node-1");
        let refused = |request: PodCertificateRequest| policy.grants(&request).unwrap_err().0;
        assert_eq!(refused(request("shop", "node", "node-1")), "OtherServiceAccount");
        assert_eq!(refused(request("storage", "default", "node-1")), "OtherServiceAccount");
        assert_eq!(refused(request("storage", "node", "*.example.com")), "InvalidNodeName");
        let mut annotated = request("storage", "node", "node-1");
        annotated.spec.unverified_user_annotations.insert("example.com/name".into(), "x".into());
        assert_eq!(refused(annotated), "InvalidUnverifiedUserAnnotations");
    }
}
