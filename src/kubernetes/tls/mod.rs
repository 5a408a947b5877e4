//! TLS of what listens in a cluster: which certificate a new connection gets ([`Certificates`]), which versions,
//! suites and curves are spoken ([`Args`]), and connections that are through with their handshake
//! ([`incoming`]). Certificates come from files, which are looked at again and again, or from an authority of
//! the program's own. The one provider of cryptography is ring. Clients are not asked for certificates, since
//! callers show who they are by tokens, except by a server that believes a front proxy ([`ClientChain`]).

mod args;
pub mod authority;
mod certificates;
mod client_chain;
mod files;
pub mod identity;
mod incoming;
mod trusted;

use std::sync::Arc;

use anyhow::Context;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

pub use args::{Args, CipherSuites, Curves, MinVersion};
pub use certificates::Certificates;
pub use client_chain::{ClientAuthorities, ClientChain};
pub use files::{FilesWatcher, read as read_file};
pub use incoming::{Connection, incoming, listen};
pub use trusted::authorities_of;

/// HTTP/2 (RFC 9113, section 3.2).
const ALPN_H2: &[u8] = b"h2";

/// What a server lets clients choose from (ALPN), the most liked first: gRPC is HTTP/2 alone.
pub const GRPC: &[&[u8]] = &[ALPN_H2];
/// The same for HTTPS.
pub const HTTPS: &[&[u8]] = &[ALPN_H2, b"http/1.1"];

/// Makes ring the provider of the process. First thing in `main`: whoever needs TLS later finds it.
pub fn install_provider() {
    // An error means that there is one already, and it is ring: no other is compiled in.
    let _ = ring::default_provider().install_default();
}

/// What a server speaks: the versions, suites and curves of `args`, the protocols of `alpn` ([`GRPC`], [`HTTPS`]), and whatever
/// certificate `certificates` has when a connection begins.
///
/// # Errors
/// The flags leave nothing that could be spoken.
pub fn server_config(
    args: &Args,
    certificates: Certificates,
    alpn: &[&[u8]],
) -> anyhow::Result<Arc<ServerConfig>> {
    config(args, certificates, alpn, WebPkiClientVerifier::no_client_auth())
}

/// The same of a server that asks clients for a certificate, which they need not have: [`ClientChain`] is what they showed.
///
/// # Errors
/// As for [`server_config`].
pub fn server_config_that_asks(
    args: &Args,
    certificates: Certificates,
    alpn: &[&[u8]],
) -> anyhow::Result<Arc<ServerConfig>> {
    let asking = client_chain::Asking(Arc::new(provider()));
    config(args, certificates, alpn, Arc::new(asking))
}

fn config(
    args: &Args,
    certificates: Certificates,
    alpn: &[&[u8]],
    clients: Arc<dyn ClientCertVerifier>,
) -> anyhow::Result<Arc<ServerConfig>> {
    args.warn_of_what_is_left_out();
    let mut config = ServerConfig::builder_with_provider(Arc::new(args.provider()))
        .with_protocol_versions(&args.versions())
        .context("--tls-min-version, --tls-cipher-suites and --tls-curve-preferences together")?
        .with_client_cert_verifier(clients)
        .with_cert_resolver(Arc::new(certificates));
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    // A resumed session would go on with a certificate that has been replaced since.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// What a client speaks that trusts the authorities of `ca_pem` and nobody else, as caCert of a
/// SnapshotMetadataService asks for.
///
/// # Errors
/// `ca_pem` has no certificate, or one that cannot be an authority's.
pub fn client_config(ca_pem: &[u8]) -> anyhow::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for certificate in chain(ca_pem)? {
        roots.add(certificate).context("a certificate that is to be trusted")?;
    }
    let mut config = ClientConfig::builder_with_provider(Arc::new(provider()))
        .with_safe_default_protocol_versions()
        .context("TLS versions")?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN_H2.to_vec()];
    Ok(config)
}

fn provider() -> CryptoProvider {
    ring::default_provider()
}

/// The certificates of a PEM text: at least one.
fn chain(pem: &[u8]) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let chain = chain.map_err(|error| anyhow::anyhow!("not PEM: {error}"))?;
    anyhow::ensure!(!chain.is_empty(), "no certificate in PEM (BEGIN CERTIFICATE)");
    Ok(chain)
}

#[cfg(test)]
mod tests;
