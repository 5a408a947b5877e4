//! The connection to a driver's sidecar: TLS that trusts only the certificates that an object of
//! the cluster names.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, anyhow};
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint, Uri};

use super::failure::{Failure, Retry};
use kubernetes::tls;

/// Time limit of connecting, the TLS handshake included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval of HTTP/2 pings. Servers in Go close connections that ping more often than every five
/// minutes by default.
const PING_INTERVAL: Duration = Duration::from_secs(310);
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum size of a message in bytes: more than the sidecar forwards.
pub const LONGEST_MESSAGE: usize = 33 << 20;

/// The address of a driver's sidecar.
#[derive(Debug)]
pub struct Place {
    /// The host:port to connect to.
    pub address: String,
    /// The host that the certificate must name.
    host: String,
    /// Trusted certificates (PEM).
    ca: Vec<u8>,
    /// The object that names them, for messages.
    object: String,
}

impl Place {
    /// The address in `object`; `instead` replaces it for the connection.
    pub fn new(
        object: &str,
        address: String,
        instead: Option<&str>,
        ca: Vec<u8>,
    ) -> Result<Self, Failure> {
        let host = host_of(&address).ok_or_else(|| {
            Failure::never(anyhow!("{object}: its address {address:?} is not host:port"))
        })?;
        let (host, object) = (host.to_owned(), object.to_owned());
        Ok(Self { host, address: instead.map_or(address, str::to_owned), ca, object })
    }
}

/// The host of host:port; an IPv6 address without its brackets.
fn host_of(address: &str) -> Option<&str> {
    let (host, port) = address.rsplit_once(':')?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host = bare.unwrap_or(host);
    (port.parse::<u16>().is_ok() && !host.is_empty()).then_some(host)
}

/// A channel over one connection. When it breaks, so does the listing: the next attempt reads the
/// object that names the address again, because it may have changed.
pub async fn connect(place: &Place) -> Result<Channel, Failure> {
    let address = &place.address;
    let unusable =
        |error: anyhow::Error| Failure::never(error.context(format!("address {address:?}")));
    let endpoint = Endpoint::from_shared(format!("https://{address}"))
        .map_err(|error| unusable(error.into()))?
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    let stream = match timeout(CONNECT_TIMEOUT, handshake(place)).await {
        Ok(stream) => stream?,
        Err(_) => {
            let seconds = CONNECT_TIMEOUT.as_secs();
            let error = anyhow!("cannot connect to {address} within {seconds} s");
            return Err(Failure::new(Retry::Always, error));
        }
    };
    let stream = Arc::new(Mutex::new(Some(TokioIo::new(stream))));
    let once = tower::service_fn(move |_: Uri| {
        let stream = stream.lock().unwrap_or_else(PoisonError::into_inner).take();
        async move { stream.ok_or_else(|| std::io::Error::other("the connection was used before")) }
    });
    endpoint.connect_with_connector(once).await.map_err(|error| {
        let error = anyhow::Error::from(error).context(format!("cannot connect to {address}"));
        Failure::new(Retry::Always, error)
    })
}

async fn handshake(place: &Place) -> Result<TlsStream<TcpStream>, Failure> {
    let Place { address, host, ca, object } = place;
    let name = ServerName::try_from(host.clone())
        .with_context(|| format!("{host:?} is not a host name"))
        .map_err(Failure::never)?;
    let config = tls::client_config(ca)
        .with_context(|| format!("the caCert of {object}"))
        .map_err(|error| Failure::new(Retry::OnceBegun, error))?;
    let unreachable = |error: std::io::Error| {
        // An untrusted certificate is a permanent error, unless it is being renewed.
        let refused = error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>());
        let retry = if refused { Retry::OnceBegun } else { Retry::Always };
        let what = if refused {
            format!(
                "TLS with {address}, whose certificate must name {host:?} and be in the caCert of {object} or issued by it"
            )
        } else {
            format!(
                "cannot connect to {address} (outside of the cluster, use port-forward and --address)"
            )
        };
        Failure::new(retry, anyhow::Error::from(error).context(what))
    };
    let socket = TcpStream::connect(address).await.map_err(unreachable)?;
    // Without it, each call waits 40 ms for an acknowledgement that the server delays.
    socket.set_nodelay(true).map_err(unreachable)?;
    let connector = TlsConnector::from(Arc::new(config));
    connector.connect(name, socket).await.map_err(unreachable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_certificate_names_the_host_of_the_address() {
        for (address, host) in [
            ("sidecar.csi.svc:6443", Some("sidecar.csi.svc")),
            ("10.0.0.1:1", Some("10.0.0.1")),
            ("[fd00::1]:6443", Some("fd00::1")),
            ("sidecar", None),
            ("sidecar:", None),
            (":6443", None),
            ("sidecar:70000", None),
        ] {
            assert_eq!(host_of(address), host, "{address}");
        }
    }
}
