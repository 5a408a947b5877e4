//! A certificate authority, its certificates as files, and a client that trusts it.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Router;
use csi_loopback::kubernetes::https::{self, Bounds, Limits, refuse_in_text};
use csi_loopback::kubernetes::tls::{self, Certificates};
use csi_loopback::telemetry::shutdown::{Phase, Shutdown};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, SanType,
};
use rustls_pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::Cluster;

/// An authority for certificates of servers.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its key (PEM).
#[derive(Debug, Clone)]
pub struct Certificate {
    pub file: PathBuf,
    pub key: PathBuf,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Self { issuer }
    }

    /// The CA certificate.
    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Issues a certificate for `localhost` and 127.0.0.1 in `directory`. Replaces existing files
    /// by rename, as kubelet does.
    pub fn certify(&self, directory: &Path, name: &str) -> Certificate {
        self.certify_for(directory, name, Duration::from_secs(24 * 3600))
    }

    /// Issues a certificate with this validity.
    pub fn certify_for(&self, directory: &Path, name: &str, validity: Duration) -> Certificate {
        let now = SystemTime::now();
        let span = now - Duration::from_secs(3600)..now + validity;
        self.certify_span(directory, name, "localhost", span)
    }

    /// Issues a certificate for a host with this validity period.
    pub fn certify_span(
        &self,
        directory: &Path,
        name: &str,
        host: &str,
        span: Range<SystemTime>,
    ) -> Certificate {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.subject_alt_names = vec![
            SanType::DnsName(host.try_into().unwrap()),
            SanType::IpAddress(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        ];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.not_before = span.start.into();
        params.not_after = span.end.into();
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let files = Certificate {
            file: directory.join(format!("{name}.crt")),
            key: directory.join(format!("{name}.key")),
        };
        for (file, content) in [(&files.file, certificate.pem()), (&files.key, key.serialize_pem())]
        {
            let new = file.with_extension("new");
            fs::write(&new, content).unwrap();
            fs::rename(&new, file).unwrap();
        }
        files
    }
}

/// A connection for HTTP/1.1 over TLS to a port of this machine.
pub async fn connect(port: u16, authority: &str) -> TlsStream<TcpStream> {
    let mut config = tls::client_config(authority.as_bytes()).unwrap();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let stream = TcpStream::connect(("localhost", port)).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap()
}

/// The response to this text over such a connection.
pub async fn send(port: u16, authority: &str, text: &str) -> String {
    let mut stream = connect(port, authority).await;
    // The request may be refused before it is sent completely.
    let _ = stream.write_all(text.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// The response to a POST of JSON.
pub async fn post(port: u16, authority: &str, path: &str, body: &str) -> String {
    let text = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    send(port, authority, &text).await
}

/// Serves the routes over HTTPS. Returns the port and what ends the server.
pub fn serve(
    cluster: &Cluster,
    certificate: &Certificate,
    routes: Router,
    limits: Limits,
) -> (u16, watch::Sender<Phase>) {
    let (certificates, _) = Certificates::from_files(&certificate.file, &certificate.key).unwrap();
    let config = tls::server_config(&tls::Args::default(), certificates, tls::HTTPS).unwrap();
    let routes = Bounds::new(limits, "test").around(routes, refuse_in_text);
    let (phase, shutdown) = Shutdown::manual();
    let port = cluster.block_on(async {
        let listener = tls::listen(0).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let incoming = tls::incoming(listener, "test", config, shutdown.clone());
        tokio::spawn(https::serve(incoming, routes, limits.request, shutdown));
        port
    });
    (port, phase)
}
