//! Client certificates ([`ClientCertificate`]). With `--client-ca` the handshake requires one that a
//! current authority has signed. A server with a front proxy requests one, but does not require it:
//! the handshake only proves that the client has the key. Each request is checked against the
//! current authorities ([`ClientAuthorities`]), so that a change of authorities takes effect at once.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    DigitallySignedStruct, DistinguishedName, Error, RootCertStore, ServerConfig, SignatureScheme,
};
use tokio::sync::watch;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{Args, Certificates, HTTPS, chain, config, provider, server_config, watch_authorities};
use telemetry::shutdown::Shutdown;

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
    #[cfg(any(test, feature = "testing"))]
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

/// The flag of an HTTPS server whose only client is the API server.
#[derive(Debug, Clone, clap::Args)]
// The default name would collide with the group of the struct that flattens this one.
#[group(skip)]
pub struct ClientArgs {
    /// Require a client certificate of a CA in this PEM file, reloaded on change
    #[arg(long, value_name = "FILE")]
    pub client_ca: Option<PathBuf>,
}

impl ClientArgs {
    /// [`server_config`] of this server.
    ///
    /// # Errors
    /// As for [`server_config`], or the file of `--client-ca` has no authorities.
    pub fn server_config(
        &self,
        args: &Args,
        certificates: Certificates,
        shutdown: &Shutdown,
    ) -> anyhow::Result<Arc<ServerConfig>> {
        let Some(file) = &self.client_ca else { return server_config(args, certificates, HTTPS) };
        let parse = |pem: &str| ClientAuthorities::of(pem.as_bytes());
        let authorities = watch_authorities("--client-ca", file, parse, shutdown.clone())?;
        config(args, certificates, HTTPS, Arc::new(ClientCertificate::of(authorities)))
    }
}

/// Verifies that the client has the key of its certificate.
#[derive(Debug)]
pub(super) struct ClientCertificate {
    provider: CryptoProvider,
    /// The authorities that must have signed it. Without them, any certificate is accepted, and none
    /// is required.
    authorities: Option<watch::Receiver<ClientAuthorities>>,
}

impl ClientCertificate {
    pub fn optional() -> Self {
        Self { provider: provider(), authorities: None }
    }

    fn of(authorities: watch::Receiver<ClientAuthorities>) -> Self {
        Self { provider: provider(), authorities: Some(authorities) }
    }
}

impl ClientCertVerifier for ClientCertificate {
    fn client_auth_mandatory(&self) -> bool {
        self.authorities.is_some()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        if between.len() >= MAX_CHAIN {
            return Err(Error::General(format!("more than {MAX_CHAIN} certificates")));
        }
        let Some(authorities) = &self.authorities else {
            return Ok(ClientCertVerified::assertion());
        };
        let ClientAuthorities(verifier) = authorities.borrow().clone();
        verifier.verify_client_cert(own, between, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
