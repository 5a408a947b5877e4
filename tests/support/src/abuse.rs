//! Clients that abuse a listener of this machine from addresses of their own (127.0.0.2 and up), for
//! a bounded time and with a bounded number of connections, while a well-behaved client calls it.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::{Sender, TryRecvError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use nix::unistd::Pid;
use prost::Message;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::cluster::sidecar::allocated;
use crate::requests::framed;

/// Memory limit in the manifests of deploy/.
const MEMORY: u64 = 512 << 20;
/// Maximum time of nine in ten calls of the well-behaved client, and of all, plus the longest time
/// for which the machine stood still. Without the limits of the listeners, calls take more than ten
/// seconds or fail.
const CALL: Duration = Duration::from_secs(2);
const SLOWEST: Duration = Duration::from_secs(8);
/// Calls of the well-behaved client during the abuse, and the time after which none is begun.
const CALLS: usize = 40;
const ENOUGH: Duration = Duration::from_secs(120);
/// Time that a connection of the abuse stays open at most.
const HOLD: Duration = Duration::from_secs(20);

/// What listens on the port.
#[derive(Debug, Clone)]
pub enum Protocol {
    /// Plain HTTP/1.1.
    Http,
    /// HTTPS with bodies of up to `body` bytes at `path`; `headers` end with a line break.
    Https { path: String, headers: String, body: usize },
    /// gRPC over TLS from `addresses` addresses; messages of `call` hold a junk token.
    Grpc { method: &'static str, call: fn(u64) -> Vec<u8>, addresses: u8 },
    /// HTTPS with complete, valid requests from `addresses` addresses, each connection one after
    /// the other. `body` is called with a number that is unique.
    Valid { path: &'static str, body: fn(u64) -> String, addresses: u8 },
}

/// Calls of a sidecar with tokens that no authority has signed.
pub const JUNK_TOKENS: Protocol = junk_tokens(1);

/// The same from this number of addresses.
pub const fn junk_tokens(addresses: u8) -> Protocol {
    let method = "/snapshotmetadata.SnapshotMetadata/GetMetadataAllocated";
    Protocol::Grpc { method, call: junk, addresses }
}

fn junk(number: u64) -> Vec<u8> {
    let token = format!("junk.{number}.{}", "x".repeat(500));
    allocated(token, "default", "first").encode_to_vec()
}

/// What a well-behaved client and the process experienced during the abuse.
#[derive(Debug, Default)]
pub struct Experience {
    /// Durations of the calls, ascending.
    pub calls: Vec<Duration>,
    pub failed: usize,
    /// Resident memory in bytes: before, and at most.
    pub idle: u64,
    pub most: u64,
    /// The longest time for which the machine stood still.
    pub stall: Duration,
}

/// Abuses the port while `call` is made repeatedly. Reports the slowest call and the memory of the
/// process, and fails if a call takes too long or the memory exceeds the manifest's limit.
pub fn while_abused(
    what: &str,
    port: u16,
    process: Pid,
    protocol: Protocol,
    mut call: impl FnMut(),
) {
    let abused = experience(port, process, protocol, || {
        call();
        true
    });
    let (times, most) = (&abused.calls, abused.most);
    let (median, slowest) = (times[times.len() / 2], times[times.len() - 1]);
    println!(
        "report: {what}: calls during abuse take {median:.1?}, at most {slowest:.1?}; {} MiB, idle {} MiB; the machine stood still for {:.1?}",
        most >> 20,
        abused.idle >> 20,
        abused.stall
    );
    let most_calls = times[times.len() * 9 / 10];
    let (calls, all) = (most_calls < CALL, slowest < SLOWEST + abused.stall);
    assert!(calls && all, "{what}: {most_calls:?}, {slowest:?}, stall {:?}", abused.stall);
    assert!(most < MEMORY, "{what}: the process has {most} bytes");
    call();
}

/// Abuses the port while `call`, which returns whether it succeeded, is made 40 times, or until
/// [`ENOUGH`].
pub fn experience(
    port: u16,
    process: Pid,
    protocol: Protocol,
    mut call: impl FnMut() -> bool,
) -> Experience {
    let idle = resident(process);
    let attack =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    for number in 0..600 {
        let protocol = protocol.clone();
        attack.spawn(async move {
            loop {
                // An error is the server's answer to the abuse.
                let _ = timeout(HOLD, abuse(port, number, &protocol)).await;
                sleep(Duration::from_millis(200)).await;
            }
        });
    }
    std::thread::sleep(Duration::from_secs(2));
    let mut abused = Experience { idle, most: idle, ..Experience::default() };
    let (watched, witness) = watch_machine();
    let begun = Instant::now();
    while abused.calls.len() < CALLS && begun.elapsed() < ENOUGH {
        let started = Instant::now();
        abused.failed += usize::from(!call());
        abused.calls.push(started.elapsed());
        abused.most = abused.most.max(resident(process));
        std::thread::sleep(Duration::from_millis(150));
    }
    attack.shutdown_background();
    drop(watched);
    abused.stall = witness.join().unwrap();
    abused.calls.sort_unstable();
    abused
}

/// A thread that writes a block to the disk again and again, and returns the longest time that this
/// took: what a call of the API server may wait for whatever the listener does. It ends when the
/// sender is dropped.
fn watch_machine() -> (Sender<()>, JoinHandle<Duration>) {
    let (watched, ended) = std::sync::mpsc::channel();
    let file = tempfile::tempfile().unwrap();
    let witness = std::thread::spawn(move || {
        const PAUSE: Duration = Duration::from_millis(100);
        let mut longest = Duration::ZERO;
        while ended.try_recv() != Err(TryRecvError::Disconnected) {
            let begun = Instant::now();
            std::thread::sleep(PAUSE);
            file.write_all_at(&[0; 4096], 0).unwrap();
            file.sync_data().unwrap();
            longest = longest.max(begun.elapsed() - PAUSE);
        }
        longest
    });
    (watched, witness)
}

/// Asserts that the process has ended such shares of the listener, by its metrics.
pub fn assert_revoked(metrics: &str, listener: &str, share: &str) {
    let labels = format!("{{listener=\"{listener}\",share=\"{share}\"}} ");
    let series = format!("csi_loopback_shares_revoked_total{labels}");
    let number = metrics.lines().find_map(|line| line.strip_prefix(&series));
    assert!(number.is_some_and(|number| number != "0"), "{listener}, {share}: {number:?}");
}

/// One connection of the abuse, of a kind that depends on its number.
async fn abuse(port: u16, number: u64, protocol: &Protocol) -> std::io::Result<()> {
    let addresses = match protocol {
        Protocol::Grpc { addresses, .. } | Protocol::Valid { addresses, .. } => *addresses,
        Protocol::Http | Protocol::Https { .. } => 1,
    };
    let mut stream = connect(port, number % u64::from(addresses)).await?;
    if let Protocol::Valid { path, body, .. } = protocol {
        return valid(tls(stream, b"http/1.1").await?, path, *body, number).await;
    }
    match (number % 10, protocol) {
        // Silent, from before the handshake or the request.
        (0..4, _) => {}
        (4, Protocol::Http) => stream.write_all(b"GET /metrics HTTP/1.1\r\nX: ").await?,
        (_, Protocol::Valid { .. }) => {}
        (_, Protocol::Http) => drip(&mut stream, b"GET /").await?,
        // Half a ClientHello.
        (4, _) => stream.write_all(&[22, 3, 1, 2, 0, 1]).await?,
        (_, Protocol::Https { path, headers, body }) => {
            let mut stream = tls(stream, b"http/1.1").await?;
            let head = |length: usize| {
                format!(
                    "POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {length}\r\n\r\n"
                )
            };
            match number % 10 {
                5 => {}
                6 => drip(&mut stream, b"POST /").await?,
                7 => {
                    stream.write_all(head(body * 2).as_bytes()).await?;
                    stream.write_all(&vec![b' '; *body]).await?;
                }
                // All but the last byte.
                _ => {
                    stream.write_all(head(*body).as_bytes()).await?;
                    stream.write_all(&vec![b' '; body - 1]).await?;
                }
            }
            return hold(stream).await;
        }
        (kind, Protocol::Grpc { method, call, .. }) => {
            let stream = tls(stream, b"h2").await?;
            return match kind {
                5 => hold(stream).await,
                6 => {
                    let mut stream = stream;
                    drip(&mut stream, b"PRI * HTTP/2.0\r\n").await?;
                    hold(stream).await
                }
                _ => calls(stream, method, *call, number).await,
            };
        }
    }
    hold(stream).await
}

/// Sends valid requests until the server closes the connection.
async fn valid(
    mut stream: TlsStream<TcpStream>,
    path: &str,
    body: fn(u64) -> String,
    number: u64,
) -> std::io::Result<()> {
    for one in 0.. {
        let body = body(number * 1_000_000 + one);
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body.as_bytes()).await?;
        if stream.read(&mut [0; 16 << 10]).await? == 0 {
            break;
        }
    }
    Ok(())
}

/// Calls on one connection: unfinished messages of the maximum size, and junk tokens, whose answers
/// are not read.
async fn calls(
    stream: TlsStream<TcpStream>,
    method: &str,
    call: fn(u64) -> Vec<u8>,
    number: u64,
) -> std::io::Result<()> {
    let builder = h2::client::Builder::new();
    let (mut client, connection) =
        builder.handshake::<_, Bytes>(stream).await.map_err(std::io::Error::other)?;
    let connection = tokio::spawn(connection);
    let mut open = Vec::new();
    for one in 0..50 {
        let request = http::Request::post(format!("https://localhost{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .unwrap();
        client = client.ready().await.map_err(std::io::Error::other)?;
        let (answer, mut body) =
            client.send_request(request, false).map_err(std::io::Error::other)?;
        let whole = number % 10 == 9;
        let message = match whole {
            true => framed(&call(number * 100 + one)),
            // Without its last byte.
            false => framed(&[0; 60_001]).slice(..60_005),
        };
        body.send_data(message, whole).map_err(std::io::Error::other)?;
        open.push((answer, body));
        sleep(Duration::from_millis(20)).await;
    }
    sleep(HOLD).await;
    connection.abort();
    Ok(())
}

async fn connect(port: u16, client: u64) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    let last = u8::try_from(client + 2).map_err(std::io::Error::other)?;
    socket.bind(SocketAddr::from(([127, 0, 0, last], 0)))?;
    socket.connect(SocketAddr::from(([127, 0, 0, 1], port))).await
}

/// Sends a byte a second.
async fn drip(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> std::io::Result<()> {
    for byte in bytes {
        stream.write_all(&[*byte]).await?;
        stream.flush().await?;
        sleep(Duration::from_secs(1)).await;
    }
    Ok(())
}

/// Keeps the connection open until the server closes it.
async fn hold(mut stream: impl tokio::io::AsyncRead + Unpin) -> std::io::Result<()> {
    while stream.read(&mut [0; 1024]).await? > 0 {}
    Ok(())
}

async fn tls(stream: TcpStream, protocol: &[u8]) -> std::io::Result<TlsStream<TcpStream>> {
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(ring)
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer))
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

/// Accepts any certificate: the abuse has nothing to protect.
#[derive(Debug)]
struct AnyServer;

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let ring = rustls::crypto::ring::default_provider();
        ring.signature_verification_algorithms.supported_schemes()
    }
}

/// The resident memory of a process in bytes.
pub fn resident(process: Pid) -> u64 {
    memory(process, "VmRSS:")
}

/// The highest resident memory of a process so far, in bytes.
pub fn peak(process: Pid) -> u64 {
    memory(process, "VmHWM:")
}

fn memory(process: Pid, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}
