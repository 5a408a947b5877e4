//! A client of the API server that keeps to a rate and gives up in time.

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

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The flags of a role that lives on the API server.
#[derive(Debug, Clone, clap::Args)]
// Its group would have the name `Args`, as that of the role that flattens it.
#[group(skip)]
pub struct Args {
    /// Kubeconfig file; by default the ServiceAccount of the pod is used.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Calls to the API server a second.
    #[arg(long, default_value_t = 50.0, value_parser = per_second, value_name = "N")]
    pub kube_api_qps: f64,

    /// Calls to the API server at once, after a pause.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    pub kube_api_burst: u32,
}

impl Args {
    /// As [`connect`], with a rate of its own each time.
    pub async fn connect(&self) -> anyhow::Result<Client> {
        connect(self.kubeconfig.as_deref(), self.rate()).await
    }

    /// As [`connect_as_user`].
    pub async fn connect_as_user(&self) -> anyhow::Result<Client> {
        connect_as_user(self.kubeconfig.as_deref(), self.rate()).await
    }

    fn rate(&self) -> Rate {
        Rate { per_second: self.kube_api_qps, burst: self.kube_api_burst }
    }
}

/// Calls to the API server: so many a second, and so many at once after a pause. The flags
/// --kube-api-qps and --kube-api-burst mean the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// Calls a second, above 0.
    pub per_second: f64,
    /// Calls, at least 1.
    pub burst: u32,
}

/// [`Rate::per_second`], for the command line.
pub fn per_second(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if (1e-3..=1e6).contains(&rate) => Ok(rate),
        _ => Err("is not a number of calls from 0.001 to 1000000".into()),
    }
}

/// A client for the cluster of `kubeconfig`, or of the pod that this process runs in.
///
/// # Errors
/// No usable configuration; what is wrong with it.
pub async fn connect(kubeconfig: Option<&Path>, rate: Rate) -> anyhow::Result<Client> {
    let config = match kubeconfig {
        Some(path) => read(path).await?,
        None => Config::incluster().context(
            "not in a pod of a cluster (no ServiceAccount is mounted); --kubeconfig names one",
        )?,
    };
    build(config, rate)
}

/// A client for a command that a person types: for the cluster of `kubeconfig`, else that of the variable
/// KUBECONFIG, of ~/.kube/config, or of the pod, as kubectl takes it.
///
/// # Errors
/// No usable configuration; what is wrong with it.
pub async fn connect_as_user(kubeconfig: Option<&Path>, rate: Rate) -> anyhow::Result<Client> {
    build(configured(kubeconfig).await?, rate)
}

/// The same for a caller that decides itself, by what was answered, whether and when to ask again.
///
/// # Errors
/// No usable configuration; what is wrong with it.
pub async fn connect_as_user_once(kubeconfig: Option<&Path>, rate: Rate) -> anyhow::Result<Client> {
    let mut config = configured(kubeconfig).await?;
    config.default_retry = false;
    build(config, rate)
}

async fn configured(kubeconfig: Option<&Path>) -> anyhow::Result<Config> {
    match kubeconfig {
        Some(path) => read(path).await,
        None => Config::infer().await.context("no cluster is configured; --kubeconfig names one"),
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
    let builder = ClientBuilder::try_from(config).context("setting up the API server's client")?;
    Ok(builder.with_layer(&Throttle::new(rate)).build())
}

/// How long a call may wait for its turn. Those that would wait longer are turned away and take nobody's turn: so
/// a flood is over when it is over.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// How long it takes to be turned away: who tries again at once is not to cost more than who waits.
const TURNED_AWAY_AFTER: Duration = Duration::from_secs(1);

/// A call that would have had to wait too long for its turn.
#[derive(Debug, thiserror::Error)]
#[error("too many calls to the API server wait for their turn; the rate is --kube-api-qps")]
pub struct Crowded;

/// Lets calls through at a rate; those that come too fast wait, or are turned away.
#[derive(Debug, Clone)]
struct Throttle {
    rate: Rate,
    /// When the bucket, were it emptied call by call, would be full again.
    full_at: Arc<Mutex<Instant>>,
}

impl Throttle {
    fn new(rate: Rate) -> Self {
        Self { rate, full_at: Arc::new(Mutex::new(Instant::now())) }
    }

    /// Books one call; returns when it may be made.
    fn book(&self, now: Instant) -> Result<Instant, Crowded> {
        let each = Duration::from_secs_f64(1.0 / self.rate.per_second);
        let ahead = each * self.rate.burst.saturating_sub(1);
        let mut full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = (*full_at).max(now);
        let at = slot.checked_sub(ahead).map_or(now, |at| at.max(now));
        if at - now > LONGEST_WAIT {
            return Err(Crowded);
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
        // Nothing is sent before the future is polled.
        let call = self.inner.call(request);
        Box::pin(async move {
            match turn {
                Ok(turn) => sleep_until(turn).await,
                Err(crowded) => {
                    sleep(TURNED_AWAY_AFTER).await;
                    return Err(crowded.into());
                }
            }
            call.await.map_err(Into::into)
        })
    }
}

/// A call to the API server that does not wait for ever.
pub async fn within<T>(
    limit: Duration,
    call: impl Future<Output = kube::Result<T>>,
) -> kube::Result<T> {
    match timeout(limit, call).await {
        Ok(answer) => answer,
        Err(_) => {
            let limit = limit.as_secs();
            Err(kube::Error::Service(
                format!("the API server did not answer within {limit} s").into(),
            ))
        }
    }
}

/// Why a call to the API server failed, for a caller of this program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Whether this program's own account lacks the right: trying again helps nobody.
    pub is_own_right: bool,
    pub message: String,
}

/// Says why a call failed; `doing` is what it was for, `who` the role. What the API server says may hold what was sent to
/// it, so that only its kind of failure is told.
pub fn failure(who: &str, doing: &str, error: &kube::Error) -> Failure {
    match error {
        kube::Error::Api(status) if matches!(status.code, 401 | 403) => Failure {
            is_own_right: true,
            message: format!(
                "the {who}'s own ServiceAccount may not {doing} ({}); its ClusterRole has to allow it",
                status.code
            ),
        },
        kube::Error::Api(status) => passing(format!(
            "could not {doing}: the API server answered {}; try again",
            status.code
        )),
        error if is_crowded(error) => passing(format!(
            "could not {doing}: too many wait to ask the API server; try again later, or raise --kube-api-qps"
        )),
        _ => passing(format!("could not {doing}: the API server cannot be reached; try again")),
    }
}

fn passing(message: String) -> Failure {
    Failure { is_own_right: false, message }
}

/// A call's outcome, where these refusals of the API server (HTTP statuses) are as good as success.
pub fn tolerate<T>(outcome: kube::Result<T>, codes: &[u16]) -> kube::Result<()> {
    match outcome {
        Err(kube::Error::Api(status)) if codes.contains(&status.code) => Ok(()),
        outcome => outcome.map(drop),
    }
}

/// Whether a call was turned away by this process's own rate.
pub fn is_crowded(error: &kube::Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if error.is::<Crowded>() {
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
    async fn a_burst_goes_through_at_once_and_then_the_rate_holds() {
        let throttle = Throttle::new(Rate { per_second: 10.0, burst: 3 });
        let now = Instant::now();
        let waits: Vec<_> =
            (0..5).map(|_| (throttle.book(now).unwrap() - now).as_millis()).collect();
        assert_eq!(waits, [0, 0, 0, 100, 200]);
        // After a pause the burst is there again, and no more than that.
        let later = now + Duration::from_secs(60);
        let waits: Vec<_> =
            (0..4).map(|_| (throttle.book(later).unwrap() - later).as_millis()).collect();
        assert_eq!(waits, [0, 0, 0, 100]);
    }

    #[tokio::test]
    async fn a_flood_takes_nobodys_turn_but_its_own() {
        let throttle = Throttle::new(Rate { per_second: 10.0, burst: 1 });
        let now = Instant::now();
        let booked = (0..10_000).filter(|_| throttle.book(now).is_ok()).count();
        assert_eq!(booked, 101, "as many as fit into the longest wait");
        let later = now + LONGEST_WAIT + Duration::from_secs(1);
        assert_eq!(throttle.book(later).unwrap(), later);
    }
}
