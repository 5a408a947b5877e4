//! SnapshotMetadataService (KEP-3314, "Snapshot Metadata Service Custom Resource"): the address of
//! a driver's sidecar for backup applications, the certificates to trust, and the audience of
//! tokens.

use std::fmt;
use std::str::FromStr;

use k8s_openapi::ByteString;
use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Label that holds the driver's name, to find the object of a driver whatever its name.
pub const DRIVER_LABEL: &str = "cbt.storage.k8s.io/driver";

// The definition belongs to external-snapshot-metadata: it has no rule that the released one lacks,
// so that the drivers of a cluster can share either. Readers check what they use.
//
// printcolumn repeats the attribute `type_`.
#[allow(clippy::duplicated_attributes)]
/// What a client needs to call the service.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema, CustomResource)]
#[kube(
    group = "cbt.storage.k8s.io",
    version = "v1beta1",
    kind = "SnapshotMetadataService",
    plural = "snapshotmetadataservices",
    shortname = "sms",
    doc = "Address, audience and CA certificates of a CSI driver's SnapshotMetadata service. The name should be the driver's name.",
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
    /// The audience that a client's token must have. The client passes the token in the field
    /// security_token of each call.
    pub audience: String,
    /// Address of the service as host:port without a scheme, such as name.namespace.svc:6443. An
    /// IPv6 address must be in brackets.
    pub address: String,
    /// CA certificates (PEM) that sign the service's certificate.
    #[serde(rename = "caCert")]
    #[schemars(schema_with = "bytes")]
    pub ca_cert: ByteString,
    /// Whether the base snapshot of a delta must still exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub require_base_snapshot_for_delta: Option<bool>,
}

/// A CEL rule instead of a `pattern`, because the error of a pattern shows only the pattern.
pub(super) fn address(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        // A name of 253 bytes, a colon, five digits; brackets.
        "minLength": 3,
        "maxLength": 261,
        "x-kubernetes-validations": [{
            "rule": format!("self.matches(r'{ADDRESS}')"),
            "message": "must be host:port with no scheme and a port from 1 to 65535, such as name.namespace.svc:6443",
        }],
    })
}

/// A host, or an IPv6 address in brackets, and a port (RE2).
const ADDRESS: &str = concat!(
    r"^([^\s/:\[\]]+|\[[0-9A-Fa-f:.]+\]):",
    r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])$"
);

fn bytes(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "format": "byte" })
}

/// At most 384 KiB of certificates; the limit applies to the base64 text.
pub(super) fn certificates(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "format": "byte", "minLength": 1, "maxLength": 524_288 })
}

/// Address of a service as in `spec.address`: a DNS name or an IP address, and a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    host: String,
    port: u16,
}

impl Address {
    /// The name that clients expect in the certificate: without the brackets of an IPv6 address.
    pub fn host(&self) -> &str {
        self.host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&self.host)
    }

    pub fn port(&self) -> u16 {
        self.port
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not host:port, such as csi-loopback.backup.svc:50051");
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(wrong)?;
        let address = Self { host: host.to_owned(), port };
        let bracketed = address.host() != host;
        let good = match address.host().parse::<std::net::IpAddr>() {
            Ok(ip) => ip.is_ipv6() == bracketed,
            Err(_) => !bracketed && is_dns_name(host),
        };
        if good { Ok(address) } else { Err(wrong()) }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// RFC 1123: labels of letters, digits and '-', which neither starts nor ends a label.
fn is_dns_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(plain)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for (text, host) in [
            ("csi-loopback.backup.svc:50051", "csi-loopback.backup.svc"),
            ("10.0.0.1:1", "10.0.0.1"),
            ("[fd00::1]:65535", "fd00::1"),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!((address.host(), address.to_string().as_str()), (host, text));
        }
        let long = format!("{}:1", "a".repeat(64));
        for bad in [
            "",
            "a",
            "a:",
            ":1",
            "a:0",
            "a:65536",
            "fd00::1:80",
            "[]:1",
            "[a]:1",
            "[10.0.0.1]:1",
            "https://a:1",
            "a/b:1",
            "a b:1",
            "-a:1",
            "a..b:1",
            &long,
        ] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
    }
}
