//! The controller of DriverDiscovery objects: calls each endpoint, at once when an object changes and now and then without, and says in
//! the object's conditions what it saw. Only the leader does. It writes the conditions of its three types and nothing else: no
//! spec, no condition of another, and it deletes nothing.

mod conditions;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::controller::{Action, Config, Controller};
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use moka::future::Cache;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_stream::StreamExt;

pub use self::conditions::{CAPABLE, CERTIFICATE, REACHABLE};
use self::conditions::{Seen, conditions};
use super::endpoint::certificate::Certificate;
use super::endpoint::target::Target;
use super::endpoint::{Endpoints, Trouble};
use crate::kubernetes::cache::in_time;
use crate::kubernetes::driver_discovery::DriverDiscovery;
use crate::kubernetes::leader::while_leading;
use crate::telemetry::shutdown::Shutdown;

/// As whom conditions are written.
pub const MANAGER: &str = "csi-loopback-driver-discovery";
/// Endpoints are called so often where nothing changes.
pub const EVERY: Duration = Duration::from_secs(60);
/// How long looking at one may take.
const LOOK: Duration = Duration::from_secs(10);
/// Endpoints that are looked at at once.
const AT_ONCE: u16 = 8;
/// A change waits so long for others.
const DEBOUNCE: Duration = Duration::from_millis(20);
/// Time to the next attempt after a failure; twice as long after each more, where an endpoint does not answer.
const AFTER_FAILURE: Duration = Duration::from_secs(5);
/// Objects whose last look is remembered, at most.
const REMEMBERED: u64 = 1_000;

/// Numbers of the controller. Cheap to clone.
#[derive(Clone, Default)]
pub struct Metrics {
    leading: Gauge,
    looks: Counter,
}

impl Metrics {
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "discovery_leading",
            "1 in the replica that looks after DriverDiscoveries",
            metrics.leading.clone(),
        );
        registry.register(
            "discovery_looks",
            "Looks at the endpoint of a DriverDiscovery",
            metrics.looks.clone(),
        );
        metrics
    }
}

/// What looking after DriverDiscoveries needs.
pub struct Context {
    objects: Api<DriverDiscovery>,
    endpoints: Endpoints,
    every: Duration,
    metrics: Metrics,
    /// By uid: the last look. What is written is told by the watch too, and is no reason to look.
    looked: Cache<String, Look>,
}

/// A look that was taken.
#[derive(Clone)]
struct Look {
    generation: Option<i64>,
    /// When it is time again.
    next: Instant,
    /// Looks in a row without an answer.
    failures: u32,
}

/// Why a look came to no end. It is repeated.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Api(#[from] kube::Error),
}

impl Context {
    /// Endpoints are called as often as `every` says: see [`EVERY`].
    pub fn new(client: Client, endpoints: Endpoints, every: Duration, metrics: Metrics) -> Self {
        let looked = Cache::new(REMEMBERED);
        Self { objects: Api::all(client), endpoints, every, metrics, looked }
    }
}

/// Looks after all objects while this process leads, until draining begins and the lease is given back.
pub async fn run(leads: watch::Receiver<bool>, context: Arc<Context>, shutdown: &Shutdown) {
    let leading = |leads: bool| {
        context.metrics.leading.set(leads.into());
    };
    while_leading(leads, leading, || look_after(context.clone()), shutdown).await;
}

/// Looks after all objects, for as long as it is polled.
async fn look_after(context: Arc<Context>) {
    // What another leader has seen meanwhile is not known here.
    context.looked.invalidate_all();
    let controller = Controller::new(context.objects.clone(), watcher::Config::default())
        .with_config(Config::default().debounce(DEBOUNCE).concurrency(AT_ONCE));
    let mut looks = pin!(controller.run(look, after_failure, context));
    while let Some(outcome) = looks.next().await {
        if let Err(error) = outcome {
            tracing::debug!(%error, "a look at a DriverDiscovery");
        }
    }
}

async fn look(discovery: Arc<DriverDiscovery>, context: Arc<Context>) -> Result<Action, Error> {
    if discovery.metadata.deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    let (uid, generation) = (discovery.uid().unwrap_or_default(), discovery.metadata.generation);
    let before = context.looked.get(&uid).await.filter(|look| look.generation == generation);
    if let Some(look) = &before {
        let left = look.next.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            return Ok(Action::requeue(left));
        }
    }
    let seen = context.see(&discovery).await;
    context.metrics.looks.inc();
    context.tell(&discovery, &seen).await?;
    let failures = before.map_or(0, |look| look.failures);
    let failures = if seen.is_answer() { 0 } else { failures.saturating_add(1) };
    let pause = context.pause(failures);
    context.looked.insert(uid, Look { generation, next: Instant::now() + pause, failures }).await;
    Ok(Action::requeue(pause))
}

fn after_failure(discovery: Arc<DriverDiscovery>, error: &Error, _: Arc<Context>) -> Action {
    let name = discovery.name_any();
    tracing::warn!(name, %error, "the conditions of a DriverDiscovery cannot be written; trying again");
    Action::requeue(AFTER_FAILURE)
}

impl Context {
    /// An endpoint that does not answer may only be late: whoever waits for it need not wait until the next look at all.
    fn pause(&self, failures: u32) -> Duration {
        match failures.checked_sub(1) {
            None => self.every,
            Some(more) => AFTER_FAILURE.saturating_mul(2_u32.saturating_pow(more)).min(self.every),
        }
    }

    async fn see(&self, discovery: &DriverDiscovery) -> Seen {
        let target = match Target::of(discovery) {
            Ok(target) => target,
            Err(why) => return Seen::Unusable(why),
        };
        let endpoint = match self.endpoints.at(&target).await {
            Ok(endpoint) => endpoint,
            Err(why) => return Seen::Unusable(String::clone(&why)),
        };
        let late = || format!("there was no answer within {} s", LOOK.as_secs());
        let (info, certificate) =
            tokio::join!(timeout(LOOK, endpoint.info()), timeout(LOOK, endpoint.certificate()));
        Seen::Called {
            info: info.unwrap_or_else(|_| Err(Trouble::Unreachable(late()))),
            certificate: certificate.unwrap_or_else(|_| Certificate::Unseen(late())),
        }
    }

    /// Writes the conditions, where they are others than those that are there.
    async fn tell(&self, discovery: &DriverDiscovery, seen: &Seen) -> kube::Result<()> {
        let name = discovery.name_any();
        // What the watch has told may be older than what was written last.
        let Some(now) = in_time(self.objects.get_opt(&name)).await? else { return Ok(()) };
        if now.metadata.uid != discovery.metadata.uid {
            return Ok(());
        }
        let before = now.status.as_ref().map(|status| &*status.conditions).unwrap_or_default();
        let generation = discovery.metadata.generation;
        let wanted = conditions(&name, generation, seen, before, Timestamp::now());
        if wanted.iter().all(|one| before.contains(one)) {
            return Ok(());
        }
        self.write(discovery, &name, &wanted).await
    }

    async fn write(
        &self,
        discovery: &DriverDiscovery,
        name: &str,
        wanted: &[Condition],
    ) -> kube::Result<()> {
        let object = json!({
            "apiVersion": DriverDiscovery::api_version(&()),
            "kind": DriverDiscovery::kind(&()),
            // Not one that has the name by now.
            "metadata": { "name": name, "uid": discovery.metadata.uid },
            "status": { "conditions": wanted },
        });
        let params = PatchParams::apply(MANAGER).force();
        let patch = Patch::Apply(&object);
        match in_time(self.objects.patch_status(name, &params, &patch)).await {
            Ok(_) => Ok(()),
            // It is gone.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
