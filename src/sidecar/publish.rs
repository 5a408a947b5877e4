//! `--manage-service`: the objects by which backup applications and the session manager find the sidecar: what they say. How they
//! are kept so is [`crate::kubernetes::publish`]'s business.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::ByteString;
use kube::Resource;
use kube::api::ObjectMeta;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::kubernetes::driver_discovery::{ClientConfig, DriverDiscovery, ServiceReference};
use crate::kubernetes::metadata_service::{Address, DRIVER_LABEL, SnapshotMetadataService};
use crate::kubernetes::publish::Publication;
use crate::kubernetes::session::SnapshotServiceConfiguration;
use crate::kubernetes::tls;
use crate::kubernetes::{cbt_http, name};
use crate::quantity;
use crate::telemetry::klog;
use crate::telemetry::shutdown::Shutdown;

/// As whom the fields are written (server-side apply).
const MANAGER: &str = "csi-loopback-sidecar";
/// Field of a SnapshotMetadataService's spec that not every CRD has.
const OPTIONAL_FIELD: &str = "requireBaseSnapshotForDelta";

/// The flags. The command that flattens them has those of [`tls::authority`], too.
#[derive(Debug, Clone, clap::Args)]
// Its group would have the name `Args`, as that of the role that flattens it.
#[group(skip)]
pub struct Args {
    /// Make the driver's SnapshotMetadataService and keep it so: address, audience, caCert. Without --audience
    /// the audience is then the driver's name. With --session-api its SnapshotServiceConfiguration, too, and with
    /// --cbt-http-service-address its DriverDiscovery.
    #[arg(long, requires = "service_address")]
    pub manage_service: bool,

    /// Where clients reach this sidecar, as host:port: the name of a Service. The certificate of --self-signed
    /// is for this host.
    #[arg(long, value_name = "ADDRESS")]
    pub service_address: Option<Address>,

    /// File with the certificates (PEM) of the authorities that clients are to trust; by default ca.crt beside
    /// --tls-cert. It may change at any time.
    #[arg(long, requires = "manage_service", conflicts_with = "self_signed", value_name = "FILE")]
    pub service_ca: Option<PathBuf>,

    /// Publish in the SnapshotMetadataService whether the base of a delta has to exist still; by default the field is left as
    /// others set it.
    #[arg(long, requires = "manage_service", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        value_parser = klog::boolean, value_name = "BOOL")]
    pub require_base_snapshot_for_delta: Option<bool>,

    /// Publish the bases of deltas and when they expire in annotations of VolumeSnapshotContents, and heed the annotation that says
    /// how long a snapshot is to stay one. Only for csi-loopback's driver.
    #[arg(long)]
    pub publish_bases: bool,

    /// How often the bases of the driver are polled.
    #[arg(long, default_value = "1min", value_parser = bases_interval, value_name = "TIME")]
    pub publish_bases_interval: Duration,
}

fn bases_interval(text: &str) -> Result<Duration, String> {
    let range = Duration::from_secs(1)..=Duration::from_secs(86_400);
    quantity::duration(text, range, "within 1s and 1day")
}

/// What the SnapshotMetadataService says.
#[derive(Debug, Clone)]
pub struct Service {
    /// Name of the CSI driver, and of the object.
    pub driver: String,
    pub address: Address,
    pub audience: String,
    /// requireBaseSnapshotForDelta, where it is published. What a driver can do is not for every sidecar to know, and unset is the
    /// safe value.
    pub requires_base: Option<bool>,
}

/// What the SnapshotServiceConfiguration says.
#[derive(Debug, Clone)]
pub struct Configuration {
    /// Name of the CSI driver, and of the object.
    pub driver: String,
    pub address: Address,
    /// The driver's namespace, which is the sidecar's.
    pub namespace: String,
}

/// What the DriverDiscovery says. Its status is another's.
#[derive(Debug, Clone)]
pub struct Discovery {
    /// Name of the CSI driver, and of the object.
    pub driver: String,
    /// Where the aggregated API server reaches cbt-http.
    pub address: Address,
}

impl Discovery {
    /// By the Service, where the host is the name of one: a server in the cluster need not know the cluster's DNS then.
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

/// The authorities of --service-ca, or of ca.crt beside --tls-cert, read again when they change. For
/// certificates from files; an authority of its own has bundles of its own.
///
/// # Errors
/// The file cannot be read or holds something else; which.
pub fn authorities(
    args: &Args,
    tls: &tls::Args,
    shutdown: Shutdown,
) -> anyhow::Result<watch::Receiver<String>> {
    let beside = tls.tls_cert.as_deref().map(|cert| cert.with_file_name("ca.crt"));
    let file = args.service_ca.clone().or(beside).context("--manage-service needs --service-ca")?;
    tls::authorities_of("--service-ca", &file, shutdown)
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

    fn wanted(&self, _: Option<&SnapshotMetadataService>, pem: &str) -> anyhow::Result<Value> {
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
        // What is not written stays as another manager set it.
        if let Some(required) = self.requires_base {
            object["spec"][OPTIONAL_FIELD] = required.into();
        }
        Ok(object)
    }

    fn is_as_it_should_be(&self, found: &SnapshotMetadataService, pem: &str) -> bool {
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

    fn wanted(&self, _: Option<&SnapshotServiceConfiguration>, pem: &str) -> anyhow::Result<Value> {
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

    fn is_as_it_should_be(&self, found: &SnapshotServiceConfiguration, pem: &str) -> bool {
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

    fn wanted(&self, _: Option<&DriverDiscovery>, pem: &str) -> anyhow::Result<Value> {
        Ok(json!({
            "apiVersion": DriverDiscovery::api_version(&()),
            "kind": DriverDiscovery::kind(&()),
            "metadata": { "name": self.driver, "labels": { DRIVER_LABEL: self.driver } },
            "spec": { "driverName": self.driver, "clientConfig": self.client_config(pem) },
        }))
    }

    /// Of address and Service there may be one, and another manager may have set the one that is not meant.
    fn in_the_way(&self, found: &DriverDiscovery) -> Option<Value> {
        let found = &found.spec.client_config;
        let ClientConfig { url, service, .. } = self.client_config("");
        let is_other = (found.url.is_some() && url.is_none())
            || (found.service.is_some() && service.is_none());
        is_other.then(|| json!({ "spec": { "clientConfig": { "url": url, "service": service } } }))
    }

    fn is_as_it_should_be(&self, found: &DriverDiscovery, pem: &str) -> bool {
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
    use crate::kubernetes::metadata_service::SnapshotMetadataServiceSpec;
    use crate::kubernetes::tls::authority;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        let command = tls::Args::augment_args(Command::new("x"));
        let command = Args::augment_args(authority::Args::augment_args(command));
        command.clone().debug_assert();
        Args::from_arg_matches(&command.try_get_matches_from(line.split_whitespace())?)
    }

    #[test]
    fn flags_that_contradict_each_other_are_errors_of_the_command_line() {
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
            ("x --publish-bases-interval 999ms", "1s and 1day"),
            ("x --publish-bases-interval 2days", "1s and 1day"),
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
    fn whether_a_base_has_to_exist_is_published_only_if_a_flag_says_so() {
        let line = "x --manage-service --service-address a:1";
        assert_eq!(parse(line).unwrap().require_base_snapshot_for_delta, None);
        let given = format!("{line} --require-base-snapshot-for-delta=false");
        assert_eq!(parse(&given).unwrap().require_base_snapshot_for_delta, Some(false));
        for published in [None, Some(false), Some(true)] {
            let service = service(published);
            let object = service.wanted(None, "pem").unwrap();
            assert_eq!(object["spec"].get(OPTIONAL_FIELD), published.map(Value::from).as_ref());
            let object: SnapshotMetadataService = serde_json::from_value(object).unwrap();
            for found in [None, Some(false), Some(true)] {
                let mut object = object.clone();
                object.spec.require_base_snapshot_for_delta = found;
                let is_left_alone = published.is_none() || found == published;
                assert_eq!(service.is_as_it_should_be(&object, "pem"), is_left_alone, "{found:?}");
            }
        }
    }

    #[test]
    fn any_difference_of_a_service_is_drift() {
        let service = service(None);
        let object: SnapshotMetadataService =
            serde_json::from_value(service.wanted(None, "pem").unwrap()).unwrap();
        let spec = object.spec.clone();
        let with = |spec: SnapshotMetadataServiceSpec| SnapshotMetadataService {
            spec,
            metadata: object.metadata.clone(),
        };
        let good = |object: &SnapshotMetadataService| service.is_as_it_should_be(object, "pem");
        assert!(good(&object));
        let address = SnapshotMetadataServiceSpec { address: "b:1".into(), ..spec.clone() };
        let audience = SnapshotMetadataServiceSpec { audience: "v".into(), ..spec.clone() };
        for other in [address, audience] {
            assert!(!good(&with(other.clone())), "{other:?}");
        }
        assert!(!service.is_as_it_should_be(&object, "other"));
        assert!(!good(&SnapshotMetadataService { metadata: ObjectMeta::default(), spec }));
    }

    #[test]
    fn a_discovery_names_the_service_whose_name_the_host_is_and_else_the_address() {
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

    #[test]
    fn any_difference_of_a_discovery_is_drift() {
        let wanted = Discovery { driver: "d".into(), address: "a:1".parse().unwrap() };
        let made = |wanted: &Discovery| -> DriverDiscovery {
            serde_json::from_value(wanted.wanted(None, "pem").unwrap()).unwrap()
        };
        let object = made(&wanted);
        assert!(wanted.is_as_it_should_be(&object, "pem"));
        assert!(!wanted.is_as_it_should_be(&object, "other"));
        for address in ["a:2", "a.b.svc:1"] {
            let other = Discovery { address: address.parse().unwrap(), ..wanted.clone() };
            assert!(!wanted.is_as_it_should_be(&made(&other), "pem"));
        }
        assert_eq!(wanted.in_the_way(&object), None);
        let mut other = object.clone();
        other.spec.client_config.url = None;
        other.spec.client_config.service = Some(ServiceReference::default());
        assert!(!wanted.is_as_it_should_be(&other, "pem"));
        assert!(wanted.in_the_way(&other).unwrap()["spec"]["clientConfig"]["service"].is_null());
        let mut unlabelled = object;
        unlabelled.metadata.labels = None;
        assert!(!wanted.is_as_it_should_be(&unlabelled, "pem"));
    }

    #[test]
    fn any_difference_of_a_configuration_is_drift() {
        let wanted = Configuration {
            driver: "d".into(),
            address: "a:1".parse().unwrap(),
            namespace: "n".into(),
        };
        let made = |wanted: &Configuration| -> SnapshotServiceConfiguration {
            serde_json::from_value(wanted.wanted(None, "pem").unwrap()).unwrap()
        };
        let object = made(&wanted);
        assert!(wanted.is_as_it_should_be(&object, "pem"));
        assert!(!wanted.is_as_it_should_be(&object, "other"));
        let address = Configuration { address: "b:1".parse().unwrap(), ..wanted.clone() };
        let namespace = Configuration { namespace: "m".into(), ..wanted.clone() };
        for other in [address, namespace] {
            assert!(!wanted.is_as_it_should_be(&made(&other), "pem"), "{other:?}");
        }
        let mut unlabelled = object;
        unlabelled.metadata.labels = None;
        assert!(!wanted.is_as_it_should_be(&unlabelled, "pem"));
    }
}
