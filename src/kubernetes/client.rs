//! A client of the API server with a rate limit and timeouts.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::Context as _;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tower::{BoxError, Layer, Service};

/// Timeout of connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

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
        Some(path) => read(path).await?,
        None => Config::incluster()
            .context("not running in a pod (no ServiceAccount is mounted); use --kubeconfig")?,
    };
    build(config, rate)
}

/// A client for an interactive command. It takes the cluster from `kubeconfig`, or like kubectl
/// from the variable KUBECONFIG, ~/.kube/config or the pod.
///
/// # Errors
/// No usable configuration.
pub async fn connect_as_user(kubeconfig: Option<&Path>, rate: Rate) -> anyhow::Result<Client> {
    build(configured(kubeconfig).await?, rate)
}

/// Like [`connect_as_user`], for a caller that decides itself about retries.
///
/// # Errors
/// No usable configuration.
pub async fn connect_as_user_once(kubeconfig: Option<&Path>, rate: Rate) -> anyhow::Result<Client> {
    let mut config = configured(kubeconfig).await?;
    config.default_retry = false;
    build(config, rate)
}

async fn configured(kubeconfig: Option<&Path>) -> anyhow::Result<Config> {
    match kubeconfig {
        Some(path) => read(path).await,
        None => Config::infer().await.context("no cluster is configured; use --kubeconfig"),
    }
}

async fn read(path: &Path) -> anyhow::Result<Config> {
    let named = || format!("--kubeconfig {}", path.display());
    let kubeconfig = Kubeconfig::read_from(path).with_context(named)?;
    let options = KubeConfigOptions::default();
    Config::from_custom_kubeconfig(kubeconfig, &options).await.with_context(named)
}

fn build(mut config: Config, rate: Rate) -> anyhow::Result<Client> {
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    let builder =
        ClientBuilder::try_from(config).context("failed to set up the API server's client")?;
    Ok(builder.with_layer(&Throttle::new(rate)).build())
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

/// Enforces a rate. Calls over the rate wait, or are rejected.
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

impl<S, R> Service<R> for Throttled<S>
where
    S: Service<R>,
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

    fn call(&mut self, request: R) -> Self::Future {
        let turn = self.throttle.book(Instant::now());
        // The call does not start before its future is polled.
        let call = self.inner.call(request);
        Box::pin(async move {
            match turn {
                Ok(turn) => sleep_until(turn).await,
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
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_burst_passes_at_once_and_then_the_rate_applies() {
        let throttle = Throttle::new(Rate { per_second: 10.0, burst: 3 });
        let now = Instant::now();
        let waits: Vec<_> =
            (0..5).map(|_| (throttle.book(now).unwrap() - now).as_millis()).collect();
        assert_eq!(waits, [0, 0, 0, 100, 200]);
        // After a pause the burst is available again, but not more.
        let later = now + Duration::from_secs(60);
        let waits: Vec<_> =
            (0..4).map(|_| (throttle.book(later).unwrap() - later).as_millis()).collect();
        assert_eq!(waits, [0, 0, 0, 100]);
    }

    #[tokio::test]
    async fn rejected_calls_take_no_turn() {
        let throttle = Throttle::new(Rate { per_second: 10.0, burst: 1 });
        let now = Instant::now();
        let accepted = (0..10_000).filter(|_| throttle.book(now).is_ok()).count();
        assert_eq!(accepted, 101, "the calls that fit into the longest wait");
        let later = now + LONGEST_WAIT + Duration::from_secs(1);
        assert_eq!(throttle.book(later).unwrap(), later);
    }
}
