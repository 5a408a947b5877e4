//! The admission configuration of docs/guide/api-server-certificate.md: hack/cluster.sh starts the
//! API server with it.

use std::net::SocketAddr;

use k8s_openapi::api::core::v1::{Namespace, Service};
use kube::Api;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::json;
use support::cluster::manager::{self, manager_rules};
use support::cluster::programs::free_port;
use support::cluster::shared;
use support::path;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;

use super::{PATH, Rig};

/// The Service of deploy/session-manager, whose host the page names.
const NAMESPACE: &str = "csi-loopback-sessions";
const SERVICE: &str = "csi-loopback-session-manager";
/// Where the Service leads: an address that no other program uses, with the port of the page.
const ADDRESS: &str = "127.77.43.1";

/// Forwards connections to the Service to the manager.
async fn forward(listener: TcpListener, port: u16) {
    while let Ok((mut from, _)) = listener.accept().await {
        tokio::spawn(async move {
            if let Ok(mut to) = TcpStream::connect(("localhost", port)).await {
                let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
            }
        });
    }
}

/// What the manager answers to a client with this certificate of the cluster's pki.
fn answer(rig: &Rig<'_>, pem: &str, certificate: Option<&str>) -> std::io::Result<String> {
    let file = |name: &str, kind: &str| {
        let file = rig.cluster.directory().join("pki").join(format!("{name}.{kind}"));
        std::fs::read(file).unwrap()
    };
    let mut config = csi_loopback::kubernetes::tls::client_config(pem.as_bytes()).unwrap();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    if let Some(name) = certificate {
        let chain = vec![CertificateDer::from_pem_slice(&file(name, "crt")).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(&file(name, "key")).unwrap();
        let own = rustls::sign::CertifiedKey::from_der(chain, key, config.crypto_provider());
        let own = rustls::sign::SingleCertAndKey::from(own.unwrap());
        config.client_auth_cert_resolver = std::sync::Arc::new(own);
    }
    let host = ServerName::try_from(format!("{SERVICE}.{NAMESPACE}.svc")).unwrap();
    rig.cluster.block_on(async {
        let stream = TcpStream::connect(("localhost", rig.manager.port)).await?;
        let connector = TlsConnector::from(std::sync::Arc::new(config));
        let mut stream = connector.connect(host, stream).await?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    })
}

#[test]
fn the_page_of_client_certificates_works_with_a_real_api_server() {
    let Some(cluster) = shared() else { return };
    let address: SocketAddr = format!("{ADDRESS}:443").parse().unwrap();
    let listener = cluster.block_on(TcpListener::bind(address)).unwrap();
    let host = format!("{SERVICE}.{NAMESPACE}.svc");
    let flags = ["--self-signed", "--service-address", &format!("{host}:443")];
    let ca = cluster.directory().join("pki/front-proxy-ca.crt");
    let rig =
        Rig::started_by(cluster, manager_rules(), &["--client-ca", path(&ca)], |cluster, start| {
            manager::spawn_with_certificate(cluster, start, free_port(), &flags)
        });
    let forwarding = cluster.spawn_task(forward(listener, rig.manager.port));
    cluster.create(&cluster.api::<Namespace>(), json!({ "metadata": { "name": NAMESPACE } }));
    let services: Api<Service> = cluster.api_in(NAMESPACE);
    let spec = json!({ "type": "ExternalName", "externalName": ADDRESS });
    cluster.create(&services, json!({ "metadata": { "name": SERVICE }, "spec": spec }));
    rig.configure_as(
        "Fail",
        json!({ "service": { "namespace": NAMESPACE, "name": SERVICE, "path": PATH } }),
    );

    rig.wait_until_judging();
    rig.ask(&cluster.client(), &["monday"], true).unwrap();
    let pem = rig.ca_bundle().unwrap();
    assert!(answer(&rig, &pem, Some("front-proxy")).unwrap().starts_with("HTTP/1.1 404"));
    // Any pod, and the holder of a certificate of another authority.
    for other in [None, Some("webhook-client"), Some("admin")] {
        assert!(answer(&rig, &pem, other).is_err(), "{other:?} is answered");
    }
    forwarding.abort();
    cluster.delete(&rig.configurations(), &rig.configuration);
    cluster.delete(&services, SERVICE);
}
