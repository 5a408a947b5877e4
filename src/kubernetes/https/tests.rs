use axum::routing::{get, post};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::ServerName;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::*;
use crate::tls::{self, Certificates};
use telemetry::fair_limit::{FairLimit, Labels};
use telemetry::shutdown::Phase;

const LIMITS: Limits = Limits { body: 1000, request: Duration::from_millis(500) };

struct Server {
    port: u16,
    config: rustls::ClientConfig,
    phase: watch::Sender<Phase>,
    served: JoinHandle<()>,
    /// Notified when /slow starts.
    slow: Arc<Notify>,
}

/// Returns the length of a body, and takes 200 ms for /slow.
async fn start() -> Server {
    let dir = TempDir::new().unwrap();
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(["localhost".to_owned()]).unwrap();
    let cert = params.self_signed(&key).unwrap().pem();
    let files = [dir.path().join("tls.crt"), dir.path().join("tls.key")];
    std::fs::write(&files[0], &cert).unwrap();
    std::fs::write(&files[1], key.serialize_pem()).unwrap();
    let (certificates, _) = Certificates::from_files(&files[0], &files[1]).unwrap();
    let (phase, shutdown) = Shutdown::manual();
    let listener = tls::listen(0).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let config = tls::server_config(&tls::Args::default(), certificates, tls::HTTPS).unwrap();
    let slow = Arc::new(Notify::new());
    let begun = slow.clone();
    let routes = Router::new().route("/", post(async |body: Bytes| body.len().to_string())).route(
        "/slow",
        get(async move || {
            begun.notify_one();
            sleep(Duration::from_millis(200)).await;
        }),
    );
    let incoming = tls::incoming(listener, "test", config, shutdown.clone());
    let routes = Bounds::new(LIMITS, "test").around(routes, refuse_in_text);
    let served = tokio::spawn(serve(incoming, routes, LIMITS.request, shutdown));
    Server { port, config: tls::client_config(cert.as_bytes()).unwrap(), phase, served, slow }
}

impl Server {
    async fn connect(&self) -> TlsStream<TcpStream> {
        let mut config = self.config.clone();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let stream = TcpStream::connect(("localhost", self.port)).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap()
    }
}

fn post_of(length: usize, sent: usize) -> String {
    let head = format!("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n");
    head + &"x".repeat(sent)
}

async fn answer(stream: &mut TlsStream<TcpStream>, sent: &str) -> String {
    // The request may be refused before it is sent completely.
    let _ = stream.write_all(sent.as_bytes()).await;
    let mut answer = vec![0; 4096];
    let length = timeout(Duration::from_secs(20), stream.read(&mut answer)).await.unwrap();
    answer.truncate(length.unwrap_or(0));
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn a_body_is_limited_with_or_without_content_length() {
    let server = start().await;
    let mut stream = server.connect().await;
    let fits = answer(&mut stream, &post_of(1000, 1000)).await;
    assert!(fits.starts_with("HTTP/1.1 200") && fits.ends_with("\r\n1000"), "{fits}");
    let too_large = answer(&mut stream, &post_of(1001, 1001)).await;
    assert!(
        too_large.starts_with("HTTP/1.1 413") && too_large.contains("1000 bytes"),
        "{too_large}"
    );
    let head = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunk = format!("1f4\r\n{}\r\n", "x".repeat(500));
    let mut stream = server.connect().await;
    let chunked = answer(&mut stream, &format!("{head}{}", chunk.repeat(3))).await;
    assert!(chunked.starts_with("HTTP/1.1 413"), "{chunked}");
}

#[tokio::test]
async fn slow_clients_are_closed_and_do_not_block_others() {
    let server = start().await;
    let started = Instant::now();
    let (mut silent, mut half_head) = (server.connect().await, server.connect().await);
    half_head.write_all(b"POST / HTT").await.unwrap();
    let mut half_body = server.connect().await;
    half_body.write_all(post_of(1000, 10).as_bytes()).await.unwrap();
    let other = answer(&mut server.connect().await, &post_of(1, 1)).await;
    assert!(other.starts_with("HTTP/1.1 200") && started.elapsed() < LIMITS.request, "{other}");
    let late = answer(&mut half_body, "").await;
    assert!(late.starts_with("HTTP/1.1 408"), "{late}");
    for stream in [&mut silent, &mut half_head] {
        let gone = timeout(HEAD * 2, stream.read_to_end(&mut Vec::new())).await;
        assert!(gone.is_ok(), "the connection stays open");
    }
    assert!(started.elapsed() >= HEAD - Duration::from_secs(1));
}

#[tokio::test]
async fn draining_completes_requests_and_closes_idle_clients() {
    let server = start().await;
    let mut idle = server.connect().await;
    answer(&mut idle, &post_of(1, 1)).await;
    let mut busy = server.connect().await;
    busy.write_all(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    server.slow.notified().await;
    server.phase.send_replace(Phase::Draining);
    let done = answer(&mut busy, "").await;
    assert!(done.starts_with("HTTP/1.1 200"), "{done}");
    timeout(Duration::from_secs(5), server.served).await.expect("still serving").unwrap();
}

#[tokio::test]
async fn a_connection_with_a_request_is_not_idle() {
    let (activity, seen) = watch::channel(Activity { running: 1, any: true });
    let mut waiting = tokio::spawn(idle(seen));
    assert!(timeout(Duration::from_millis(50), &mut waiting).await.is_err());
    let labels = Labels { listener: "test", share: "connection" };
    let share = Arc::new(FairLimit::new(labels, 1).take(Peer::unknown(), 1));
    drop(Running(Usage { activity: activity.clone(), share }));
    assert_eq!(activity.borrow().running, 0);
    waiting.abort();
}
