//! Real handshakes over loopback TCP.

use std::fs;
use std::path::Path;
use std::time::Duration;

use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, ProtocolVersion, RootCertStore};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_stream::StreamExt;

use super::*;
use telemetry::shutdown::{Phase, Shutdown};

/// A certificate for localhost that is its own authority, and its key, in PEM.
struct Leaf {
    cert: String,
    key: String,
}

fn leaf() -> Leaf {
    let key = KeyPair::generate().unwrap();
    let cert = CertificateParams::new(["localhost".to_owned()]).unwrap().self_signed(&key).unwrap();
    Leaf { cert: cert.pem(), key: key.serialize_pem() }
}

impl Leaf {
    fn write(&self, dir: &Path) {
        fs::write(dir.join("tls.crt"), &self.cert).unwrap();
        fs::write(dir.join("tls.key"), &self.key).unwrap();
    }

    fn client(&self) -> ClientConfig {
        client_config(self.cert.as_bytes()).unwrap()
    }

    /// The configuration of a client that trusts `server` and presents this certificate.
    fn client_of(&self, server: &Leaf) -> ClientConfig {
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes()).unwrap();
        let own = chain(self.cert.as_bytes()).unwrap();
        let own = CertifiedKey::from_der(own, key, &provider()).unwrap();
        let mut config = server.client();
        config.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(own));
        config
    }
}

fn args(line: &str) -> Args {
    let command = <Args as clap::Args>::augment_args(clap::Command::new("x"));
    let matches = command.try_get_matches_from(line.split_whitespace()).unwrap();
    <Args as clap::FromArgMatches>::from_arg_matches(&matches).unwrap()
}

/// Echoes what each connection sends.
struct Server {
    address: std::net::SocketAddr,
    certificates: Certificates,
    phase: watch::Sender<Phase>,
    served: JoinHandle<()>,
    dir: TempDir,
}

impl Server {
    async fn start(leaf: &Leaf, line: &str) -> Self {
        Self::with(leaf, |certificates, _| server_config(&args(line), certificates, GRPC)).await
    }

    async fn with(
        leaf: &Leaf,
        config: impl FnOnce(Certificates, &Shutdown) -> anyhow::Result<Arc<ServerConfig>>,
    ) -> Self {
        let dir = TempDir::new().unwrap();
        leaf.write(dir.path());
        let (cert, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
        let (certificates, watcher) = Certificates::from_files(&cert, &key).unwrap();
        let (phase, shutdown) = Shutdown::manual();
        tokio::spawn(watcher.watch(shutdown.clone()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let config = config(certificates.clone(), &shutdown).unwrap();
        let mut connections = incoming(listener, "test", config, shutdown);
        let served = tokio::spawn(async move {
            while let Some(connection) = connections.next().await {
                let (mut reader, mut writer) = tokio::io::split(connection.unwrap());
                tokio::spawn(async move { tokio::io::copy(&mut reader, &mut writer).await });
            }
        });
        Self { address, certificates, phase, served, dir }
    }

    async fn connect(&self, config: ClientConfig) -> std::io::Result<TlsStream<TcpStream>> {
        let stream = TcpStream::connect(self.address).await?;
        let name = ServerName::try_from("localhost").unwrap();
        let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        echo(&mut stream).await?;
        Ok(stream)
    }

    async fn served_becomes(&self, leaf: &Leaf) {
        for _ in 0..100 {
            if self.connect(leaf.client()).await.is_ok() {
                return;
            }
            sleep(Duration::from_millis(100)).await;
        }
        panic!("the new certificate is not served");
    }
}

/// A TLS 1.3 client learns of a refusal only when it reads.
async fn echo(stream: &mut TlsStream<TcpStream>) -> std::io::Result<()> {
    stream.write_all(b"x").await?;
    let mut answer = [0];
    stream.read_exact(&mut answer).await?;
    assert_eq!(&answer, b"x");
    Ok(())
}

fn only(version: &'static rustls::SupportedProtocolVersion, leaf: &Leaf) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(chain(leaf.cert.as_bytes()).unwrap().remove(0)).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(provider()))
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN_H2.to_vec()];
    config
}

#[tokio::test]
async fn a_changed_certificate_leaves_open_connections_alone() {
    let (first, second, third) = (leaf(), leaf(), leaf());
    let server = Server::start(&first, "x").await;
    let mut open = server.connect(first.client()).await.unwrap();
    assert_eq!(open.get_ref().1.alpn_protocol(), Some(ALPN_H2));
    // Replace the files in place.
    second.write(server.dir.path());
    server.served_becomes(&second).await;
    assert!(server.connect(first.client()).await.is_err(), "the first one is still served");
    // Replace them like kubelet: both files are links through a link that is replaced by rename.
    let dir = server.dir.path();
    fs::create_dir(dir.join("..1")).unwrap();
    third.write(&dir.join("..1"));
    std::os::unix::fs::symlink("..1", dir.join("..data_tmp")).unwrap();
    fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
    for name in ["tls.crt", "tls.key"] {
        std::os::unix::fs::symlink(format!("..data/{name}"), dir.join("link")).unwrap();
        fs::rename(dir.join("link"), dir.join(name)).unwrap();
    }
    server.served_becomes(&third).await;
    echo(&mut open).await.unwrap();
    assert_eq!(server.certificates.reload_failures(), 0);
}

#[tokio::test]
async fn a_mismatched_key_is_rejected() {
    let (first, second) = (leaf(), leaf());
    let server = Server::start(&first, "x").await;
    fs::write(server.dir.path().join("tls.crt"), &second.cert).unwrap();
    for _ in 0..100 {
        server.connect(first.client()).await.unwrap();
        if server.certificates.reload_failures() > 0 {
            break;
        }
        sleep(Duration::from_millis(100)).await;
    }
    // One failure per change, however often it is polled.
    sleep(Duration::from_millis(2_200)).await;
    assert_eq!(server.certificates.reload_failures(), 1);
    server.connect(first.client()).await.unwrap();
    second.write(server.dir.path());
    server.served_becomes(&second).await;
}

#[tokio::test]
async fn versions_below_the_minimum_are_refused() {
    let leaf = leaf();
    let server = Server::start(&leaf, "x --tls-min-version VersionTLS13").await;
    assert!(server.connect(only(&rustls::version::TLS12, &leaf)).await.is_err());
    let stream = server.connect(leaf.client()).await.unwrap();
    assert_eq!(stream.get_ref().1.protocol_version(), Some(ProtocolVersion::TLSv1_3));
    let server = Server::start(&leaf, "x").await;
    let stream = server.connect(only(&rustls::version::TLS12, &leaf)).await.unwrap();
    assert_eq!(stream.get_ref().1.protocol_version(), Some(ProtocolVersion::TLSv1_2));
}

#[tokio::test]
async fn the_chosen_suite_and_curve_are_negotiated() {
    let leaf = leaf();
    let suite = "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256";
    let line = format!("x --tls-cipher-suites {suite} --tls-curve-preferences CurveP384");
    let server = Server::start(&leaf, &line).await;
    let stream = server.connect(only(&rustls::version::TLS12, &leaf)).await.unwrap();
    let session = stream.get_ref().1;
    assert_eq!(session.negotiated_cipher_suite().unwrap().suite().as_str(), Some(suite));
    let group = session.negotiated_key_exchange_group().unwrap().name();
    assert_eq!(group, rustls::NamedGroup::secp384r1);
    // An RSA suite cannot be used with an ECDSA certificate.
    let line = "x --tls-cipher-suites TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256";
    let server = Server::start(&leaf, line).await;
    assert!(server.connect(only(&rustls::version::TLS12, &leaf)).await.is_err());
    server.connect(leaf.client()).await.unwrap();
}

#[tokio::test]
async fn a_silent_client_does_not_block_others() {
    let leaf = leaf();
    let server = Server::start(&leaf, "x").await;
    let mut silent = Vec::new();
    for _ in 0..400 {
        silent.push(TcpStream::connect(server.address).await.unwrap());
    }
    let mut noise = TcpStream::connect(server.address).await.unwrap();
    noise.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    timeout(Duration::from_secs(5), server.connect(leaf.client())).await.unwrap().unwrap();
    // The silent connection is closed, here to make room for the others.
    let mut answer = Vec::new();
    let gone = timeout(Duration::from_secs(20), silent[0].read_to_end(&mut answer)).await;
    gone.expect("the silent connection stays open").unwrap();
}

/// A client of a server that sends `answer` and shuts the connection down without reading, and the
/// server's task.
async fn answered(answer: Vec<u8>) -> (TlsStream<TcpStream>, JoinHandle<std::io::Result<()>>) {
    let leaf = leaf();
    let dir = TempDir::new().unwrap();
    leaf.write(dir.path());
    let (cert, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
    let (certificates, _) = Certificates::from_files(&cert, &key).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (_phase, shutdown) = Shutdown::manual();
    let config = server_config(&args("x"), certificates, GRPC).unwrap();
    let mut connections = incoming(listener, "test", config, shutdown);
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let connecting = TlsConnector::from(Arc::new(leaf.client())).connect(name, stream);
    let (client, connection) = tokio::join!(connecting, connections.next());
    let mut connection = connection.unwrap().unwrap();
    let ended = tokio::spawn(async move {
        connection.write_all(&answer).await?;
        connection.shutdown().await
    });
    (client.unwrap(), ended)
}

#[tokio::test]
async fn a_slow_sending_client_receives_the_whole_response() {
    const LENGTH: usize = 4 << 20;
    let (mut client, ended) = answered(vec![7; LENGTH]).await;
    let (mut received, mut chunk) = (0, vec![0; 16 << 10]);
    while received < LENGTH {
        // Like HTTP/2 window updates. An error means that the server has closed the connection.
        let _ = client.write_all(b"x").await;
        let read = client.read(&mut chunk).await.unwrap();
        assert!(read > 0, "{received} bytes of {LENGTH}");
        received += read;
        sleep(Duration::from_millis(1)).await;
    }
    drop(client);
    ended.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_client_that_does_not_close_is_disconnected() {
    let (client, ended) = answered(b"answer".to_vec()).await;
    timeout(Duration::from_secs(20), ended)
        .await
        .expect("the connection stays open")
        .unwrap()
        .unwrap();
    drop(client);
}

#[tokio::test]
async fn accepting_ends_when_draining_begins() {
    let leaf = leaf();
    let server = Server::start(&leaf, "x").await;
    let mut open = server.connect(leaf.client()).await.unwrap();
    server.phase.send_replace(Phase::Draining);
    timeout(Duration::from_secs(5), server.served).await.expect("still accepting").unwrap();
    assert!(TcpStream::connect(server.address).await.is_err());
    echo(&mut open).await.unwrap();
}

#[tokio::test]
async fn a_client_trusts_only_the_given_authorities() {
    let (ours, other) = (leaf(), leaf());
    let server = Server::start(&ours, "x").await;
    assert!(server.connect(other.client()).await.is_err());
    let both = format!("{}{}", other.cert, ours.cert);
    server.connect(client_config(both.as_bytes()).unwrap()).await.unwrap();
    for bad in ["", "no pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        assert!(client_config(bad.as_bytes()).is_err(), "{bad}");
    }
}

/// The table is that of Go's crypto/x509, with the certificate alone in the pool of roots.
#[tokio::test]
async fn a_given_certificate_is_accepted_as_go_accepts_it() {
    use rcgen::{BasicConstraints, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa};
    let authority = {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    };
    let own = |change: &dyn Fn(&mut CertificateParams), signed: bool| {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        change(&mut params);
        let cert = match signed {
            true => params.signed_by(&key, &authority).unwrap(),
            false => params.self_signed(&key).unwrap(),
        };
        Leaf { cert: cert.pem(), key: key.serialize_pem() }
    };
    type Change = dyn Fn(&mut CertificateParams);
    let is_ca = |params: &mut CertificateParams| {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    };
    let no_ca = |params: &mut CertificateParams| params.is_ca = IsCa::ExplicitNoCa;
    let none = |_: &mut CertificateParams| {};
    let old = |params: &mut CertificateParams| {
        params.not_after = rcgen::date_time_ymd(2001, 1, 1);
        params.not_before = rcgen::date_time_ymd(2000, 1, 1);
    };
    let early = |params: &mut CertificateParams| {
        params.not_before = rcgen::date_time_ymd(2100, 1, 1);
        params.not_after = rcgen::date_time_ymd(2101, 1, 1);
    };
    let client = |params: &mut CertificateParams| {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    };
    let other = |params: &mut CertificateParams| {
        *params = CertificateParams::new(["another".to_owned()]).unwrap();
    };
    let table: [(&str, &Change, bool, Option<&str>); 9] = [
        ("CA:TRUE", &is_ca, false, None),
        ("CA:FALSE", &no_ca, false, None),
        ("no basic constraints", &none, false, None),
        ("of another authority", &none, true, None),
        ("CA:TRUE of another authority", &is_ca, true, None),
        ("expired", &old, false, Some("expired")),
        ("not valid yet", &early, false, Some("not valid yet")),
        ("for clients", &client, false, Some("does not allow extended key usage")),
        ("of another host", &other, false, Some("not valid for name")),
    ];
    for (name, change, signed, refusal) in table {
        let leaf = own(change, signed);
        let server = Server::start(&leaf, "x").await;
        let connected = server.connect(leaf.client()).await.map(drop);
        match (connected, refusal) {
            (Ok(()), None) => {}
            (Err(error), Some(words)) => {
                let error = format!("{error:#}");
                assert!(error.contains(words), "{name}: {error}");
            }
            (found, _) => panic!("{name}: {found:?}"),
        }
        // Its key is needed as well.
        let same_name = Server::start(&own(change, signed), "x").await;
        assert!(same_name.connect(leaf.client()).await.is_err(), "{name}");
    }
}

#[tokio::test]
async fn only_clients_of_the_current_client_ca_can_connect() {
    let (own, client, other) = (leaf(), leaf(), leaf());
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("ca.crt");
    fs::write(&file, &client.cert).unwrap();
    let clients = ClientArgs { client_ca: Some(file.clone()) };
    let server = Server::with(&own, |certificates, shutdown| {
        clients.server_config(&args("x"), certificates, shutdown)
    })
    .await;
    server.connect(client.client_of(&own)).await.unwrap();
    let tls12 = |leaf: &Leaf| {
        let mut config = only(&rustls::version::TLS12, &own);
        config.client_auth_cert_resolver = leaf.client_of(&own).client_auth_cert_resolver;
        config
    };
    server.connect(tls12(&client)).await.unwrap();
    for refused in [own.client(), other.client_of(&own), tls12(&other)] {
        assert!(server.connect(refused).await.is_err(), "the client is accepted");
    }
    // An invalid file keeps the authority; a valid one replaces it.
    fs::write(&file, "").unwrap();
    sleep(Duration::from_millis(2_200)).await;
    server.connect(client.client_of(&own)).await.unwrap();
    fs::write(&file, &other.cert).unwrap();
    let mut attempts = 0..100;
    while server.connect(other.client_of(&own)).await.is_err() {
        attempts.next().expect("the changed file is not read");
        sleep(Duration::from_millis(100)).await;
    }
    assert!(server.connect(client.client_of(&own)).await.is_err());
}

#[test]
fn an_invalid_file_at_start_is_reported_with_its_flag() {
    let dir = TempDir::new().unwrap();
    let (cert, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
    let error = || format!("{:#}", Certificates::from_files(&cert, &key).expect_err("accepted"));
    let (one, two) = (leaf(), leaf());
    assert!(error().contains("--tls-cert"), "{}", error());
    fs::write(&cert, &one.cert).unwrap();
    assert!(error().contains("--tls-key"), "{}", error());
    let garbage = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n";
    for (chain, secret) in [
        (&one.cert, &two.key),
        (&one.cert, &one.cert),
        (&one.key, &one.key),
        (&one.cert, &garbage.to_owned()),
        (&one.cert, &"x".repeat(2 << 20)),
    ] {
        fs::write(&cert, chain).unwrap();
        fs::write(&key, secret).unwrap();
        assert!(error().contains("--tls-key") && !error().contains("c2VjcmV0"), "{}", error());
    }
}
