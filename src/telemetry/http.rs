//! `--http-endpoint`: health for a probe and metrics for Prometheus, at the same paths in every role. Plain HTTP, nothing secret on
//! it. Every client that reaches the port is served, and a check can hang with a disk, so everything
//! has a bound: connections, the time that each may take, and threads ([`Alone`]).

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
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::accept::Accepting;
use super::alone::{Alone, NoResult};
use super::shutdown::Shutdown;

/// How long a health check may take before it counts as failed, and a scrape.
const ANSWER_DEADLINE: Duration = short_in_tests(Duration::from_secs(5));
/// How long a client may take for the head of its request.
const HEAD: Duration = short_in_tests(Duration::from_secs(10));
/// The longest life of a connection, which is for one request.
const CONNECTION: Duration = Duration::from_secs(30);
/// Connections at once; while there are so many, further clients wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 64;
/// Bytes of a request's head.
const MAX_HEAD: usize = 16 << 10;

const fn short_in_tests(time: Duration) -> Duration {
    if cfg!(test) { Duration::from_millis(200) } else { time }
}

/// Says what is wrong, or nothing. May block.
pub type HealthCheck = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// Where to listen: `host:port`, or `:port` for every address of the machine.
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

/// The text of a scrape. May block.
pub type Scrape = Arc<dyn Fn() -> Result<String, fmt::Error> + Send + Sync>;

/// Where health is: as on most of Kubernetes, and as the released sidecar has it.
pub const HEALTH_PATHS: [&str; 2] = ["/healthz", "/health"];

/// What is served.
pub struct Pages {
    /// At [`HEALTH_PATHS`].
    pub health: HealthCheck,
    /// The path, and what stands there.
    pub metrics: Option<(String, Scrape)>,
    /// Checks at paths of their own, which say nothing of health.
    pub checks: Vec<(&'static str, HealthCheck)>,
}

impl Pages {
    /// Health, and metrics at `/metrics`.
    pub fn new(health: HealthCheck, scrape: Scrape) -> Self {
        Self { health, metrics: Some(("/metrics".into(), scrape)), checks: Vec::new() }
    }
}

/// Finds out whether an endpoint that flags ask for can be had, and does not keep it.
///
/// # Errors
/// It cannot be had.
pub async fn try_listen(endpoint: Option<&Endpoint>) -> anyhow::Result<()> {
    match endpoint {
        Some(endpoint) => endpoint.listen().await.map(drop).context("--http-endpoint"),
        None => Ok(()),
    }
}

/// Listens at `endpoint` and serves until the process ends; returns the address, which has the port
/// that was chosen when the endpoint's was 0.
///
/// # Errors
/// The endpoint cannot be had.
pub async fn start(
    endpoint: &Endpoint,
    pages: Pages,
    shutdown: Shutdown,
) -> io::Result<SocketAddr> {
    let listener = endpoint.listen().await?;
    let address = listener.local_addr()?;
    let Pages { health, metrics, checks } = pages;
    let health = Alone::new(health);
    let checks = checks.into_iter().map(|(path, check)| (path, Alone::new(check)));
    let mut routes = Router::new();
    for (path, check) in checks.chain(HEALTH_PATHS.map(|path| (path, health.clone()))) {
        routes = routes.route(path, get(move || healthz(check.clone())));
    }
    if let Some((path, scrape)) = metrics {
        let scrape = Alone::new(scrape);
        routes = routes.route(&path, get(move || scraped(scrape.clone())));
    }
    tokio::spawn(async move {
        tokio::select! {
            () = serve(listener, routes) => {}
            () = shutdown.ending() => {}
        }
    });
    Ok(address)
}

async fn serve(listener: TcpListener, routes: Router) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut accepting = Accepting::default();
    // Nobody closes it.
    while let Ok(place) = places.clone().acquire_owned().await {
        let stream = accepting.next(&listener).await;
        let routes = routes.clone();
        tokio::spawn(async move {
            if timeout(CONNECTION, attend(stream, routes)).await.is_err() {
                tracing::debug!("closing a connection that took too long");
            }
            drop(place);
        });
    }
}

async fn attend(stream: TcpStream, routes: Router) {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD);
    builder.max_buf_size(MAX_HEAD).keep_alive(false);
    let served = builder
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes.into_service()));
    if let Err(error) = served.await {
        tracing::debug!(%error, "a connection broke");
    }
}

async fn healthz(health: Alone<Result<(), String>>) -> Response {
    match health.result(ANSWER_DEADLINE).await {
        Ok(Ok(())) => (StatusCode::OK, "ok\n").into_response(),
        Ok(Err(reason)) => unavailable(&reason),
        Err(NoResult::Failed) => unavailable("the health check panicked"),
        Err(NoResult::Late) => unavailable("the health check did not answer in time"),
    }
}

fn unavailable(reason: &str) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response()
}

async fn scraped(scrape: Alone<Result<String, fmt::Error>>) -> Response {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match scrape.result(ANSWER_DEADLINE).await {
        Ok(Ok(body)) => ([(header::CONTENT_TYPE, OPEN_METRICS)], body).into_response(),
        Ok(Err(_)) | Err(NoResult::Failed) => {
            (StatusCode::INTERNAL_SERVER_ERROR, "collecting metrics failed\n").into_response()
        }
        Err(NoResult::Late) => unavailable("the metrics were not collected in time"),
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
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    fn pages(health: HealthCheck) -> Pages {
        let scrape: Scrape = Arc::new(|| Ok("# EOF\n".into()));
        Pages::new(health, scrape)
    }

    #[tokio::test]
    async fn health_answers_200_or_503_with_the_reason() {
        let (end, shutdown) = Shutdown::by_hand();
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
        let answer = fetch(address, "/healthz").await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("the pool is gone"));
        drop(end);
    }

    /// In a runtime where one thread may block, which has to stay free for calls.
    fn with_one_blocking_thread(test: impl Future<Output = ()>) {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(2).max_blocking_threads(1).enable_all().build();
        runtime.unwrap().block_on(test);
    }

    #[test]
    fn a_check_that_hangs_takes_one_thread_and_none_of_those_for_calls() {
        with_one_blocking_thread(async {
            let (let_go, hangs) = std::sync::mpsc::channel::<()>();
            let hangs = std::sync::Mutex::new(hangs);
            let runs = Arc::new(AtomicUsize::new(0));
            let counted = runs.clone();
            let health: HealthCheck = Arc::new(move || {
                counted.fetch_add(1, Ordering::Relaxed);
                let _ = hangs.lock().unwrap().recv();
                Ok(())
            });
            let (_end, shutdown) = Shutdown::by_hand();
            let endpoint = "127.0.0.1:0".parse().unwrap();
            let address = start(&endpoint, pages(health), shutdown).await.unwrap();
            for _ in 0..3 {
                let at_once: JoinSet<String> =
                    (0..20).map(|_| fetch(address, "/healthz")).collect();
                for answer in at_once.join_all().await {
                    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("in time"));
                }
                let call = tokio::task::spawn_blocking(|| ());
                timeout(Duration::from_secs(20), call).await.expect("a thread for a call").unwrap();
                assert!(fetch(address, "/metrics").await.contains("# EOF"));
            }
            assert_eq!(runs.load(Ordering::Relaxed), 1);
            drop(let_go);
            while !fetch(address, "/healthz").await.starts_with("HTTP/1.1 200") {}
        });
    }

    #[tokio::test]
    async fn a_scrape_that_hangs_is_answered_in_time() {
        let (let_go, hangs) = std::sync::mpsc::channel::<()>();
        let hangs = std::sync::Mutex::new(hangs);
        let scrape: Scrape = Arc::new(move || {
            let _ = hangs.lock().unwrap().recv();
            Ok("# EOF\n".into())
        });
        let pages = Pages::new(Arc::new(|| Ok(())), scrape);
        let (_end, shutdown) = Shutdown::by_hand();
        let address = start(&"127.0.0.1:0".parse().unwrap(), pages, shutdown).await.unwrap();
        assert!(fetch(address, "/metrics").await.starts_with("HTTP/1.1 503"));
        assert!(fetch(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        drop(let_go);
        while !fetch(address, "/metrics").await.contains("# EOF") {}
    }

    #[tokio::test]
    async fn clients_that_say_nothing_are_few_and_do_not_stay() {
        let (_end, shutdown) = Shutdown::by_hand();
        let pages = pages(Arc::new(|| Ok(())));
        let address = start(&"127.0.0.1:0".parse().unwrap(), pages, shutdown).await.unwrap();
        let mut silent = Vec::new();
        for number in 0..2 * MAX_CONNECTIONS {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let begun: &[u8] = if number % 2 == 0 { b"" } else { b"GET /healthz HTTP/1.1\r\nHo" };
            stream.write_all(begun).await.unwrap();
            silent.push(stream);
        }
        // After them in the queue.
        assert!(fetch(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        for mut stream in silent {
            // Closed, with an answer or without one.
            let _ = stream.read_to_string(&mut String::new()).await;
        }
    }
}
