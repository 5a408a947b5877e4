//! Certificates of clients. A server may ask for one and never needs it ([`Asking`]): in the handshake a client proves that it has
//! the key of what it shows, and no more. Whose word the certificate is worth is judged at each request
//! ([`ClientAuthorities`]), so that other authorities count from the moment that they are known.

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

/// Certificates in a chain, at most: more than anybody needs, and each costs a signature to check.
const MAX_CHAIN: usize = 8;

/// What a client has shown, its own certificate first: not judged. Empty: nothing.
#[derive(Clone, Default)]
pub struct ClientChain(Arc<[CertificateDer<'static>]>);

impl fmt::Debug for ClientChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} certificates", self.0.len())
    }
}

impl ClientChain {
    /// For tests: as if this certificate had been shown.
    #[cfg(test)]
    pub fn shown(own: CertificateDer<'static>) -> Self {
        Self(Arc::new([own]))
    }

    pub(super) fn of(shown: Option<&[CertificateDer<'static>]>) -> Self {
        Self(shown.unwrap_or_default().into())
    }
}

/// Who may vouch for clients.
#[derive(Debug, Clone)]
pub struct ClientAuthorities(Arc<dyn ClientCertVerifier>);

impl ClientAuthorities {
    /// Those of a PEM text.
    ///
    /// # Errors
    /// It has no certificate, or one that cannot be an authority's.
    pub fn of(pem: &[u8]) -> anyhow::Result<Self> {
        let mut roots = RootCertStore::empty();
        for certificate in chain(pem)? {
            roots.add(certificate).context("a certificate that is to be trusted")?;
        }
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::new(provider()));
        Ok(Self(verifier.build()?))
    }

    /// The common name of a client that one of these authorities vouches for now; none where its certificate has none.
    ///
    /// # Errors
    /// None of them does, or the certificate is not one of a client; why.
    pub fn common_name(&self, shown: &ClientChain) -> anyhow::Result<Option<String>> {
        let Some((own, between)) = shown.0.split_first() else {
            anyhow::bail!("no certificate was shown");
        };
        self.0.verify_client_cert(own, between, UnixTime::now())?;
        let (_, certificate) = X509Certificate::from_der(own).context("its certificate")?;
        let mut names = certificate.subject().iter_common_name();
        let name = names.next().map(|name| name.as_str().map(str::to_owned));
        // Which of several is meant is a matter of taste.
        anyhow::ensure!(names.next().is_none(), "its certificate has several common names");
        Ok(name.transpose()?)
    }
}

/// Asks for a certificate and takes whatever a client can prove to be its own.
#[derive(Debug)]
pub(super) struct Asking(pub(super) Arc<CryptoProvider>);

impl ClientCertVerifier for Asking {
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
