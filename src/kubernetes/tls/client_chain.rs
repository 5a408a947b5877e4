//! Client certificates. A server may request one, but does not require it
//! ([`OptionalClientCertificate`]): the handshake only proves that the client has the key. Each
//! request is checked against the current authorities ([`ClientAuthorities`]), so that a change of
//! authorities takes effect at once.

use std::fmt;
use std::sync::Arc;

use anyhow::Context as _;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{chain, provider};

/// Maximum number of certificates in a chain, more than any client needs. Each costs a signature
/// check.
const MAX_CHAIN: usize = 8;

/// The certificates that a client presented, its own first, unverified. Empty if it presented none.
#[derive(Clone, Default)]
pub struct ClientChain(Arc<[CertificateDer<'static>]>);

impl fmt::Debug for ClientChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} certificates", self.0.len())
    }
}

impl ClientChain {
    /// For tests: a chain with this certificate.
    #[cfg(test)]
    pub fn shown(own: CertificateDer<'static>) -> Self {
        Self(Arc::new([own]))
    }

    pub(super) fn of(shown: Option<&[CertificateDer<'static>]>) -> Self {
        Self(shown.unwrap_or_default().into())
    }
}

/// The authorities that may sign client certificates.
#[derive(Debug, Clone)]
pub struct ClientAuthorities(Arc<dyn ClientCertVerifier>);

impl ClientAuthorities {
    /// Parses the authorities of a PEM text.
    ///
    /// # Errors
    /// It has no certificate, or one that cannot be an authority's.
    pub fn of(pem: &[u8]) -> anyhow::Result<Self> {
        let mut roots = RootCertStore::empty();
        for certificate in chain(pem)? {
            roots.add(certificate).context("invalid CA certificate")?;
        }
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::new(provider()));
        Ok(Self(verifier.build()?))
    }

    /// The common name of a client whose certificate is valid now. `None` if the certificate has no
    /// common name.
    ///
    /// # Errors
    /// No authority signed the certificate, or it is not a client certificate.
    pub fn common_name(&self, shown: &ClientChain) -> anyhow::Result<Option<String>> {
        let Some((own, between)) = shown.0.split_first() else {
            anyhow::bail!("the client presented no certificate");
        };
        self.0.verify_client_cert(own, between, UnixTime::now())?;
        let (_, certificate) =
            X509Certificate::from_der(own).context("invalid client certificate")?;
        let mut names = certificate.subject().iter_common_name();
        let name = names.next().map(|name| name.as_str().map(str::to_owned));
        // Which of several names would apply is undefined.
        anyhow::ensure!(names.next().is_none(), "the client certificate has several common names");
        Ok(name.transpose()?)
    }
}

/// Requests a certificate, and accepts any for which the client can prove that it has the key.
#[derive(Debug)]
pub(super) struct OptionalClientCertificate(pub(super) Arc<CryptoProvider>);

impl ClientCertVerifier for OptionalClientCertificate {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        match between.len() < MAX_CHAIN {
            true => Ok(ClientCertVerified::assertion()),
            false => Err(Error::General(format!("more than {MAX_CHAIN} certificates"))),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
