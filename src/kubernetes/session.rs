//! The objects of a snapshot session (KEP-3314, session design, "Custom Resources"). The KEP names
//! them, but leaves their fields open; this project defines them.
//!
//! A backup application creates a [`SnapshotSessionRequest`] in the namespace of its
//! VolumeSnapshots. The session manager finds the driver's [`SnapshotServiceConfiguration`], writes
//! a [`SnapshotSessionData`] into the driver's namespace, and returns its name, the session's
//! token, in the request's status.

use k8s_openapi::ByteString;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::metadata_service::{address, certificates};

/// Maximum number of VolumeSnapshots in a session.
pub const MAX_SNAPSHOTS: usize = 64;
/// Label of a [`SnapshotSessionData`]: the uid of its request.
pub const REQUEST_LABEL: &str = "cbt.storage.k8s.io/session-request-uid";
/// Finalizer that keeps a request until its data, which is in another namespace, is deleted.
pub const FINALIZER: &str = "cbt.storage.k8s.io/session-data";

// printcolumn repeats the attribute `type_`.
#[allow(clippy::duplicated_attributes)]
/// The requested session. Immutable.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[kube(
    group = "cbt.storage.k8s.io",
    version = "v1alpha2",
    kind = "SnapshotSessionRequest",
    plural = "snapshotsessionrequests",
    shortname = "ssr",
    namespaced,
    status = "SnapshotSessionRequestStatus",
    doc = "Requests a snapshot session: direct access to the block metadata of VolumeSnapshots in this namespace. \
           Deleting the object ends the session.",
    annotation(
        "api-approved.kubernetes.io",
        "unapproved, KEP-3314's session design leaves its objects open"
    ),
    // The status's own rules are not evaluated when it is removed.
    validation = Rule::new("!has(oldSelf.status) || has(self.status)").message("status: cannot be removed"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Driver", type_ = "string", json_path = ".status.driver"),
    printcolumn(name = "Expires", type_ = "string", json_path = ".status.expirationTime"),
    printcolumn(name = "Error", type_ = "string", json_path = ".status.error", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self == oldSelf").message("cannot be changed; create another SnapshotSessionRequest"))]
pub struct SnapshotSessionRequestSpec {
    /// Names of 1 to 64 VolumeSnapshots in this namespace, all of one CSI driver.
    #[schemars(schema_with = "snapshot_names")]
    pub snapshots: Vec<String>,
    /// Requested duration of the session in seconds. The session manager has a default and a
    /// maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 315_360_000))]
    pub lifetime_seconds: Option<i64>,
}

/// State of a session. Written only by the session manager.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(oldSelf.state) || oldSelf.state == 'Pending' || (has(self.state) && self.state == oldSelf.state)")
        .message("Ready and Failed are final"),
    // Otherwise the token could change while the first one is in use. A failed session loses its
    // token.
    validation = Rule::new("!has(oldSelf.sessionToken) || (has(self.sessionToken) ? self.sessionToken == oldSelf.sessionToken : has(self.state) && self.state == 'Failed')")
        .message("the token of a session cannot be changed"),
    validation = Rule::new("!has(self.state) || self.state != 'Ready' || (has(self.address) && has(self.caCert) && has(self.sessionToken) && has(self.driver) && has(self.expirationTime))")
        .message("Ready needs address, caCert, sessionToken, driver and expirationTime"),
    validation = Rule::new("!has(self.state) || self.state != 'Failed' || (has(self.error) && !has(self.sessionToken))")
        .message("Failed needs an error and has no sessionToken")
)]
pub struct SnapshotSessionRequestStatus {
    /// Pending until the session can be used (Ready) or has failed (Failed). Absent means Pending.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<SessionState>,
    /// Condition of type Ready, with the reason for the state.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions")]
    pub conditions: Vec<Condition>,
    /// Address of the driver's SnapshotMetadata service, host:port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 261))]
    pub address: Option<String>,
    /// CA certificates (PEM) that sign the service's certificate.
    #[serde(default, rename = "caCert", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "certificates")]
    pub ca_cert: Option<ByteString>,
    /// Token for the field session_token of each call, valid in state Ready. Its holder has access
    /// to the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub session_token: Option<String>,
    /// Name of the CSI driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub driver: Option<String>,
    /// When the session ends and this object is deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "time")]
    pub expiration_time: Option<Time>,
    /// Why the session failed, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32_768))]
    pub error: Option<String>,
}

/// `status.state`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum SessionState {
    #[default]
    Pending,
    Ready,
    Failed,
}

impl SnapshotSessionRequest {
    /// A new request has no status: the API server drops what the creator sends.
    pub fn state(&self) -> SessionState {
        self.status.as_ref().and_then(|status| status.state).unwrap_or_default()
    }

    pub fn session_token(&self) -> Option<&str> {
        self.status.as_ref()?.session_token.as_deref()
    }

    pub fn expiration_time(&self) -> Option<&Time> {
        self.status.as_ref()?.expiration_time.as_ref()
    }
}

// printcolumn repeats the attribute `type_`.
#[allow(clippy::duplicated_attributes)]
/// What a session's client needs to call the driver.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema, CustomResource)]
#[kube(
    group = "cbt.storage.k8s.io",
    version = "v1alpha2",
    kind = "SnapshotServiceConfiguration",
    plural = "snapshotserviceconfigurations",
    shortname = "ssc",
    doc = "Address and CA certificates of a CSI driver's SnapshotMetadata service with session tokens. The object's name \
           and its label cbt.storage.k8s.io/driver are the driver's name.",
    annotation(
        "api-approved.kubernetes.io",
        "unapproved, KEP-3314's session design leaves its objects open"
    ),
    printcolumn(name = "Address", type_ = "string", json_path = ".spec.address"),
    printcolumn(name = "Namespace", type_ = "string", json_path = ".spec.driverNamespace"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotServiceConfigurationSpec {
    /// Address of the service as host:port without a scheme, such as name.namespace.svc:6443. An
    /// IPv6 address must be in brackets.
    #[schemars(schema_with = "address")]
    pub address: String,
    /// CA certificates (PEM) that sign the service's certificate.
    #[serde(rename = "caCert")]
    #[schemars(schema_with = "certificates")]
    pub ca_cert: ByteString,
    /// Namespace of the driver, which contains the SnapshotSessionData objects of its sessions.
    #[schemars(schema_with = "namespace")]
    pub driver_namespace: String,
}

// printcolumn repeats the attribute `type_`.
#[allow(clippy::duplicated_attributes)]
/// What a session's token gives access to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[kube(
    group = "cbt.storage.k8s.io",
    version = "v1alpha2",
    kind = "SnapshotSessionData",
    plural = "snapshotsessiondata",
    singular = "snapshotsessiondata",
    shortname = "ssd",
    namespaced,
    doc = "A snapshot session, for the driver's sidecar. Its name is the session's token: only the session manager and \
           the driver may read such objects.",
    annotation("api-approved.kubernetes.io", "unapproved, KEP-3314's session design leaves its objects open"),
    validation = Rule::new("self.metadata.name.matches('^[a-z0-9]{52,253}$')")
        .message("the name is a token: 52 to 253 of a-z and 0-9"),
    printcolumn(name = "Driver", type_ = "string", json_path = ".spec.driver"),
    printcolumn(name = "Request", type_ = "string", json_path = ".spec.request.name"),
    printcolumn(name = "Of", type_ = "string", json_path = ".spec.request.namespace"),
    printcolumn(name = "Expires", type_ = "string", json_path = ".spec.expirationTime")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self == oldSelf").message("cannot be changed"))]
pub struct SnapshotSessionDataSpec {
    /// Name of the CSI driver.
    #[schemars(length(min = 1, max = 253))]
    pub driver: String,
    /// The request of the session.
    pub request: SessionRequestReference,
    /// The snapshots that the session gives access to.
    #[schemars(length(min = 1, max = 64))]
    pub snapshots: Vec<SessionSnapshot>,
    /// Time from which the token is refused.
    #[schemars(schema_with = "time")]
    pub expiration_time: Time,
}

/// Reference to a SnapshotSessionRequest.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct SessionRequestReference {
    #[schemars(schema_with = "namespace")]
    pub namespace: String,
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    #[schemars(length(min = 1, max = 253))]
    pub uid: String,
}

/// A VolumeSnapshot at the start of the session. A later object of the same name is not part of the
/// session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SessionSnapshot {
    #[schemars(schema_with = "namespace")]
    pub namespace: String,
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    #[schemars(length(min = 1, max = 253))]
    pub uid: String,
    /// CSI handle of the snapshot.
    #[schemars(length(min = 1, max = 1024))]
    pub handle: String,
}

fn snapshot_names(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_SNAPSHOTS,
        "x-kubernetes-list-type": "set",
        "items": {
            "type": "string",
            "minLength": 1,
            "maxLength": 253,
            "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
        },
    })
}

fn namespace(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "minLength": 1,
        "maxLength": 63,
        "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    })
}

fn time(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "format": "date-time" })
}

/// As `metav1.Condition` is.
pub(super) fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 8,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": { "type": "string", "minLength": 1, "maxLength": 316 },
                "status": { "type": "string", "enum": ["True", "False", "Unknown"] },
                "observedGeneration": { "type": "integer", "format": "int64", "minimum": 0 },
                "lastTransitionTime": { "type": "string", "format": "date-time" },
                "reason": { "type": "string", "minLength": 1, "maxLength": 1024, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$" },
                "message": { "type": "string", "maxLength": 32768 },
            },
        },
    })
}
