//! DriverDiscovery (KEP-3314, VolumeSnapshotDelta, "DriverDiscovery Resource"): tells the aggregated API server where the
//! `cbt-http` endpoint of a CSI driver is and whom to trust there. A driver's sidecar publishes it, or somebody by hand; the
//! controller of the aggregated API server writes its status.

use k8s_openapi::ByteString;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::metadata_service::certificates;
use super::session::conditions;

/// Port of a Service where none is said.
pub const DEFAULT_PORT: u16 = 443;

// Each column of the table has a type.
#[allow(clippy::duplicated_attributes)]
/// Of which driver, and where.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[kube(
    group = "cbt.storage.k8s.io",
    version = "v1alpha2",
    kind = "DriverDiscovery",
    plural = "driverdiscoveries",
    shortname = "dd",
    status = "DriverDiscoveryStatus",
    doc = "Where the aggregated API server finds the changed blocks of a CSI driver's snapshots. The object has the driver's name.",
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
    /// Where requests for the driver's changed blocks are sent.
    pub client_config: ClientConfig,
}

/// Where an endpoint is: exactly one of `url` and `service`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.url) != has(self.service)").message("exactly one of url and service must be set")
)]
pub struct ClientConfig {
    /// Address outside the cluster, as in https://host:port/path. What is in the cluster goes by `service`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "url")]
    pub url: Option<String>,
    /// A Service in the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<ServiceReference>,
    /// Certificates (PEM) of the authorities that the endpoint's certificate may come from.
    #[schemars(schema_with = "certificates")]
    pub ca_bundle: ByteString,
}

/// A Service that fronts the driver.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
pub struct ServiceReference {
    #[schemars(schema_with = "label")]
    pub namespace: String,
    #[schemars(schema_with = "label")]
    pub name: String,
    /// Path of the endpoint; / where it is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "path")]
    pub path: Option<String>,
    /// 443 where it is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_535))]
    pub port: Option<i32>,
}

/// What the controller saw of the endpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct DriverDiscoveryStatus {
    /// Types EndpointReachable, CapabilityPresent, CertificateValid.
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
