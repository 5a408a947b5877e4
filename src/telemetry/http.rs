//! `--http-endpoint`: health for probes and metrics for Prometheus over plain HTTP, at the same
//! paths in every role, without secrets. Any client that reaches the port is served, and a check
//! can hang with a disk, so connections, their duration, and threads ([`SingleFlight`]) are
//! bounded.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::accept::BackoffAcceptor;
use super::fair_limit::{self, FairLimit, Labels};
use super::peer::Peer;
use super::process;
use super::shutdown::Shutdown;
use super::single_flight::{NoResult, SingleFlight};
use super::task;

/// Timeout of a health check, after which it fails, and of a scrape.
const CHECK_TIMEOUT: Duration = short_in_tests(Duration::from_secs(5));
/// Timeout for the headers of a request.
const HEADER_TIMEOUT: Duration = short_in_tests(Duration::from_secs(10));
/// Maximum duration of a connection, which serves one request.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum concurrent connections. A further one closes the oldest one of the client with the most.
const MAX_CONNECTIONS: usize = 64;
/// Maximum bytes of the headers of a request.
const MAX_HEADER_BYTES: usize = 16 << 10;

const fn short_in_tests(time: Duration) -> Duration {
    if cfg!(test) { Duration::from_millis(200) } else { time }
}

/// Returns the reason if the process is not healthy. May block.
pub type HealthCheck = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// Address to listen on: `host:port`, or `:port` for every address of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    host: Option<String>,
    port: u16,
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not host:port or :port, such as 127.0.0.1:9808");
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let port = port.parse().map_err(|_| wrong())?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        match bare.unwrap_or(host) {
            "" if bare.is_none() => Ok(Self { host: None, port }),
            name if name.is_empty() || name.contains(['/', '[', ']']) => Err(wrong()),
            name if name.contains(':') && bare.is_none() => Err(wrong()),
            name => Ok(Self { host: Some(name.to_owned()), port }),
        }
    }
}

impl Endpoint {
    async fn listen(&self) -> io::Result<TcpListener> {
        let port = self.port;
        match &self.host {
            Some(host) => TcpListener::bind((host.as_str(), port)).await,
            // A machine without IPv6 has no `[::]`.
            None => match TcpListener::bind(("::", port)).await {
                Ok(listener) => Ok(listener),
                Err(_) => TcpListener::bind(("0.0.0.0", port)).await,
            },
        }
    }
}

/// Returns the text of a scrape. May block.
pub type Scrape = Arc<dyn Fn() -> Result<String, fmt::Error> + Send + Sync>;

/// Paths of the health check: the usual one in Kubernetes, and the one of the released sidecar.
pub const HEALTH_PATHS: [&str; 2] = ["/healthz", "/health"];

/// The served pages.
pub struct Pages {
    /// At [`HEALTH_PATHS`].
    pub health: HealthCheck,
    /// The path and content of the metrics.
    pub metrics: Option<(String, Scrape)>,
    /// Checks at other paths, which do not affect health.
    pub checks: Vec<(&'static str, HealthCheck)>,
}

impl Pages {
    /// Health, and metrics at `/metrics`.
    pub fn new(health: HealthCheck, scrape: Scrape) -> Self {
        Self { health, metrics: Some(("/metrics".into(), scrape)), checks: Vec::new() }
    }
}

/// Checks whether the process can listen on the endpoint, and releases it again.
///
/// # Errors
/// The process cannot listen on the endpoint.
pub async fn try_listen(endpoint: Option<&Endpoint>) -> anyhow::Result<()> {
    match endpoint {
        Some(endpoint) => endpoint.listen().await.map(drop).context("--http-endpoint"),
        None => Ok(()),
    }
}

/// Listens on `endpoint` and serves until the process ends. Returns the address, which has the
/// chosen port if the port of the endpoint is 0.
///
/// # Errors
/// The process cannot listen on the endpoint.
pub async fn start(
    endpoint: &Endpoint,
    pages: Pages,
    shutdown: Shutdown,
) -> io::Result<SocketAddr> {
    let listener = endpoint.listen().await?;
    let address = listener.local_addr()?;
    let Pages { health, metrics, checks } = pages;
    let health = SingleFlight::new(health);
    let checks = checks.into_iter().map(|(path, check)| (path, SingleFlight::new(check)));
    let mut routes = Router::new();
    for (path, check) in checks.chain(HEALTH_PATHS.map(|path| (path, health.clone()))) {
        routes = routes.route(path, get(move || healthz(check.clone())));
    }
    if let Some((path, scrape)) = metrics {
        let whole: Scrape =
            Arc::new(move || Ok(process::scrape()? + &fair_limit::scrape()? + &scrape()?));
        let scrape = SingleFlight::new(whole);
        routes = routes.route(&path, get(move || metrics_page(scrape.clone())));
    }
    task::spawn(async move {
        tokio::select! {
            () = serve(listener, routes) => {}
            () = shutdown.ending() => {}
        }
    });
    Ok(address)
}

async fn serve(listener: TcpListener, routes: Router) {
    let labels = Labels { listener: "health", share: "connection" };
    let limit = FairLimit::new(labels, MAX_CONNECTIONS);
    let mut acceptor = BackoffAcceptor::default();
    loop {
        let stream = acceptor.next(&listener).await;
        let peer = stream.peer_addr().map_or_else(|_| Peer::unknown(), Peer::of);
        let share = limit.take(peer, 1);
        let routes = routes.clone();
        task::spawn(async move {
            tokio::select! {
                served = timeout(CONNECTION_TIMEOUT, serve_connection(stream, routes)) => {
                    if served.is_err() {
                        tracing::debug!("closing a connection after its maximum duration");
                    }
                }
                () = share.revoked() => tracing::debug!(?peer, "closed a connection to make room for other clients"),
            }
        });
    }
}

async fn serve_connection(stream: TcpStream, routes: Router) {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    builder.max_buf_size(MAX_HEADER_BYTES).keep_alive(false);
    let served = builder
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes.into_service()));
    if let Err(error) = served.await {
        tracing::debug!(%error, "connection failed");
    }
}

async fn healthz(health: SingleFlight<Result<(), String>>) -> Response {
    match health.result(CHECK_TIMEOUT).await {
        Ok(Ok(())) => (StatusCode::OK, "ok\n").into_response(),
        Ok(Err(reason)) => unavailable(&reason),
        Err(NoResult::Failed) => unavailable("the health check panicked"),
        Err(NoResult::TimedOut) => unavailable("the health check timed out"),
    }
}

fn unavailable(reason: &str) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response()
}

async fn metrics_page(scrape: SingleFlight<Result<String, fmt::Error>>) -> Response {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match scrape.result(CHECK_TIMEOUT).await {
        Ok(Ok(body)) => ([(header::CONTENT_TYPE, OPEN_METRICS)], body).into_response(),
        Ok(Err(_)) | Err(NoResult::Failed) => {
            (StatusCode::INTERNAL_SERVER_ERROR, "failed to collect the metrics\n").into_response()
        }
        Err(NoResult::TimedOut) => unavailable("collecting the metrics timed out"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::task::JoinSet;

    #[test]
    fn endpoints_are_host_and_port() {
        let endpoint = |host: Option<&str>, port| Endpoint { host: host.map(str::to_owned), port };
        let cases = [
            ("127.0.0.1:9808", endpoint(Some("127.0.0.1"), 9808)),
            (":9808", endpoint(None, 9808)),
            ("[::1]:0", endpoint(Some("::1"), 0)),
            ("localhost:1", endpoint(Some("localhost"), 1)),
        ];
        for (text, expected) in cases {
            assert_eq!(text.parse(), Ok(expected));
        }
        for text in ["", "9808", "localhost", "a:b", "::1:80", "[]:80", "http://x:80", ":65536"] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }

    async fn fetch(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response
    }

    fn pages(health: HealthCheck) -> Pages {
        let scrape: Scrape = Arc::new(|| Ok("# EOF\n".into()));
        Pages::new(health, scrape)
    }

    #[tokio::test]
    async fn health_is_200_or_503_with_the_reason() {
        let (end, shutdown) = Shutdown::manual();
        let endpoint = "127.0.0.1:0".parse().unwrap();
        let good = pages(Arc::new(|| Ok(())));
        let address = start(&endpoint, good, shutdown.clone()).await.unwrap();
        for path in HEALTH_PATHS {
            assert!(fetch(address, path).await.starts_with("HTTP/1.1 200"), "{path}");
        }
        assert!(fetch(address, "/metrics").await.contains("# EOF"));
        assert!(fetch(address, "/other").await.starts_with("HTTP/1.1 404"));
        let bad = pages(Arc::new(|| Err("the pool is gone".into())));
        let address = start(&endpoint, bad, shutdown).await.unwrap();
        let response = fetch(address, "/healthz").await;
        assert!(response.starts_with("HTTP/1.1 503") && response.contains("the pool is gone"));
        drop(end);
    }

    /// Runs a test in a runtime with one blocking thread, which must remain free for calls.
    fn with_one_blocking_thread(test: impl Future<Output = ()>) {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(2).max_blocking_threads(1).enable_all().build();
        runtime.unwrap().block_on(test);
    }

    #[test]
    fn a_hanging_check_blocks_no_thread_for_calls() {
        with_one_blocking_thread(async {
            let (release, hangs) = std::sync::mpsc::channel::<()>();
            let hangs = std::sync::Mutex::new(hangs);
            let runs = Arc::new(AtomicUsize::new(0));
            let counted = runs.clone();
            let health: HealthCheck = Arc::new(move || {
                counted.fetch_add(1, Ordering::Relaxed);
                let _ = hangs.lock().unwrap().recv();
                Ok(())
            });
            let (_end, shutdown) = Shutdown::manual();
            let endpoint = "127.0.0.1:0".parse().unwrap();
            let address = start(&endpoint, pages(health), shutdown).await.unwrap();
            for _ in 0..3 {
                let at_once: JoinSet<String> =
                    (0..20).map(|_| fetch(address, "/healthz")).collect();
                for response in at_once.join_all().await {
                    assert!(response.starts_with("HTTP/1.1 503") && response.contains("timed out"));
                }
                let call = tokio::task::spawn_blocking(|| ());
                timeout(Duration::from_secs(20), call).await.expect("a thread for a call").unwrap();
                assert!(fetch(address, "/metrics").await.contains("# EOF"));
            }
            assert_eq!(runs.load(Ordering::Relaxed), 1);
            drop(release);
            while !fetch(address, "/healthz").await.starts_with("HTTP/1.1 200") {}
        });
    }

    #[tokio::test]
    async fn a_hanging_scrape_times_out() {
        let (release, hangs) = std::sync::mpsc::channel::<()>();
        let hangs = std::sync::Mutex::new(hangs);
        let scrape: Scrape = Arc::new(move || {
            let _ = hangs.lock().unwrap().recv();
            Ok("# EOF\n".into())
        });
        let pages = Pages::new(Arc::new(|| Ok(())), scrape);
        let (_end, shutdown) = Shutdown::manual();
        let address = start(&"127.0.0.1:0".parse().unwrap(), pages, shutdown).await.unwrap();
        assert!(fetch(address, "/metrics").await.starts_with("HTTP/1.1 503"));
        assert!(fetch(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        drop(release);
        while !fetch(address, "/metrics").await.contains("# EOF") {}
    }

    #[tokio::test]
    async fn silent_clients_are_limited_and_disconnected() {
        let (_end, shutdown) = Shutdown::manual();
        let pages = pages(Arc::new(|| Ok(())));
        let address = start(&"127.0.0.1:0".parse().unwrap(), pages, shutdown).await.unwrap();
        let mut silent = Vec::new();
        for number in 0..2 * MAX_CONNECTIONS {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let begun: &[u8] = if number % 2 == 0 { b"" } else { b"GET /healthz HTTP/1.1\r\nHo" };
            stream.write_all(begun).await.unwrap();
            silent.push(stream);
        }
        assert!(fetch(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        for mut stream in silent {
            // Closed, with or without a response.
            let _ = stream.read_to_string(&mut String::new()).await;
        }
    }
}
