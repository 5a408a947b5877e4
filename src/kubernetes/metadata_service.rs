//! SnapshotMetadataService (KEP-3314, "Snapshot Metadata Service Custom Resource"): tells backup applications
//! where a driver's sidecar listens, whom to trust there and which audience a token must have.

use k8s_openapi::ByteString;
use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Label by which the object of a driver is found, whatever its name.
pub const DRIVER_LABEL: &str = "cbt.storage.k8s.io/driver";

// Each column of the table has a type.
#[allow(clippy::duplicated_attributes)]
/// Where and how a CSI driver's SnapshotMetadata service is reached. The object has the driver's name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema, CustomResource)]
#[kube(
    group = "cbt.storage.k8s.io",
    version = "v1beta1",
    kind = "SnapshotMetadataService",
    plural = "snapshotmetadataservices",
    shortname = "sms",
    annotation(
        "api-approved.kubernetes.io",
        "https://github.com/kubernetes-csi/external-snapshot-metadata/pull/2"
    ),
    printcolumn(name = "Address", type_ = "string", json_path = ".spec.address"),
    printcolumn(name = "Audience", type_ = "string", json_path = ".spec.audience"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotMetadataServiceSpec {
    /// The audience that a client's token must have, which it passes in the "security_token" field of each call.
    #[schemars(length(min = 1, max = 1024))]
    pub audience: String,
    /// Where the service listens: host:port, with no scheme.
    #[schemars(length(min = 3, max = 261), regex(pattern = r"^[^/\s]+:[0-9]{1,5}$"))]
    pub address: String,
    /// Certificates (PEM) of the authorities that the service's certificate may come from.
    #[serde(rename = "caCert")]
    #[schemars(schema_with = "certificates")]
    pub ca_cert: ByteString,
    /// Whether a base snapshot has to exist still when a delta is asked from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub require_base_snapshot_for_delta: Option<bool>,
}

/// Bytes in base64, which the API server decodes before it measures them.
fn certificates(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "format": "byte", "minLength": 1, "maxLength": 524_288 })
}
