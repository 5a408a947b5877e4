//! Verification of a server's certificate by given certificates, as programs in Go verify it: also a
//! certificate that is given itself is accepted, whether or not it may sign others, and of any
//! issuer, if it is valid now, for the host, and for servers. webpki alone accepts it only if it
//! has signed itself and is no authority (CA:FALSE).

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, DigitallySignedStruct, Error, ExtendedKeyPurpose, RootCertStore,
    SignatureScheme,
};
use x509_parser::prelude::{ASN1Time, FromDer, X509Certificate};

use super::provider;

/// Trusts these certificates, and what they have signed.
#[derive(Debug)]
pub struct Given {
    certificates: Vec<CertificateDer<'static>>,
    authorities: Arc<WebPkiServerVerifier>,
}

impl Given {
    /// # Errors
    /// One of them is malformed.
    pub fn new(certificates: Vec<CertificateDer<'static>>) -> anyhow::Result<Self> {
        let mut roots = RootCertStore::empty();
        for certificate in &certificates {
            roots.add(certificate.clone()).context("invalid CA certificate")?;
        }
        let authorities =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::new(provider()));
        Ok(Self { certificates, authorities: authorities.build()? })
    }
}

impl ServerCertVerifier for Given {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if !self.certificates.iter().any(|given| given == own) {
            return self.authorities.verify_server_cert(own, between, name, ocsp, now);
        }
        verify_server_name(&ParsedCertificate::try_from(own)?, name)?;
        let malformed = |_| Error::from(CertificateError::BadEncoding);
        let (_, certificate) = X509Certificate::from_der(own).map_err(malformed)?;
        is_valid_at(&certificate, now)?;
        is_for_servers(&certificate)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authorities.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authorities.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authorities.supported_verify_schemes()
    }
}

fn is_valid_at(certificate: &X509Certificate<'_>, now: UnixTime) -> Result<(), CertificateError> {
    // Nothing was valid before 1970.
    let of = |time: ASN1Time| {
        let seconds = u64::try_from(time.timestamp()).unwrap_or_default();
        UnixTime::since_unix_epoch(Duration::from_secs(seconds))
    };
    let validity = certificate.validity();
    let (not_before, not_after) = (of(validity.not_before), of(validity.not_after));
    if now < not_before {
        return Err(CertificateError::NotValidYetContext { time: now, not_before });
    }
    if now > not_after {
        return Err(CertificateError::ExpiredContext { time: now, not_after });
    }
    Ok(())
}

/// A certificate without extended key usage is for all purposes.
fn is_for_servers(certificate: &X509Certificate<'_>) -> Result<(), CertificateError> {
    let usage = certificate.extended_key_usage().map_err(|_| CertificateError::BadEncoding)?;
    let Some(usage) = usage.map(|usage| usage.value) else { return Ok(()) };
    if usage.any || usage.server_auth {
        return Ok(());
    }
    let client = usage.client_auth.then_some(ExtendedKeyPurpose::ClientAuth);
    Err(CertificateError::InvalidPurposeContext {
        required: ExtendedKeyPurpose::ServerAuth,
        presented: client.into_iter().collect(),
    })
}
