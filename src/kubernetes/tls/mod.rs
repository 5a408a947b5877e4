//! TLS for servers in a cluster: the certificate of new connections ([`Certificates`]), versions,
//! suites and curves ([`Args`]), and connections with a completed handshake ([`incoming`]).
//! Certificates come from files, which are polled, or from the program's own authority. ring is the
//! only cryptography provider. Clients authenticate with tokens, so client certificates are not
//! requested, except by a server that trusts a front proxy ([`ClientChain`]), and required only with
//! `--client-ca` ([`ClientArgs`]).

mod args;
pub mod authority;
mod certificates;
mod client_chain;
mod files;
pub mod identity;
mod incoming;
mod pinned;
mod trusted;

use std::sync::Arc;

use anyhow::Context;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, ServerConfig};

pub use args::{Args, CipherSuites, Curves, MinVersion};
pub use certificates::Certificates;
pub use client_chain::{ClientArgs, ClientAuthorities, ClientChain};
pub use files::{FilesWatcher, read as read_file};
pub use incoming::{Connection, incoming, listen};
pub use trusted::watch_authorities;

/// HTTP/2 (RFC 9113, section 3.2).
const ALPN_H2: &[u8] = b"h2";

/// Protocols (ALPN) in order of preference: gRPC requires HTTP/2.
pub const GRPC: &[&[u8]] = &[ALPN_H2];
/// Protocols (ALPN) of HTTPS.
pub const HTTPS: &[&[u8]] = &[ALPN_H2, b"http/1.1"];

/// Makes ring the provider of the process. Call it first in `main`, before any use of TLS.
pub fn install_provider() {
    // An error means that a provider is installed, which can only be ring.
    let _ = ring::default_provider().install_default();
}

/// A server's configuration: the versions, suites and curves of `args`, the protocols of `alpn`
/// ([`GRPC`], [`HTTPS`]), and the current certificate of `certificates` for each connection.
///
/// # Errors
/// The flags leave no usable combination.
pub fn server_config(
    args: &Args,
    certificates: Certificates,
    alpn: &[&[u8]],
) -> anyhow::Result<Arc<ServerConfig>> {
    config(args, certificates, alpn, WebPkiClientVerifier::no_client_auth())
}

/// Like [`server_config`], but requests an optional client certificate, see [`ClientChain`].
///
/// # Errors
/// As for [`server_config`].
pub fn server_config_requesting_client_certificates(
    args: &Args,
    certificates: Certificates,
    alpn: &[&[u8]],
) -> anyhow::Result<Arc<ServerConfig>> {
    config(args, certificates, alpn, Arc::new(client_chain::ClientCertificate::optional()))
}

fn config(
    args: &Args,
    certificates: Certificates,
    alpn: &[&[u8]],
    clients: Arc<dyn ClientCertVerifier>,
) -> anyhow::Result<Arc<ServerConfig>> {
    args.warn_about_omissions();
    let mut config = ServerConfig::builder_with_provider(Arc::new(args.provider()))
        .with_protocol_versions(&args.versions())
        .context(
            "--tls-min-version, --tls-cipher-suites and --tls-curve-preferences exclude each other",
        )?
        .with_client_cert_verifier(clients)
        .with_cert_resolver(Arc::new(certificates));
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    // A resumed session would keep using a replaced certificate.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// A client's configuration that trusts only the certificates of `ca_pem`, such as caCert of a
/// SnapshotMetadataService, and what they have signed.
///
/// # Errors
/// `ca_pem` has no certificate, or a malformed one.
pub fn client_config(ca_pem: &[u8]) -> anyhow::Result<ClientConfig> {
    let given = pinned::Given::new(chain(ca_pem)?)?;
    let mut config = ClientConfig::builder_with_provider(Arc::new(provider()))
        .with_safe_default_protocol_versions()
        .context("TLS versions")?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(given))
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN_H2.to_vec()];
    Ok(config)
}

fn provider() -> CryptoProvider {
    ring::default_provider()
}

/// Parses the certificates of a PEM text: at least one.
fn chain(pem: &[u8]) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let chain = chain.map_err(|error| anyhow::anyhow!("invalid PEM: {error}"))?;
    anyhow::ensure!(!chain.is_empty(), "the file has no certificate in PEM (BEGIN CERTIFICATE)");
    Ok(chain)
}

#[cfg(test)]
mod tests;
