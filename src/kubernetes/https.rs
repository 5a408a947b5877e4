//! HTTPS for servers that the API server calls: webhooks and aggregated APIs. Any process that
//! reaches the port can connect, so everything is limited: a request's head, body and time, the
//! bytes of all bodies together, and the idle time of a connection.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_stream::{Stream, StreamExt};

use super::tls::Connection;
use crate::telemetry::shutdown::Shutdown;

/// Time to receive the head of a request. The connection is closed when it expires.
const HEAD: Duration = Duration::from_secs(10);
/// Idle time after which a connection is closed. The API server closes its connections earlier.
const IDLE: Duration = Duration::from_secs(180);
/// Maximum bytes and headers of a request's head: the API server forwards all groups of a user,
/// which may be hundreds.
const MAX_HEAD: usize = 64 << 10;
const MAX_HEADERS: usize = 1000;
/// Maximum concurrent requests of one HTTP/2 connection; the API server opens another connection
/// for more.
const MAX_STREAMS: u32 = 128;
/// Maximum bytes of all bodies in memory; further bodies wait.
const MAX_BODIES: usize = 64 << 20;
/// Interval of keepalive pings to an idle HTTP/2 client, and time for its response.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(20));
/// Time to deliver responses when a connection is closed.
const GRACE: Duration = Duration::from_secs(1);

/// Limits that depend on the service.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum bytes of a request's body, at most 64 MiB.
    pub body: usize,
    /// Maximum time from the end of a request's head to its response.
    pub request: Duration,
}

/// Creates the response to a request that exceeds the limits: 413 for a body that is too large, 400
/// for an incomplete body, 408 for a request that takes too long; with a message.
pub type Refuse = fn(StatusCode, String) -> Response;

/// Serves `routes` until draining begins and the running requests are complete, or until the
/// process ends. Each request has the extension [`ClientChain`](super::tls::ClientChain).
pub async fn serve(
    incoming: impl Stream<Item = io::Result<Connection>> + Unpin,
    routes: Router,
    limits: Limits,
    shutdown: Shutdown,
) {
    serve_with(incoming, routes, limits, refused, shutdown).await;
}

/// Like [`serve`], with the caller's own format of responses to requests that exceed the limits.
pub async fn serve_with(
    mut incoming: impl Stream<Item = io::Result<Connection>> + Unpin,
    routes: Router,
    limits: Limits,
    refuse: Refuse,
    shutdown: Shutdown,
) {
    let bodies = Arc::new(Semaphore::new(MAX_BODIES));
    // axum's own limit would be a second one.
    let routes = routes
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn_with_state(Bounds { limits, bodies, refuse }, within_bounds));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            next = incoming.next() => match next {
                Some(Ok(connection)) => {
                    connections.spawn(serve_connection(connection, routes.clone(), limits, shutdown.clone()));
                }
                Some(Err(error)) => tracing::debug!(%error, "failed to accept a connection"),
                None => break,
            },
            Some(_) = connections.join_next() => {}
        }
    }
    while connections.join_next().await.is_some() {}
}

/// Serves one connection until it ends.
async fn serve_connection(
    connection: Connection,
    routes: Router,
    limits: Limits,
    shutdown: Shutdown,
) {
    let (activity, seen) = watch::channel(Activity::default());
    let chain = Extension(connection.client_chain());
    let routes = routes.layer(chain).layer(from_fn_with_state(activity, track));
    let served = builder();
    let served = served.serve_connection(
        TokioIo::new(connection),
        TowerToHyperService::new(routes.into_service()),
    );
    let mut served = pin!(served);
    tokio::select! {
        ended = served.as_mut() => return log_end(ended),
        () = idle(seen) => {}
        () = shutdown.draining() => {}
    }
    served.as_mut().graceful_shutdown();
    tokio::select! {
        ended = served => log_end(ended),
        () = sleep(limits.request + GRACE) => {}
        () = shutdown.overdue() => {}
    }
}

fn builder() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(MAX_HEAD as u32)
        .max_concurrent_streams(MAX_STREAMS)
        .keep_alive_interval(KEEPALIVE.0)
        .keep_alive_timeout(KEEPALIVE.1);
    builder
}

fn log_end(ended: Result<(), Box<dyn std::error::Error + Send + Sync>>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection failed");
    }
}

/// The use of a connection.
#[derive(Debug, Default, Clone, Copy)]
struct Activity {
    /// Requests in progress.
    running: usize,
    /// Whether there was any request.
    any: bool,
}

/// One request in progress.
struct Running(watch::Sender<Activity>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|activity| activity.running = activity.running.saturating_sub(1));
    }
}

async fn track(
    State(activity): State<watch::Sender<Activity>>,
    request: Request,
    next: Next,
) -> Response {
    activity.send_modify(|now| *now = Activity { running: now.running + 1, any: true });
    let _running = Running(activity);
    next.run(request).await
}

/// Waits until a connection is idle.
async fn idle(mut activity: watch::Receiver<Activity>) {
    loop {
        let now = *activity.borrow_and_update();
        let patience = if now.any { IDLE } else { HEAD };
        tokio::select! {
            () = sleep(patience), if now.running == 0 => return,
            // An error means that the connection has ended.
            changed = activity.changed() => if changed.is_err() { std::future::pending().await },
        }
    }
}

#[derive(Debug, Clone)]
struct Bounds {
    limits: Limits,
    bodies: Arc<Semaphore>,
    refuse: Refuse,
}

/// Reads the body before the handler runs, and enforces the time limit.
async fn within_bounds(State(bounds): State<Bounds>, request: Request, next: Next) -> Response {
    let limits = bounds.limits;
    let answered = async {
        let (head, body) = request.into_parts();
        match collect(body, &bounds).await {
            // The body's memory permit is released after the response.
            Ok((body, _taken)) => next.run(Request::from_parts(head, body.into())).await,
            Err(response) => response,
        }
    };
    match timeout(limits.request, answered).await {
        Ok(response) => response,
        Err(_) => (bounds.refuse)(
            StatusCode::REQUEST_TIMEOUT,
            format!("the request did not complete within {:?}", limits.request),
        ),
    }
}

type Taken = Option<OwnedSemaphorePermit>;

async fn collect(body: Body, bounds: &Bounds) -> Result<(Bytes, Taken), Response> {
    let most = bounds.limits.body;
    let mut pieces = body.into_data_stream();
    let (mut whole, mut taken): (Vec<u8>, Taken) = (Vec::new(), None);
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| {
            (bounds.refuse)(StatusCode::BAD_REQUEST, format!("the body is incomplete: {error}"))
        })?;
        let room = most.saturating_sub(whole.len());
        let (true, Ok(bytes)) = (piece.len() <= room, u32::try_from(piece.len())) else {
            let message = format!("the body is larger than {most} bytes");
            return Err((bounds.refuse)(StatusCode::PAYLOAD_TOO_LARGE, message));
        };
        // The semaphore is never closed.
        if let Ok(more) = bounds.bodies.clone().acquire_many_owned(bytes).await {
            match &mut taken {
                Some(taken) => taken.merge(more),
                None => taken = Some(more),
            }
        }
        whole.extend_from_slice(&piece);
    }
    Ok((whole.into(), taken))
}

fn refused(code: StatusCode, message: String) -> Response {
    (code, format!("{message}\n")).into_response()
}

#[cfg(test)]
mod tests {
    use axum::routing::{get, post};
    use rcgen::{CertificateParams, KeyPair};
    use rustls::pki_types::ServerName;
    use tempfile::TempDir;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::sync::Notify;
    use tokio::task::JoinHandle;
    use tokio::time::Instant;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::client::TlsStream;

    use super::*;
    use crate::kubernetes::tls::{self, Certificates};
    use crate::telemetry::shutdown::Phase;

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
        let command = <tls::Args as clap::Args>::augment_args(clap::Command::new("x"));
        let matches = command.try_get_matches_from(["x"]).unwrap();
        let args = <tls::Args as clap::FromArgMatches>::from_arg_matches(&matches).unwrap();
        let (phase, shutdown) = Shutdown::manual();
        let listener = tls::listen(0).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let config = tls::server_config(&args, certificates, tls::HTTPS).unwrap();
        let slow = Arc::new(Notify::new());
        let begun = slow.clone();
        let routes =
            Router::new().route("/", post(async |body: Bytes| body.len().to_string())).route(
                "/slow",
                get(async move || {
                    begun.notify_one();
                    sleep(Duration::from_millis(200)).await;
                }),
            );
        let incoming = tls::incoming(listener, config, shutdown.clone());
        let served = tokio::spawn(serve(incoming, routes, LIMITS, shutdown));
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
        drop(Running(activity.clone()));
        assert_eq!(activity.borrow().running, 0);
        waiting.abort();
    }
}
