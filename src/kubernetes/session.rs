//! The objects of a snapshot session (KEP-3314, session design, "Custom Resources"). The proposal names them and leaves
//! their fields open; these are this project's.
//!
//! A backup application makes a [`SnapshotSessionRequest`] beside its VolumeSnapshots. The session manager finds the
//! [`SnapshotServiceConfiguration`] of their driver, writes a [`SnapshotSessionData`] into the driver's namespace, and tells
//! the application its name, which is the session's token.

use k8s_openapi::ByteString;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::metadata_service::{address, certificates};

/// VolumeSnapshots that one session can have, at most.
pub const MAX_SNAPSHOTS: usize = 64;
/// Label of a [`SnapshotSessionData`]: the uid of the request that it was made for.
pub const REQUEST_LABEL: &str = "cbt.storage.k8s.io/session-request-uid";
/// Keeps a request until its data, which is in another namespace, is gone.
pub const FINALIZER: &str = "cbt.storage.k8s.io/session-data";

// Each column of the table has a type.
#[allow(clippy::duplicated_attributes)]
/// What a session is asked for. It cannot be changed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[kube(
    group = "cbt.storage.k8s.io",
    version = "v1alpha2",
    kind = "SnapshotSessionRequest",
    plural = "snapshotsessionrequests",
    shortname = "ssr",
    namespaced,
    status = "SnapshotSessionRequestStatus",
    doc = "Asks for a snapshot session: direct access to the block metadata of VolumeSnapshots of this namespace. \
           Deleting it ends the session.",
    annotation(
        "api-approved.kubernetes.io",
        "unapproved, KEP-3314's session design leaves its objects open"
    ),
    // Its own rules are not asked where it is gone.
    validation = Rule::new("!has(oldSelf.status) || has(self.status)").message("status: cannot be taken away"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Driver", type_ = "string", json_path = ".status.driver"),
    printcolumn(name = "Expires", type_ = "string", json_path = ".status.expirationTime"),
    printcolumn(name = "Error", type_ = "string", json_path = ".status.error", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self == oldSelf").message("cannot be changed; make another SnapshotSessionRequest"))]
pub struct SnapshotSessionRequestSpec {
    /// Names of VolumeSnapshots in this namespace, 1 to 64, all of one CSI driver.
    #[schemars(schema_with = "snapshot_names")]
    pub snapshots: Vec<String>,
    /// How long the session is wanted, in seconds. The session manager has a default and a maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 315_360_000))]
    pub lifetime_seconds: Option<i64>,
}

/// How far a session has come. Written by the session manager alone.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(oldSelf.state) || oldSelf.state == 'Pending' || (has(self.state) && self.state == oldSelf.state)")
        .message("Ready and Failed are final"),
    // Else a second one could be made while the first is in use already. A session that fails loses it.
    validation = Rule::new("!has(oldSelf.sessionToken) || (has(self.sessionToken) ? self.sessionToken == oldSelf.sessionToken : has(self.state) && self.state == 'Failed')")
        .message("the token of a session cannot be changed"),
    validation = Rule::new("!has(self.state) || self.state != 'Ready' || (has(self.address) && has(self.caCert) && has(self.sessionToken) && has(self.driver) && has(self.expirationTime))")
        .message("Ready needs address, caCert, sessionToken, driver and expirationTime"),
    validation = Rule::new("!has(self.state) || self.state != 'Failed' || (has(self.error) && !has(self.sessionToken))")
        .message("Failed needs an error and has no sessionToken")
)]
pub struct SnapshotSessionRequestStatus {
    /// Pending until the session can be used (Ready) or never will be (Failed). Absent means Pending.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<SessionState>,
    /// What stands in the way, in more detail than the state. Type Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions")]
    pub conditions: Vec<Condition>,
    /// Where the driver's SnapshotMetadata service listens: host:port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 261))]
    pub address: Option<String>,
    /// Certificates (PEM) of the authorities that the service's certificate may come from.
    #[serde(default, rename = "caCert", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "certificates")]
    pub ca_cert: Option<ByteString>,
    /// Goes into the field session_token of each call, once the state is Ready. Whoever has it has the session.
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
    /// Why the session failed, and what to do about it.
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
    /// A status subresource drops what the creator sends, so that a new request has none.
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

// Each column of the table has a type.
#[allow(clippy::duplicated_attributes)]
/// What a session's client has to know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema, CustomResource)]
#[kube(
    group = "cbt.storage.k8s.io",
    version = "v1alpha2",
    kind = "SnapshotServiceConfiguration",
    plural = "snapshotserviceconfigurations",
    shortname = "ssc",
    doc = "Says that a CSI driver has the SnapshotMetadata service with session tokens, and where. The object has the \
           driver's name, also as the label cbt.storage.k8s.io/driver.",
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
    /// Where the service listens: host:port, with no scheme, as in name.namespace.svc:6443; an IPv6 address in
    /// brackets.
    #[schemars(schema_with = "address")]
    pub address: String,
    /// Certificates (PEM) of the authorities that the service's certificate may come from.
    #[serde(rename = "caCert")]
    #[schemars(schema_with = "certificates")]
    pub ca_cert: ByteString,
    /// The driver's namespace, in which the SnapshotSessionData objects of its sessions are.
    #[schemars(schema_with = "namespace")]
    pub driver_namespace: String,
}

// Each column of the table has a type.
#[allow(clippy::duplicated_attributes)]
/// What a session's token stands for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[kube(
    group = "cbt.storage.k8s.io",
    version = "v1alpha2",
    kind = "SnapshotSessionData",
    plural = "snapshotsessiondata",
    singular = "snapshotsessiondata",
    shortname = "ssd",
    namespaced,
    doc = "A snapshot session, for the driver's sidecar. Its name is the session's token: nobody but the session manager and \
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
    /// The request that this was made for.
    pub request: SessionRequestReference,
    /// What the session gives access to.
    #[schemars(length(min = 1, max = 64))]
    pub snapshots: Vec<SessionSnapshot>,
    /// From when on the token is refused.
    #[schemars(schema_with = "time")]
    pub expiration_time: Time,
}

/// A SnapshotSessionRequest.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct SessionRequestReference {
    #[schemars(schema_with = "namespace")]
    pub namespace: String,
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    #[schemars(length(min = 1, max = 253))]
    pub uid: String,
}

/// A VolumeSnapshot as it was when the session began: another one of the same name is not part of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SessionSnapshot {
    #[schemars(schema_with = "namespace")]
    pub namespace: String,
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    #[schemars(length(min = 1, max = 253))]
    pub uid: String,
    /// The snapshot's id in CSI.
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
