//! DriverDiscovery (KEP-3314, VolumeSnapshotDelta, "DriverDiscovery Resource"): where the
//! aggregated API server finds a CSI driver's `cbt-http` endpoint, and which certificates it trusts
//! there. The driver's sidecar or an administrator publishes it; the aggregated API server's
//! controller writes the status.

use k8s_openapi::ByteString;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::metadata_service::certificates;
use super::session::conditions;

/// Default port of a Service.
pub const DEFAULT_PORT: u16 = 443;

// printcolumn repeats the attribute `type_`.
#[allow(clippy::duplicated_attributes)]
/// The driver and its endpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[kube(
    group = "cbt.storage.k8s.io",
    version = "v1alpha2",
    kind = "DriverDiscovery",
    plural = "driverdiscoveries",
    shortname = "dd",
    status = "DriverDiscoveryStatus",
    doc = "Endpoint from which the aggregated API server reads the changed blocks of a CSI driver's snapshots. The name must be the driver's name.",
    annotation("api-approved.kubernetes.io", "unapproved, KEP-3314's VolumeSnapshotDelta design was replaced"),
    validation = Rule::new("self.metadata.name == self.spec.driverName").message("metadata.name: must be spec.driverName"),
    printcolumn(
        name = "Reachable",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="EndpointReachable")].status"#
    ),
    printcolumn(
        name = "Capable",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="CapabilityPresent")].status"#
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct DriverDiscoverySpec {
    /// Name of the CSI driver.
    #[schemars(length(min = 1, max = 253))]
    pub driver_name: String,
    /// Endpoint for requests for the driver's changed blocks.
    pub client_config: ClientConfig,
}

/// Location of an endpoint: exactly one of `url` and `service`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.url) != has(self.service)").message("exactly one of url and service must be set")
)]
pub struct ClientConfig {
    /// URL of an endpoint outside the cluster, in the form https://host:port/path. Use `service`
    /// for one in the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "url")]
    pub url: Option<String>,
    /// A Service in the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceReference>,
    /// CA certificates (PEM) that sign the endpoint's certificate.
    #[schemars(schema_with = "certificates")]
    pub ca_bundle: ByteString,
}

/// A Service in front of the driver.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
pub struct ServiceReference {
    #[schemars(schema_with = "label")]
    pub namespace: String,
    #[schemars(schema_with = "label")]
    pub name: String,
    /// Path of the endpoint. Defaults to /.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "path")]
    pub path: Option<String>,
    /// Port of the Service. Defaults to 443.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_535))]
    pub port: Option<i32>,
}

/// State of the endpoint as observed by the controller.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct DriverDiscoveryStatus {
    /// Conditions of types EndpointReachable, CapabilityPresent and CertificateValid.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions")]
    pub conditions: Vec<Condition>,
}

fn url(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "maxLength": 1024,
        "x-kubernetes-validations": [{
            "rule": "self.startsWith('https://') && isURL(self) && url(self).getHostname() != '' && url(self).getQuery().size() == 0 && !self.contains('#') && !self.contains('@')",
            "message": "must be https://host:port/path with no user, query or fragment",
        }],
    })
}

fn path(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "maxLength": 512,
        "pattern": "^/[A-Za-z0-9._~/-]*$",
    })
}

fn label(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "minLength": 1,
        "maxLength": 63,
        "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    })
}
