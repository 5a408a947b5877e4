//! `--manage-service`: the content of the objects by which backup applications and the session
//! manager find the sidecar. [`kubernetes::publish`] creates and updates the objects.

use std::path::PathBuf;

use anyhow::Context;
use k8s_openapi::ByteString;
use kube::Resource;
use kube::api::ObjectMeta;
use serde_json::{Value, json};
use tokio::sync::watch;

use kubernetes::driver_discovery::{ClientConfig, DriverDiscovery, ServiceReference};
use kubernetes::metadata_service::{Address, DRIVER_LABEL, SnapshotMetadataService};
use kubernetes::publish::Publication;
use kubernetes::session::SnapshotServiceConfiguration;
use kubernetes::tls;
use kubernetes::{cbt_http, name};
use telemetry::klog;
use telemetry::shutdown::Shutdown;

/// Field manager of server-side apply.
const MANAGER: &str = "csi-loopback-sidecar";
/// Field of a SnapshotMetadataService's spec that some versions of the CRD lack.
const OPTIONAL_FIELD: &str = "requireBaseSnapshotForDelta";

/// The flags. A command that flattens them must also flatten [`tls::authority`]'s.
#[derive(Debug, Clone, clap::Args)]
// The default name, `Args`, would collide with the group of the struct that flattens this one.
#[group(skip)]
pub struct Args {
    /// Create and update the driver's SnapshotMetadataService; with --session-api also its
    /// SnapshotServiceConfiguration, with --cbt-http-service-address also its DriverDiscovery
    #[arg(long, requires = "service_address")]
    pub manage_service: bool,

    /// Address of the sidecar for clients, as host:port of a Service; the certificate of
    /// --self-signed is valid for it
    #[arg(long, value_name = "ADDRESS")]
    pub service_address: Option<Address>,

    /// PEM file of the CA certificates to publish, reloaded on change; otherwise ca.crt next to
    /// --tls-cert is used
    #[arg(long, requires = "manage_service", conflicts_with = "self_signed", value_name = "FILE")]
    pub service_ca: Option<PathBuf>,

    /// Publish requireBaseSnapshotForDelta in the SnapshotMetadataService; otherwise the field is
    /// not changed
    #[arg(long, requires = "manage_service", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        value_parser = klog::boolean, value_name = "BOOL")]
    pub require_base_snapshot_for_delta: Option<bool>,
}

/// Content of the SnapshotMetadataService.
#[derive(Debug, Clone)]
pub struct Service {
    /// Name of the CSI driver, and of the object.
    pub driver: String,
    pub address: Address,
    pub audience: String,
    /// requireBaseSnapshotForDelta, if it is published. The sidecar cannot know what every driver
    /// supports; unset is the safe value.
    pub requires_base: Option<bool>,
}

/// Content of the SnapshotServiceConfiguration.
#[derive(Debug, Clone)]
pub struct Configuration {
    /// Name of the CSI driver, and of the object.
    pub driver: String,
    pub address: Address,
    /// Namespace of the driver and the sidecar.
    pub namespace: String,
}

/// Content of the DriverDiscovery, without the status, which the aggregated API server writes.
#[derive(Debug, Clone)]
pub struct Discovery {
    /// Name of the CSI driver, and of the object.
    pub driver: String,
    /// Address of cbt-http for the aggregated API server.
    pub address: Address,
}

impl Discovery {
    /// Names the Service if the host is a Service's name: then the API server does not need cluster
    /// DNS.
    fn client_config(&self, pem: &str) -> ClientConfig {
        let ca_bundle = ByteString(pem.as_bytes().to_vec());
        let mut labels = self.address.host().split('.');
        let place = (labels.next(), labels.next(), labels.next());
        match place {
            (Some(name), Some(namespace), Some("svc"))
                if name::is_namespace(name) && name::is_namespace(namespace) =>
            {
                let service = ServiceReference {
                    namespace: namespace.to_owned(),
                    name: name.to_owned(),
                    path: Some(cbt_http::PATH.to_owned()),
                    port: Some(self.address.port().into()),
                };
                ClientConfig { url: None, service: Some(service), ca_bundle }
            }
            _ => {
                let url = format!("https://{}{}", self.address, cbt_http::PATH);
                ClientConfig { url: Some(url), service: None, ca_bundle }
            }
        }
    }
}

/// Reads the certificates of --service-ca, or of ca.crt next to --tls-cert, and reloads them on
/// change. For certificates from files: a self-signed authority publishes its own bundle.
///
/// # Errors
/// The file cannot be read or has other content.
pub fn authorities(
    args: &Args,
    tls: &tls::Args,
    shutdown: Shutdown,
) -> anyhow::Result<watch::Receiver<String>> {
    let sibling = tls.tls_cert.as_deref().map(|cert| cert.with_file_name("ca.crt"));
    let file =
        args.service_ca.clone().or(sibling).context("--manage-service requires --service-ca")?;
    tls::watch_authorities("--service-ca", &file, |pem| Ok(pem.to_owned()), shutdown)
}

impl Publication for Service {
    type Object = SnapshotMetadataService;

    const OPTIONAL_FIELD: Option<&'static str> = Some(OPTIONAL_FIELD);

    fn manager(&self) -> &'static str {
        MANAGER
    }

    fn name(&self) -> &str {
        &self.driver
    }

    fn desired(&self, _: Option<&SnapshotMetadataService>, pem: &str) -> anyhow::Result<Value> {
        let mut object = json!({
            "apiVersion": SnapshotMetadataService::api_version(&()),
            "kind": SnapshotMetadataService::kind(&()),
            "metadata": { "name": self.driver, "labels": { DRIVER_LABEL: self.driver } },
            "spec": {
                "address": self.address.to_string(),
                "audience": self.audience,
                "caCert": k8s_openapi::ByteString(pem.as_bytes().to_vec()),
            },
        });
        // A field that is not written keeps the value of its manager.
        if let Some(required) = self.requires_base {
            object["spec"][OPTIONAL_FIELD] = required.into();
        }
        Ok(object)
    }

    fn is_current(&self, found: &SnapshotMetadataService, pem: &str) -> bool {
        let spec = &found.spec;
        is_labelled(&found.metadata, &self.driver)
            && spec.address == self.address.to_string()
            && spec.audience == self.audience
            && spec.ca_cert.0 == pem.as_bytes()
            && self
                .requires_base
                .is_none_or(|required| spec.require_base_snapshot_for_delta == Some(required))
    }
}

impl Publication for Configuration {
    type Object = SnapshotServiceConfiguration;

    fn manager(&self) -> &'static str {
        MANAGER
    }

    fn name(&self) -> &str {
        &self.driver
    }

    fn desired(
        &self,
        _: Option<&SnapshotServiceConfiguration>,
        pem: &str,
    ) -> anyhow::Result<Value> {
        Ok(json!({
            "apiVersion": SnapshotServiceConfiguration::api_version(&()),
            "kind": SnapshotServiceConfiguration::kind(&()),
            "metadata": { "name": self.driver, "labels": { DRIVER_LABEL: self.driver } },
            "spec": {
                "address": self.address.to_string(),
                "caCert": k8s_openapi::ByteString(pem.as_bytes().to_vec()),
                "driverNamespace": self.namespace,
            },
        }))
    }

    fn is_current(&self, found: &SnapshotServiceConfiguration, pem: &str) -> bool {
        let spec = &found.spec;
        is_labelled(&found.metadata, &self.driver)
            && spec.address == self.address.to_string()
            && spec.ca_cert.0 == pem.as_bytes()
            && spec.driver_namespace == self.namespace
    }
}

impl Publication for Discovery {
    type Object = DriverDiscovery;

    fn manager(&self) -> &'static str {
        MANAGER
    }

    fn name(&self) -> &str {
        &self.driver
    }

    fn desired(&self, _: Option<&DriverDiscovery>, pem: &str) -> anyhow::Result<Value> {
        Ok(json!({
            "apiVersion": DriverDiscovery::api_version(&()),
            "kind": DriverDiscovery::kind(&()),
            "metadata": { "name": self.driver, "labels": { DRIVER_LABEL: self.driver } },
            "spec": { "driverName": self.driver, "clientConfig": self.client_config(pem) },
        }))
    }

    /// clientConfig has either an address or a Service; another manager may have set the other one.
    fn conflicts(&self, found: &DriverDiscovery) -> Option<Value> {
        let found = &found.spec.client_config;
        let ClientConfig { url, service, .. } = self.client_config("");
        let is_other = (found.url.is_some() && url.is_none())
            || (found.service.is_some() && service.is_none());
        is_other.then(|| json!({ "spec": { "clientConfig": { "url": url, "service": service } } }))
    }

    fn is_current(&self, found: &DriverDiscovery, pem: &str) -> bool {
        is_labelled(&found.metadata, &self.driver)
            && found.spec.driver_name == self.driver
            && found.spec.client_config == self.client_config(pem)
    }
}

fn is_labelled(metadata: &ObjectMeta, driver: &str) -> bool {
    let label = metadata.labels.as_ref().and_then(|labels| labels.get(DRIVER_LABEL));
    label.is_some_and(|label| label == driver)
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command, FromArgMatches};

    use super::*;
    use kubernetes::tls::authority;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        let command = tls::Args::augment_args(Command::new("x"));
        let command = Args::augment_args(authority::Args::augment_args(command));
        command.clone().debug_assert();
        Args::from_arg_matches(&command.try_get_matches_from(line.split_whitespace())?)
    }

    #[test]
    fn contradicting_flags_are_command_line_errors() {
        for good in [
            "x --manage-service --service-address a:1 --tls-cert c --tls-key k --service-ca f",
            "x --manage-service --service-address a:1 --self-signed --self-signed-validity 1h",
            "x --self-signed --service-address a:1",
            "x --namespace n",
        ] {
            parse(good).unwrap();
        }
        for (bad, named) in [
            ("x --manage-service", "--service-address"),
            ("x --self-signed", "--service-address"),
            ("x --self-signed --service-address a:1 --tls-cert c --tls-key k", "--tls-cert"),
            ("x --service-ca f", "--manage-service"),
            (
                "x --self-signed --manage-service --service-address a:1 --service-ca f",
                "--service-ca",
            ),
            ("x --self-signed-validity 1h", "--self-signed"),
            ("x --self-signed-secret s", "--self-signed"),
            ("x --self-signed --service-address a:1 --self-signed-validity 1s", "3650days"),
            ("x --self-signed --service-address a:1 --self-signed-validity 11years", "3650days"),
            ("x --self-signed --service-address a:1 --self-signed-secret A_b", "a-z"),
            ("x --service-address https://a:1", "host:port"),
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains(named), "{bad}: {error}");
        }
    }

    fn service(requires_base: Option<bool>) -> Service {
        let (driver, audience) = ("d".to_owned(), "u".to_owned());
        Service { driver, address: "a:1".parse().unwrap(), audience, requires_base }
    }

    #[test]
    fn require_base_is_published_only_if_the_flag_is_set() {
        let line = "x --manage-service --service-address a:1";
        assert_eq!(parse(line).unwrap().require_base_snapshot_for_delta, None);
        let given = format!("{line} --require-base-snapshot-for-delta=false");
        assert_eq!(parse(&given).unwrap().require_base_snapshot_for_delta, Some(false));
        for published in [None, Some(false), Some(true)] {
            let service = service(published);
            let object = service.desired(None, "pem").unwrap();
            assert_eq!(object["spec"].get(OPTIONAL_FIELD), published.map(Value::from).as_ref());
            let object: SnapshotMetadataService = serde_json::from_value(object).unwrap();
            for found in [None, Some(false), Some(true)] {
                let mut object = object.clone();
                object.spec.require_base_snapshot_for_delta = found;
                let is_unchanged = published.is_none() || found == published;
                assert_eq!(service.is_current(&object, "pem"), is_unchanged, "{found:?}");
            }
        }
    }

    #[test]
    fn a_discovery_names_the_service_or_else_the_address() {
        let config = |address: &str| {
            Discovery { driver: "d".into(), address: address.parse().unwrap() }.client_config("pem")
        };
        for host in ["cbt.drivers.svc", "cbt.drivers.svc.cluster.local"] {
            let service = config(&format!("{host}:8443")).service.unwrap();
            assert_eq!((service.name.as_str(), service.namespace.as_str()), ("cbt", "drivers"));
            assert_eq!((service.port, service.path.as_deref()), (Some(8443), Some(cbt_http::PATH)));
        }
        for host in
            ["cbt.example.org", "localhost", "10.0.0.1", "[fd00::1]", "cbt.drivers", "A.b.svc"]
        {
            let url = format!("https://{host}:8443{}", cbt_http::PATH);
            let other = config(&format!("{host}:8443"));
            assert_eq!((other.url, other.service), (Some(url), None));
        }
    }
}
