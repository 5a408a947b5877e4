//! `--http-endpoint`: health for a probe and metrics for Prometheus, at the paths that the role has always
//! had. Plain HTTP, nothing secret on it.

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
use tokio::net::TcpListener;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::shutdown::Shutdown;

/// How long a health check may take before it counts as failed.
const HEALTH_DEADLINE: Duration = Duration::from_secs(5);

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

/// What is served, and where.
pub struct Pages {
    pub health_path: &'static str,
    pub health: HealthCheck,
    /// The path, and what stands there.
    pub metrics: Option<(String, Scrape)>,
}

/// Checks at paths of their own, which say nothing of health.
pub type Checks = Vec<(&'static str, HealthCheck)>;

/// Listens at `endpoint` and serves until the process ends; returns the address, which has the port
/// that was chosen when the endpoint's was 0.
pub async fn start(
    endpoint: &Endpoint,
    pages: Pages,
    shutdown: Shutdown,
) -> io::Result<SocketAddr> {
    start_with(endpoint, pages, Checks::new(), shutdown).await
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

/// `/healthz` and `/metrics` of a role on a node, where its flags ask for them.
///
/// # Errors
/// The endpoint cannot be had.
pub async fn start_if_asked(
    endpoint: Option<&Endpoint>,
    health: HealthCheck,
    scrape: Scrape,
    shutdown: &Shutdown,
) -> anyhow::Result<()> {
    let Some(endpoint) = endpoint else { return Ok(()) };
    let metrics = Some(("/metrics".into(), scrape));
    let pages = Pages { health_path: "/healthz", health, metrics };
    let address = start(endpoint, pages, shutdown.clone()).await.context("--http-endpoint")?;
    tracing::info!(%address, "serving /healthz and /metrics");
    Ok(())
}

/// The same as [`start`] with more checks, at paths that the pages do not have.
pub async fn start_with(
    endpoint: &Endpoint,
    pages: Pages,
    checks: Checks,
    shutdown: Shutdown,
) -> io::Result<SocketAddr> {
    let listener = endpoint.listen().await?;
    let address = listener.local_addr()?;
    let Pages { health_path, health, metrics } = pages;
    let mut routes = Router::new();
    for (path, check) in checks.into_iter().chain([(health_path, health)]) {
        routes = routes.route(path, get(move || healthz(check.clone())));
    }
    if let Some((path, scrape)) = metrics {
        routes = routes.route(&path, get(move || scraped(scrape.clone())));
    }
    tokio::spawn(async move {
        let ended = async move { shutdown.ending().await };
        if let Err(error) = axum::serve(listener, routes).with_graceful_shutdown(ended).await {
            tracing::error!(%error, "the HTTP endpoint stopped");
        }
    });
    Ok(address)
}

async fn healthz(health: HealthCheck) -> Response {
    match timeout(HEALTH_DEADLINE, spawn_blocking(move || health())).await {
        Ok(Ok(Ok(()))) => (StatusCode::OK, "ok\n").into_response(),
        Ok(Ok(Err(reason))) => unhealthy(&reason),
        Ok(Err(_)) => unhealthy("the health check panicked"),
        Err(_) => unhealthy("the health check did not answer in time"),
    }
}

fn unhealthy(reason: &str) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response()
}

async fn scraped(scrape: Scrape) -> Response {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match spawn_blocking(move || scrape()).await {
        Ok(Ok(body)) => ([(header::CONTENT_TYPE, OPEN_METRICS)], body).into_response(),
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "collecting metrics failed\n").into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

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
        Pages { health_path: "/healthz", health, metrics: Some(("/metrics".into(), scrape)) }
    }

    #[tokio::test]
    async fn health_answers_200_or_503_with_the_reason() {
        let (end, shutdown) = Shutdown::by_hand();
        let endpoint = "127.0.0.1:0".parse().unwrap();
        let good = pages(Arc::new(|| Ok(())));
        let address = start(&endpoint, good, shutdown.clone()).await.unwrap();
        assert!(fetch(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        assert!(fetch(address, "/metrics").await.contains("# EOF"));
        assert!(fetch(address, "/other").await.starts_with("HTTP/1.1 404"));
        let bad = pages(Arc::new(|| Err("the pool is gone".into())));
        let address = start(&endpoint, bad, shutdown).await.unwrap();
        let answer = fetch(address, "/healthz").await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("the pool is gone"));
        drop(end);
    }
}
