//! Requests of kubelet for the certificate of a pod, `certificates.k8s.io/v1` since Kubernetes 1.37,
//! with the fields that a signer reads and writes. The API server has checked that kubelet has the
//! pod on its own node (NodeRestriction), and that the request is signed with its key.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use serde::{Deserialize, Serialize};

/// The conditions that end a request.
pub const ISSUED: &str = "Issued";
pub const DENIED: &str = "Denied";

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, CustomResource)]
#[kube(
    group = "certificates.k8s.io",
    version = "v1",
    kind = "PodCertificateRequest",
    namespaced,
    status = "PodCertificateRequestStatus",
    schema = "disabled"
)]
#[serde(rename_all = "camelCase")]
pub struct PodCertificateRequestSpec {
    pub signer_name: String,
    pub pod_name: String,
    #[serde(rename = "podUID")]
    pub pod_uid: String,
    pub service_account_name: String,
    #[serde(rename = "serviceAccountUID")]
    pub service_account_uid: String,
    pub node_name: String,
    #[serde(rename = "nodeUID")]
    pub node_uid: String,
    /// The longest validity; the API server sets a missing one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_expiration_seconds: Option<u32>,
    /// PKCS#10 in DER. Only its key is meant.
    #[serde(rename = "stubPKCS10Request")]
    pub stub_pkcs10_request: ByteString,
    /// Of the pod's author, for the signer.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unverified_user_annotations: BTreeMap<String, String>,
}

/// Once it has a condition, nothing of it can change.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodCertificateRequestStatus {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// In PEM, the issued certificate first.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub certificate_chain: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_before: Option<Time>,
    /// When kubelet begins to request the next one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub begin_refresh_at: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_after: Option<Time>,
}

impl PodCertificateRequest {
    /// Whether no signer has decided yet.
    pub fn is_open(&self) -> bool {
        self.status.as_ref().is_none_or(|status| status.conditions.is_empty())
    }
}
