//! What an endpoint's certificate is like: by a connection that is made for this.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::CertificateError;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use x509_parser::parse_x509_certificate;

use super::Endpoint;

/// What was seen of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Certificate {
    /// It and all between it and its authority are good until then.
    Good { until: SystemTime },
    /// It cannot be trusted. The reason is that of a condition.
    Bad { reason: &'static str, message: String },
    /// There was none to see.
    Unseen(String),
}

impl Endpoint {
    pub async fn certificate(&self) -> Certificate {
        match self.shown().await {
            Ok(chain) => good(&chain),
            Err(error) => bad(&error),
        }
    }

    /// Those that the endpoint shows, which are good now.
    async fn shown(&self) -> io::Result<Vec<CertificateDer<'static>>> {
        let host = self.target.host().to_owned();
        let name = ServerName::try_from(host.clone())
            .map_err(|_| io::Error::other("no certificate can be for the host of its address"))?;
        let stream = TcpStream::connect((host, self.target.port())).await?;
        let stream = TlsConnector::from(self.tls.clone()).connect(name, stream).await?;
        let (_, connection) = stream.get_ref();
        let shown = connection.peer_certificates().unwrap_or_default();
        Ok(shown.iter().map(|certificate| certificate.clone().into_owned()).collect())
    }
}

fn good(chain: &[CertificateDer<'_>]) -> Certificate {
    let ends = chain.iter().filter_map(|certificate| {
        let (_, certificate) = parse_x509_certificate(certificate).ok()?;
        u64::try_from(certificate.validity().not_after.timestamp()).ok()
    });
    match ends.min() {
        Some(end) => Certificate::Good { until: UNIX_EPOCH + Duration::from_secs(end) },
        None => Certificate::Unseen("its end cannot be read".into()),
    }
}

fn bad(error: &io::Error) -> Certificate {
    let of_tls = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    let Some(rustls::Error::InvalidCertificate(what)) = of_tls else {
        return Certificate::Unseen(super::why(error));
    };
    use CertificateError as E;
    let (reason, message) = match what {
        E::Expired | E::ExpiredContext { .. } => ("CertificateExpired", "it has expired; renew it"),
        E::NotValidYet | E::NotValidYetContext { .. } => {
            ("CertificateNotYetValid", "it is not valid yet; compare the clocks")
        }
        E::UnknownIssuer => {
            ("UnknownAuthority", "it comes from no authority of spec.clientConfig.caBundle")
        }
        E::NotValidForName | E::NotValidForNameContext { .. } => {
            ("OtherName", "it is not for the host of spec.clientConfig")
        }
        _ => ("CertificateInvalid", "it cannot be trusted"),
    };
    let message = format!("the certificate of the endpoint: {message}");
    Certificate::Bad { reason, message }
}
