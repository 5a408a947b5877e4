//! The address of an endpoint and the trusted certificates in a DriverDiscovery. The CRD has the
//! same rules; objects that are older than the rules are validated here.

use axum::http::Uri;
use axum::http::uri::Scheme;
use kube::ResourceExt;

use kubernetes::driver_discovery::{DEFAULT_PORT, DriverDiscovery, ServiceReference};
use kubernetes::name;

/// A valid endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Target {
    /// Name of the CSI driver.
    pub driver: String,
    /// https, with host and path.
    pub uri: Uri,
    /// Certificates (PEM).
    pub ca_bundle: Vec<u8>,
}

impl Target {
    /// # Errors
    /// Which field is wrong, and how.
    pub fn of(discovery: &DriverDiscovery) -> Result<Self, String> {
        let spec = &discovery.spec;
        let driver = discovery.name_any();
        if spec.driver_name != driver {
            return Err("spec.driverName: must be the name of the object".into());
        }
        let uri = match (&spec.client_config.url, &spec.client_config.service) {
            (Some(url), None) => outside(url)?,
            (None, Some(service)) => inside(service)?,
            _ => return Err("spec.clientConfig: exactly one of url and service must be set".into()),
        };
        Ok(Self { driver, uri, ca_bundle: spec.client_config.ca_bundle.0.clone() })
    }

    /// The host name that the certificate must have: without the brackets of an IPv6 address.
    pub fn host(&self) -> &str {
        let host = self.uri.host().unwrap_or_default();
        host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
    }

    pub fn port(&self) -> u16 {
        self.uri.port_u16().unwrap_or(DEFAULT_PORT)
    }
}

fn outside(url: &str) -> Result<Uri, String> {
    let wrong = || {
        "spec.clientConfig.url: must be https://host:port/path with no user, query or fragment"
            .to_owned()
    };
    let uri: Uri = url.parse().map_err(|_| wrong())?;
    let good = uri.scheme() == Some(&Scheme::HTTPS)
        && uri.host().is_some_and(|host| !host.is_empty())
        && uri.query().is_none()
        && !url.contains(['#', '@']);
    if good { Ok(uri) } else { Err(wrong()) }
}

fn inside(service: &ServiceReference) -> Result<Uri, String> {
    let ServiceReference { namespace, name, path, port } = service;
    for (field, text) in [("namespace", namespace), ("name", name)] {
        if !name::is_namespace(text) {
            return Err(format!("spec.clientConfig.service.{field}: is not a valid name"));
        }
    }
    let port = match port {
        None => DEFAULT_PORT,
        Some(port) => u16::try_from(*port)
            .ok()
            .filter(|port| *port != 0)
            .ok_or("spec.clientConfig.service.port: must be from 1 to 65535")?,
    };
    let path = path.as_deref().unwrap_or("/");
    if !path.starts_with('/') || path.contains(['?', '#']) {
        return Err("spec.clientConfig.service.path: must be a path, with no query".into());
    }
    let uri = format!("https://{name}.{namespace}.svc:{port}{path}");
    uri.parse().map_err(|_| "spec.clientConfig.service.path: must be a path".into())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;

    use super::*;
    use kubernetes::driver_discovery::{ClientConfig, DriverDiscoverySpec};

    fn target(url: Option<&str>, service: Option<ServiceReference>) -> Result<Target, String> {
        let client_config =
            ClientConfig { url: url.map(Into::into), service, ca_bundle: ByteString(b"x".into()) };
        let spec = DriverDiscoverySpec { driver_name: "d".into(), client_config };
        Target::of(&DriverDiscovery::new("d", spec))
    }

    fn service(path: Option<&str>, port: Option<i32>) -> ServiceReference {
        ServiceReference {
            namespace: "csi".into(),
            name: "cbt".into(),
            path: path.map(Into::into),
            port,
        }
    }

    #[test]
    fn a_service_is_addressed_by_its_cluster_name() {
        for (path, port, uri) in [
            (
                Some("/v1alpha1/snapshot-deltas"),
                Some(8443),
                "https://cbt.csi.svc:8443/v1alpha1/snapshot-deltas",
            ),
            (None, None, "https://cbt.csi.svc:443/"),
        ] {
            let target = target(None, Some(service(path, port))).unwrap();
            assert_eq!((target.uri.to_string().as_str(), target.host()), (uri, "cbt.csi.svc"));
        }
        for port in [0, -1, 65_536] {
            assert!(target(None, Some(service(None, Some(port)))).unwrap_err().contains("port"));
        }
        for path in ["x", "/a?b", "/a#b", "/a b", "@evil"] {
            assert!(target(None, Some(service(Some(path), None))).unwrap_err().contains("path"));
        }
        for name in ["", "a.b", "evil/", "a@b", "A"] {
            let other = ServiceReference { name: name.into(), ..service(None, None) };
            assert!(target(None, Some(other)).unwrap_err().contains("service.name"), "{name}");
        }
    }

    #[test]
    fn an_https_url_is_used_unchanged() {
        let given = target(Some("https://[fd00::1]:9/x"), None).unwrap();
        assert_eq!((given.host(), given.port(), given.uri.path()), ("fd00::1", 9, "/x"));
        assert_eq!(target(Some("https://h"), None).unwrap().port(), 443);
        for bad in
            ["", "h", "http://h", "https://", "https://u@h", "https://h?q", "https://h#f", "/x"]
        {
            assert!(target(Some(bad), None).unwrap_err().contains("clientConfig.url"), "{bad}");
        }
    }

    #[test]
    fn neither_url_nor_service_or_another_driver_is_refused() {
        let error = target(None, None).unwrap_err();
        assert!(error.contains("exactly one"), "{error}");
        assert_eq!(target(Some("https://h"), Some(service(None, None))).unwrap_err(), error);
        let mut other = DriverDiscovery::new("e", DriverDiscoverySpec::default());
        other.spec.driver_name = "d".into();
        assert!(Target::of(&other).unwrap_err().contains("driverName"));
    }
}
