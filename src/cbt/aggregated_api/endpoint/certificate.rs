//! Checks an endpoint's certificate over a separate connection.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::CertificateError;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use x509_parser::parse_x509_certificate;

use super::Endpoint;

/// Result of the check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Certificate {
    /// The whole chain is valid until this time.
    Good { until: SystemTime },
    /// The certificate is not trusted. The reason is the condition's.
    Bad { reason: &'static str, message: String },
    /// No certificate was received, with the reason.
    Unseen(String),
}

impl Endpoint {
    pub async fn certificate(&self) -> Certificate {
        match self.presented().await {
            Ok(chain) => good(&chain),
            Err(error) => bad(&error),
        }
    }

    /// The chain that the endpoint presents, after verification.
    async fn presented(&self) -> io::Result<Vec<CertificateDer<'static>>> {
        let host = self.target.host().to_owned();
        let name = ServerName::try_from(host.clone()).map_err(|_| {
            io::Error::other("the host of its address is not valid in a certificate")
        })?;
        let stream = TcpStream::connect((host, self.target.port())).await?;
        let stream = TlsConnector::from(self.tls.clone()).connect(name, stream).await?;
        let (_, connection) = stream.get_ref();
        let presented = connection.peer_certificates().unwrap_or_default();
        Ok(presented.iter().map(|certificate| certificate.clone().into_owned()).collect())
    }
}

fn good(chain: &[CertificateDer<'_>]) -> Certificate {
    let ends = chain.iter().filter_map(|certificate| {
        let (_, certificate) = parse_x509_certificate(certificate).ok()?;
        u64::try_from(certificate.validity().not_after.timestamp()).ok()
    });
    match ends.min() {
        Some(end) => Certificate::Good { until: UNIX_EPOCH + Duration::from_secs(end) },
        None => Certificate::Unseen("the expiry of the certificate cannot be read".into()),
    }
}

fn bad(error: &io::Error) -> Certificate {
    let of_tls = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    let Some(rustls::Error::InvalidCertificate(what)) = of_tls else {
        return Certificate::Unseen(super::root_cause(error));
    };
    use CertificateError as E;
    let (reason, message) = match what {
        E::Expired | E::ExpiredContext { .. } => ("CertificateExpired", "it has expired; renew it"),
        E::NotValidYet | E::NotValidYetContext { .. } => {
            ("CertificateNotYetValid", "it is not valid yet; check the clocks")
        }
        E::UnknownIssuer => {
            ("UnknownAuthority", "no authority in spec.clientConfig.caBundle signed it")
        }
        E::NotValidForName | E::NotValidForNameContext { .. } => {
            ("OtherName", "it is not valid for the host in spec.clientConfig")
        }
        _ => ("CertificateInvalid", "it is not trusted"),
    };
    let message = format!("the certificate of the endpoint: {message}");
    Certificate::Bad { reason, message }
}
