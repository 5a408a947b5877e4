//! A client of the API server with a rate limit and timeouts. No answer is older than
//! [`MAX_STALENESS`], and none takes longer to fail, if a connection breaks without a sign, as when
//! a firewall drops its state: the server ends each watch after [`WATCH`], so that a connection
//! without a byte for [`SILENCE`] is broken, and only connections of the last [`POOL_IDLE`] are used
//! again. The kernel's keepalive notices a dead peer earlier.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::Context as _;
use axum::http::{Request, Response, Uri};
use hyper::rt::{Read, Write};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::legacy::connect::{Connection, HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use kube::client::retry::RetryPolicy;
use kube::client::{Body, ConfigExt};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout};
use tower::retry::{Policy, RetryLayer};
use tower::{BoxError, Layer, Service, ServiceBuilder};

use super::proxy;

/// Timeout of connecting, with the TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Seconds after which the API server ends a watch. The next one continues it.
pub const WATCH: u32 = 20;
/// Time without a byte of the server, in a response or before it, after which a connection is
/// broken. Longer than [`WATCH`] and than any call.
pub const SILENCE: Duration = Duration::from_secs(23);
/// Time for which an unused connection is kept.
const POOL_IDLE: Duration = Duration::from_secs(10);
/// The documented bound: a new watch may have to connect after the silence.
pub const MAX_STALENESS: Duration = Duration::from_secs(30);
const _: () = assert!(
    WATCH as u64 + 2 < SILENCE.as_secs()
        && SILENCE.as_secs() + CONNECT_TIMEOUT.as_secs() < MAX_STALENESS.as_secs()
        && POOL_IDLE.as_secs() + super::cache::CALL_TIMEOUT.as_secs() < MAX_STALENESS.as_secs()
);
/// Keepalive of TCP: the idle time before the first probe, the interval, and the number of probes
/// without an answer; and the time for which sent data may be unacknowledged.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(5), Duration::from_secs(5), 2);
const USER_TIMEOUT: Duration = Duration::from_secs(15);

/// The flags of a role that uses the API server.
#[derive(Debug, Clone, clap::Args)]
// The default name, `Args`, would collide with the group of the struct that flattens this one.
#[group(skip)]
pub struct Args {
    /// Kubeconfig file; otherwise the pod's ServiceAccount is used
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Maximum requests per second to the API server
    #[arg(long, default_value_t = 50.0, value_parser = per_second, value_name = "N")]
    pub kube_api_qps: f64,

    /// Maximum burst of requests to the API server
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    pub kube_api_burst: u32,
}

impl Args {
    /// [`connect`] with these flags. Each client has its own rate limit.
    pub async fn connect(&self) -> anyhow::Result<Client> {
        connect(self.kubeconfig.as_deref(), self.rate()).await
    }

    /// [`connect_as_user`] with these flags.
    pub async fn connect_as_user(&self) -> anyhow::Result<Client> {
        connect_as_user(self.kubeconfig.as_deref(), self.rate()).await
    }

    fn rate(&self) -> Rate {
        Rate { per_second: self.kube_api_qps, burst: self.kube_api_burst }
    }
}

/// A rate limit of calls to the API server, the flags --kube-api-qps and --kube-api-burst.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// Calls per second, greater than 0.
    pub per_second: f64,
    /// Calls at once after a pause, at least 1.
    pub burst: u32,
}

/// Parses [`Rate::per_second`] on the command line.
pub fn per_second(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if (1e-3..=1e6).contains(&rate) => Ok(rate),
        _ => Err("must be a number from 0.001 to 1000000".into()),
    }
}

/// A client for the cluster of `kubeconfig`, or of the pod that this process runs in.
///
/// # Errors
/// No usable configuration.
pub async fn connect(kubeconfig: Option<&Path>, rate: Rate) -> anyhow::Result<Client> {
    let config = match kubeconfig {
        Some(path) => read(path, None).await?,
        None => Config::incluster()
            .map_err(anyhow::Error::from)
            .and_then(|config| with_proxy(config, None))
            .context("not running in a pod (no ServiceAccount is mounted); use --kubeconfig")?,
    };
    build(config, rate)
}

/// A client for an interactive command. It takes the cluster from `kubeconfig`, or like kubectl
/// from the variable KUBECONFIG, ~/.kube/config or the pod.
///
/// # Errors
/// No usable configuration.
pub async fn connect_as_user(user: impl Into<User<'_>>, rate: Rate) -> anyhow::Result<Client> {
    build(configured(user.into()).await?, rate)
}

/// Like [`connect_as_user`], for a caller that decides itself about retries.
///
/// # Errors
/// No usable configuration.
pub async fn connect_as_user_once(user: User<'_>, rate: Rate) -> anyhow::Result<Client> {
    let mut config = configured(user).await?;
    config.default_retry = false;
    build(config, rate)
}

/// Which configuration of a user to use.
#[derive(Debug, Clone, Copy, Default)]
pub struct User<'a> {
    /// The file; otherwise KUBECONFIG or ~/.kube/config is used, or the pod's ServiceAccount.
    pub kubeconfig: Option<&'a Path>,
    /// The context; otherwise the current one is used.
    pub context: Option<&'a str>,
}

impl<'a> From<Option<&'a Path>> for User<'a> {
    fn from(kubeconfig: Option<&'a Path>) -> Self {
        Self { kubeconfig, context: None }
    }
}

impl User<'_> {
    /// The namespace of the context, as kubectl uses it without `-n`.
    ///
    /// # Errors
    /// No usable configuration.
    pub fn namespace(self) -> anyhow::Result<String> {
        const DEFAULT: &str = "default";
        let kubeconfig = match (self.kubeconfig, Kubeconfig::read()) {
            (Some(path), _) => Kubeconfig::read_from(path)
                .with_context(|| format!("--kubeconfig {}", path.display()))?,
            (None, Ok(kubeconfig)) => kubeconfig,
            (None, Err(error)) => match Config::incluster() {
                Ok(config) => return Ok(config.default_namespace),
                Err(_) => {
                    let named = "no cluster is configured; use --kubeconfig";
                    return Err(anyhow::Error::from(error).context(named));
                }
            },
        };
        let kubeconfig = in_context(kubeconfig, self.context)?;
        let current = kubeconfig.current_context.unwrap_or_default();
        let context = kubeconfig.contexts.into_iter().find(|context| context.name == current);
        let namespace = context.and_then(|context| context.context?.namespace);
        Ok(namespace.filter(|name| !name.is_empty()).unwrap_or_else(|| DEFAULT.to_owned()))
    }
}

/// The configuration with this context as the current one.
fn in_context(mut kubeconfig: Kubeconfig, context: Option<&str>) -> anyhow::Result<Kubeconfig> {
    if let Some(context) = context {
        let is_known = kubeconfig.contexts.iter().any(|known| known.name == context);
        anyhow::ensure!(is_known, "--context: the kubeconfig has no context {context:?}");
        kubeconfig.current_context = Some(context.to_owned());
    }
    Ok(kubeconfig)
}

async fn configured(user: User<'_>) -> anyhow::Result<Config> {
    match user.kubeconfig {
        Some(path) => read(path, user.context).await,
        None => infer(user.context).await.context("no cluster is configured; use --kubeconfig"),
    }
}

async fn infer(context: Option<&str>) -> anyhow::Result<Config> {
    match Kubeconfig::read() {
        Ok(kubeconfig) => load(in_context(kubeconfig, context)?).await,
        Err(error) => match Config::incluster() {
            Ok(config) => with_proxy(config, None),
            Err(_) => Err(error.into()),
        },
    }
}

async fn read(path: &Path, context: Option<&str>) -> anyhow::Result<Config> {
    let named = || format!("--kubeconfig {}", path.display());
    let kubeconfig = Kubeconfig::read_from(path).with_context(named)?;
    load(in_context(kubeconfig, context)?).await.with_context(named)
}

async fn load(kubeconfig: Kubeconfig) -> anyhow::Result<Config> {
    let given = proxy::given(&kubeconfig);
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options).await?;
    with_proxy(config, given.as_deref())
}

/// kube looks up the proxy in NO_PROXY instead of the server, and ignores both variables in a pod.
fn with_proxy(mut config: Config, given: Option<&str>) -> anyhow::Result<Config> {
    config.proxy_url = proxy::of(&config.cluster_url, given)?;
    Ok(config)
}

fn build(config: Config, rate: Rate) -> anyhow::Result<Client> {
    let mut tcp = HttpConnector::new();
    // TLS is a layer above.
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_keepalive(Some(KEEPALIVE.0));
    tcp.set_keepalive_interval(Some(KEEPALIVE.1));
    tcp.set_keepalive_retries(Some(KEEPALIVE.2));
    tcp.set_tcp_user_timeout(Some(USER_TIMEOUT));
    let built = match &config.proxy_url {
        None => client(&config, rate, tcp),
        Some(proxy) if proxy.scheme_str() == Some("https") => {
            let tls = config.rustls_https_connector_with_connector(tcp);
            tls.and_then(|tls| client(&config, rate, tunnel(proxy, tls)))
        }
        Some(proxy) => client(&config, rate, tunnel(proxy, tcp)),
    };
    built.context("failed to set up the API server's client")
}

/// A connector through the proxy.
fn tunnel<C>(proxy: &Uri, connector: C) -> Tunnel<C> {
    let tunnel = Tunnel::new(proxy.clone(), connector);
    match proxy::authorization(proxy) {
        Some(value) => tunnel.with_auth(value),
        None => tunnel,
    }
}

/// A client whose connections `connector` makes. Like that of kube, which can set none of these
/// timeouts.
fn client<C>(config: &Config, rate: Rate, connector: C) -> kube::Result<Client>
where
    C: Service<Uri> + Clone + Send + Sync + 'static,
    C::Response: Connection + Read + Write + Send + Unpin + 'static,
    C::Future: Send + 'static,
    C::Error: std::error::Error + Send + Sync + 'static,
{
    let tls = config.rustls_https_connector_with_connector(connector)?;
    let mut timed = TimeoutConnector::new(tls);
    timed.set_connect_timeout(Some(CONNECT_TIMEOUT));
    timed.set_read_timeout(Some(SILENCE));
    timed.set_write_timeout(Some(SILENCE));
    // A request begins a new silence.
    timed.set_reset_reader_on_write(true);
    let http: legacy::Client<_, Body> = legacy::Builder::new(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(POOL_IDLE)
        .build(timed);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.default_retry.then(|| RetryLayer::new(Retries::default())))
        // Each attempt takes a turn.
        .layer(Throttle::new(rate))
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(service, config.default_namespace.clone()))
}

/// Whether the request starts a watch.
fn is_watch<B>(request: &Request<B>) -> bool {
    let query = request.uri().query().unwrap_or_default();
    query.split('&').any(|part| part == "watch=true")
}

/// Retries calls that the API server defers (429, 503, 504), except watches: a watch that does not
/// start must be noticed.
#[derive(Clone)]
struct Retries(RetryPolicy);

impl Default for Retries {
    fn default() -> Self {
        Self(RetryPolicy::server_retry())
    }
}

impl<B> Policy<Request<Body>, Response<B>, BoxError> for Retries {
    type Future = Sleep;

    fn retry(
        &mut self,
        request: &mut Request<Body>,
        result: &mut Result<Response<B>, BoxError>,
    ) -> Option<Sleep> {
        self.0.retry(request, result)
    }

    fn clone_request(&mut self, request: &Request<Body>) -> Option<Request<Body>> {
        if is_watch(request) {
            return None;
        }
        Policy::<Request<Body>, Response<B>, BoxError>::clone_request(&mut self.0, request)
    }
}

/// Maximum time that a call waits for its turn. Calls that would wait longer are rejected and take
/// no turn, so a burst ends when its calls end.
pub const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// Delay of a rejection, so that a caller who retries at once costs no more than a waiting one.
const REJECTION_DELAY: Duration = Duration::from_secs(1);

/// A call was rejected because it would have waited too long for its turn.
#[derive(Debug, thiserror::Error)]
#[error("too many calls to the API server are waiting; increase --kube-api-qps")]
pub struct Overloaded;

/// Enforces a rate. Calls over the rate wait, or are rejected. Watches do not count: one that waits
/// would delay what it reports.
#[derive(Debug, Clone)]
struct Throttle {
    rate: Rate,
    /// When all accepted calls will be done and the bucket is full again.
    full_at: Arc<Mutex<Instant>>,
}

impl Throttle {
    fn new(rate: Rate) -> Self {
        Self { rate, full_at: Arc::new(Mutex::new(Instant::now())) }
    }

    /// Books one call and returns its start time.
    fn book(&self, now: Instant) -> Result<Instant, Overloaded> {
        let each = Duration::from_secs_f64(1.0 / self.rate.per_second);
        let ahead = each * self.rate.burst.saturating_sub(1);
        let mut full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = (*full_at).max(now);
        let at = slot.checked_sub(ahead).map_or(now, |at| at.max(now));
        if at - now > LONGEST_WAIT {
            return Err(Overloaded);
        }
        *full_at = slot + each;
        Ok(at)
    }

    fn give_back(&self) {
        let each = Duration::from_secs_f64(1.0 / self.rate.per_second);
        let mut full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        *full_at = full_at.checked_sub(each).unwrap_or(*full_at);
    }
}

/// A booked call. If it is dropped before its turn, later calls get the turn: otherwise callers who
/// give up would use up the rate.
struct Booking {
    throttle: Throttle,
    turn: Instant,
    used: bool,
}

impl Booking {
    async fn turn(mut self) {
        sleep_until(self.turn).await;
        self.used = true;
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        if !self.used {
            self.throttle.give_back();
        }
    }
}

impl<S> Layer<S> for Throttle {
    type Service = Throttled<S>;

    fn layer(&self, inner: S) -> Throttled<S> {
        Throttled { inner, throttle: self.clone() }
    }
}

#[derive(Debug, Clone)]
struct Throttled<S> {
    inner: S,
    throttle: Throttle,
}

impl<S, B> Service<Request<B>> for Throttled<S>
where
    S: Service<Request<B>>,
    S::Future: Send + 'static,
    S::Response: 'static,
    S::Error: Into<BoxError> + 'static,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, BoxError>> + Send + 'static>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let now = Instant::now();
        let booking = match is_watch(&request) {
            true => Ok(None),
            false => self
                .throttle
                .book(now)
                .map(|turn| Some(Booking { throttle: self.throttle.clone(), turn, used: false })),
        };
        // The call does not start before its future is polled.
        let call = self.inner.call(request);
        Box::pin(async move {
            match booking {
                Ok(Some(booking)) => booking.turn().await,
                Ok(None) => {}
                Err(overloaded) => {
                    sleep(REJECTION_DELAY).await;
                    return Err(overloaded.into());
                }
            }
            call.await.map_err(Into::into)
        })
    }
}

/// A call to the API server with a timeout.
pub async fn within<T>(
    limit: Duration,
    call: impl Future<Output = kube::Result<T>>,
) -> kube::Result<T> {
    match timeout(limit, call).await {
        Ok(answer) => answer,
        Err(_) => {
            let limit = limit.as_secs();
            Err(kube::Error::Service(
                format!("the API server did not respond within {limit} s").into(),
            ))
        }
    }
}

/// Why a call to the API server failed, for this program's caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Whether this program's ServiceAccount lacks a permission, so that a retry does not help.
    pub lacks_permission: bool,
    pub message: String,
}

/// Describes a failed call. `doing` is its purpose, `who` the role. The API server's message may
/// quote what was sent to it, so only the kind of error is reported.
pub fn failure(who: &str, doing: &str, error: &kube::Error) -> Failure {
    match error {
        kube::Error::Api(status) if matches!(status.code, 401 | 403) => Failure {
            lacks_permission: true,
            message: format!(
                "the ServiceAccount of the {who} may not {doing} ({}); grant the permission in its ClusterRole",
                status.code
            ),
        },
        kube::Error::Api(status) => transient(format!(
            "failed to {doing}: the API server returned {}; retry later",
            status.code
        )),
        error if is_overloaded(error) => transient(format!(
            "failed to {doing}: too many calls to the API server are waiting; retry later, or increase --kube-api-qps"
        )),
        _ => transient(format!("failed to {doing}: the API server cannot be reached; retry later")),
    }
}

fn transient(message: String) -> Failure {
    Failure { lacks_permission: false, message }
}

/// The result of a call, where these HTTP statuses count as success.
pub fn tolerate<T>(outcome: kube::Result<T>, codes: &[u16]) -> kube::Result<()> {
    match outcome {
        Err(kube::Error::Api(status)) if codes.contains(&status.code) => Ok(()),
        outcome => outcome.map(drop),
    }
}

/// Whether this process's own rate limit rejected the call.
pub fn is_overloaded(error: &kube::Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if error.is::<Overloaded>() {
            return true;
        }
        cause = error.source();
    }
    false
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
