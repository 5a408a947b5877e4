//! The controller of DriverDiscovery objects: probes each endpoint, after a change of the object
//! and periodically, and writes the result as conditions of the object. Only the leader runs it. It
//! writes only the conditions of its three types, and deletes nothing.

mod conditions;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::controller::{Action, Config};
use kube::{Api, Client, Resource, ResourceExt};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_stream::StreamExt;

pub use self::conditions::{CAPABLE, CERTIFICATE, REACHABLE};
use self::conditions::{Probe, conditions};
use super::endpoint::certificate::Certificate;
use super::endpoint::target::Target;
use super::endpoint::{EndpointError, Endpoints};
use kubernetes::cache::{controller, in_time};
use kubernetes::driver_discovery::DriverDiscovery;
use kubernetes::leader::while_leading;
use telemetry::memo::{Keep, Memo};
use telemetry::shutdown::Shutdown;

/// Field manager of the conditions.
pub const MANAGER: &str = "csi-loopback-driver-discovery";
/// Interval at which endpoints are probed without a change.
pub const PROBE_INTERVAL: Duration = Duration::from_secs(60);
/// Time limit of a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of concurrent probes.
const CONCURRENCY: u16 = 8;
/// Delay of a reconciliation, to combine changes.
const DEBOUNCE: Duration = Duration::from_millis(20);
/// Delay of a retry after a failure. It doubles with each failure to reach an endpoint.
const AFTER_FAILURE: Duration = Duration::from_secs(5);
/// Maximum number of objects with a cached probe.
const MAX_CACHED: u64 = 1_000;

/// Metrics of the controller. Clones share them.
#[derive(Clone, Default)]
pub struct Metrics {
    leading: Gauge,
    probes: Counter,
}

impl Metrics {
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register("discovery_leading", "1 in the leader", metrics.leading.clone());
        registry.register(
            "discovery_looks",
            "Probes of endpoints of DriverDiscoveries",
            metrics.probes.clone(),
        );
        metrics
    }
}

/// Shared state of reconciliation.
pub struct Context {
    objects: Api<DriverDiscovery>,
    endpoints: Endpoints,
    interval: Duration,
    metrics: Metrics,
    /// The last probe by uid. The watch also reports the controller's own writes, which must not
    /// cause a probe.
    probed: Memo<String, ProbeRecord>,
}

/// A completed probe.
#[derive(Clone)]
struct ProbeRecord {
    generation: Option<i64>,
    /// When the next probe is due.
    next: Instant,
    /// Consecutive probes without a response.
    failures: u32,
}

/// Why a reconciliation was not completed. It is retried.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Api(#[from] kube::Error),
}

impl Context {
    /// `interval` is the interval of probes, see [`PROBE_INTERVAL`].
    pub fn new(client: Client, endpoints: Endpoints, interval: Duration, metrics: Metrics) -> Self {
        let probed = Memo::new(MAX_CACHED, Keep::Always);
        Self { objects: Api::all(client), endpoints, interval, metrics, probed }
    }
}

/// Reconciles all objects while this process leads, until draining begins and the lease is
/// released.
pub async fn run(leads: watch::Receiver<bool>, context: Arc<Context>, shutdown: &Shutdown) {
    let leading = |leads: bool| {
        context.metrics.leading.set(leads.into());
    };
    while_leading(leads, leading, || reconcile_all(context.clone()), shutdown).await;
}

/// Reconciles all objects until the future is dropped.
async fn reconcile_all(context: Arc<Context>) {
    // Another leader may have probed meanwhile.
    context.probed.clear();
    let controller = controller(context.objects.clone())
        .with_config(Config::default().debounce(DEBOUNCE).concurrency(CONCURRENCY));
    let mut outcomes = pin!(controller.run(reconcile, retry, context));
    while let Some(outcome) = outcomes.next().await {
        if let Err(error) = outcome {
            tracing::debug!(%error, "failed to reconcile a DriverDiscovery");
        }
    }
}

async fn reconcile(
    discovery: Arc<DriverDiscovery>,
    context: Arc<Context>,
) -> Result<Action, Error> {
    if discovery.metadata.deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    let (uid, generation) = (discovery.uid().unwrap_or_default(), discovery.metadata.generation);
    let before = context.probed.get(&uid).filter(|record| record.generation == generation);
    if let Some(record) = &before {
        let remaining = record.next.saturating_duration_since(Instant::now());
        if !remaining.is_zero() {
            return Ok(Action::requeue(remaining));
        }
    }
    let probe = context.probe(&discovery).await;
    context.metrics.probes.inc();
    context.update_status(&discovery, &probe).await?;
    let failures = before.map_or(0, |record| record.failures);
    let failures = if probe.is_conclusive() { 0 } else { failures.saturating_add(1) };
    let pause = context.pause(failures);
    context.probed.insert(uid, ProbeRecord { generation, next: Instant::now() + pause, failures });
    Ok(Action::requeue(pause))
}

fn retry(discovery: Arc<DriverDiscovery>, error: &Error, _: Arc<Context>) -> Action {
    let name = discovery.name_any();
    tracing::warn!(name, %error, "failed to write the conditions of a DriverDiscovery; retrying");
    Action::requeue(AFTER_FAILURE)
}

impl Context {
    /// Pause until the next probe. An unreachable endpoint is retried sooner, because it may just
    /// be starting.
    fn pause(&self, failures: u32) -> Duration {
        match failures.checked_sub(1) {
            None => self.interval,
            Some(more) => {
                AFTER_FAILURE.saturating_mul(2_u32.saturating_pow(more)).min(self.interval)
            }
        }
    }

    async fn probe(&self, discovery: &DriverDiscovery) -> Probe {
        let target = match Target::of(discovery) {
            Ok(target) => target,
            Err(why) => return Probe::Unusable(why),
        };
        let endpoint = match self.endpoints.at(&target).await {
            Ok(endpoint) => endpoint,
            Err(why) => return Probe::Unusable(String::clone(&why)),
        };
        let late = || format!("there was no response within {} s", PROBE_TIMEOUT.as_secs());
        let (info, certificate) = tokio::join!(
            timeout(PROBE_TIMEOUT, endpoint.info()),
            timeout(PROBE_TIMEOUT, endpoint.certificate())
        );
        Probe::Called {
            info: info.unwrap_or_else(|_| Err(EndpointError::Unreachable(late()))),
            certificate: certificate.unwrap_or_else(|_| Certificate::Unseen(late())),
        }
    }

    /// Writes the conditions if they differ from the current ones.
    async fn update_status(&self, discovery: &DriverDiscovery, probe: &Probe) -> kube::Result<()> {
        let name = discovery.name_any();
        // The watch's report may be older than the last write.
        let Some(now) = in_time(self.objects.get_opt(&name)).await? else { return Ok(()) };
        if now.metadata.uid != discovery.metadata.uid {
            return Ok(());
        }
        let before = now.status.as_ref().map(|status| &*status.conditions).unwrap_or_default();
        let generation = discovery.metadata.generation;
        let desired = conditions(&name, generation, probe, before, Timestamp::now());
        if desired.iter().all(|one| before.contains(one)) {
            return Ok(());
        }
        self.write(discovery, &name, &desired).await
    }

    async fn write(
        &self,
        discovery: &DriverDiscovery,
        name: &str,
        desired: &[Condition],
    ) -> kube::Result<()> {
        let object = json!({
            "apiVersion": DriverDiscovery::api_version(&()),
            "kind": DriverDiscovery::kind(&()),
            // Not a newer object of the same name.
            "metadata": { "name": name, "uid": discovery.metadata.uid },
            "status": { "conditions": desired },
        });
        let params = PatchParams::apply(MANAGER).force();
        let patch = Patch::Apply(&object);
        match in_time(self.objects.patch_status(name, &params, &patch)).await {
            Ok(_) => Ok(()),
            // The object was deleted.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
