//! Maintains objects that publish an address and the certificates to trust there, by server-side
//! apply: after each change that a watch reports, periodically, and whenever the certificates
//! change. All replicas write the same content as the same field manager, so no leader is needed.
//! The object remains when the process ends, because another replica may still serve.

use std::time::Duration;

use kube::api::{Patch, PatchParams};
use kube::core::ClusterResourceScope;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_stream::{Stream, StreamExt};

use super::cache::{Object, bounded};
use super::client::within;
use super::definition::next_step;
use telemetry::rate_limited_log::RateLimitedLog;
use telemetry::shutdown::Shutdown;

/// Interval at which the object is polled even if the watch reports nothing.
const RESYNC: Duration = Duration::from_secs(30);
/// Pause after a failed attempt: the first, and the longest. A change that the watch reports ends
/// it.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Pause after a write, which limits the load if another party keeps reverting it.
const SETTLE: Duration = Duration::from_millis(500);
/// Timeout of one call to the API server.
const CALL: Duration = Duration::from_secs(10);

/// The desired content of an object.
pub trait Publication: Send + 'static {
    type Object: Object + Resource<Scope = ClusterResourceScope>;

    /// Field of the spec that some versions of the CustomResourceDefinition lack.
    const OPTIONAL_FIELD: Option<&'static str> = None;

    /// Field manager of the writes.
    fn manager(&self) -> &'static str;

    /// The object's name.
    fn name(&self) -> &str;

    /// Whether the object has the desired content.
    fn is_current(&self, found: &Self::Object, pem: &str) -> bool;
    /// The object for server-side apply, with certificates in PEM.
    ///
    /// # Errors
    /// The object cannot be derived from the found one; why, and what to do.
    fn desired(&self, found: Option<&Self::Object>, pem: &str) -> anyhow::Result<Value>;

    /// A merge patch that removes fields of other managers that server-side apply cannot remove and
    /// that conflict with the desired content. The result must be a valid object.
    fn conflicts(&self, _found: &Self::Object) -> Option<Value> {
        None
    }

    /// Called with the object after each read, to log warnings.
    fn inspect(&mut self, _found: &Self::Object) {}
}

/// Maintains the object, with the certificates in `pem`, until draining begins. Errors are logged
/// once and retried.
pub async fn maintain<P: Publication>(
    client: Client,
    publication: P,
    pem: watch::Receiver<String>,
    shutdown: Shutdown,
) {
    let objects: Api<P::Object> = Api::all(client);
    let one = watcher::Config::default().fields(&format!("metadata.name={}", publication.name()));
    let seen = watcher(objects.clone(), bounded(one));
    let publisher = Publisher {
        objects,
        publication,
        pem,
        error_log: RateLimitedLog::default(),
        crd_lacks_field: false,
    };
    tokio::select! {
        () = publisher.run(seen) => {}
        () = shutdown.draining() => {}
    }
}

/// An item of the watch.
type Seen<K> = watcher::Result<Event<K>>;

struct Publisher<P: Publication> {
    objects: Api<P::Object>,
    publication: P,
    pem: watch::Receiver<String>,
    error_log: RateLimitedLog,
    /// Whether the definition lacks [`Publication::OPTIONAL_FIELD`].
    crd_lacks_field: bool,
}

impl<P: Publication> Publisher<P> {
    async fn run(mut self, seen: impl Stream<Item = Seen<P::Object>>) {
        tokio::pin!(seen);
        let mut pause = BACKOFF.0;
        loop {
            match self.publish().await {
                Ok(wrote) => {
                    pause = BACKOFF.0;
                    if self.error_log.clear() {
                        tracing::info!("{} is up to date", self.title());
                    }
                    sleep(if wrote { SETTLE } else { Duration::ZERO }).await;
                    self.next_reason(seen.as_mut()).await;
                }
                Err(error) => {
                    self.complain(&error);
                    tokio::select! {
                        () = sleep(pause) => {}
                        () = self.next_reason(seen.as_mut()) => {}
                    }
                    pause = (pause * 2).min(BACKOFF.1);
                }
            }
        }
    }

    /// Waits until the object or its desired content may have changed.
    async fn next_reason(&mut self, mut seen: impl Stream<Item = Seen<P::Object>> + Unpin) {
        let watched = async {
            loop {
                match seen.next().await {
                    Some(Ok(Event::Init | Event::InitApply(_))) => {}
                    Some(Ok(_)) => return sleep(SETTLE).await,
                    // Without a watch, poll.
                    Some(Err(_)) | None => return sleep(RESYNC).await,
                }
            }
        };
        tokio::select! {
            // If the sender is gone, the last certificates are still published.
            Ok(()) = self.pem.changed() => {}
            () = watched => {}
            () = sleep(RESYNC) => {}
        }
    }

    fn complain(&mut self, error: &anyhow::Error) {
        let error = format!("{error:#}");
        if self.error_log.is_new(&error) {
            tracing::warn!(error, "failed to maintain {}; retrying", self.title());
        }
    }

    fn title(&self) -> String {
        format!("{} {}", P::Object::kind(&()), self.publication.name())
    }

    /// Returns whether the object changed.
    async fn publish(&mut self) -> anyhow::Result<bool> {
        let pem = self.pem.borrow_and_update().clone();
        let name = self.publication.name().to_owned();
        let found = within(CALL, self.objects.get_opt(&name)).await;
        let found = match found {
            Ok(found) => found,
            Err(error) => return Err(explain(&self.objects, error, "failed to read it").await),
        };
        if let Some(found) = &found {
            self.publication.inspect(found);
        }
        if found.as_ref().is_some_and(|found| self.publication.is_current(found, &pem)) {
            return Ok(false);
        }
        if let Some(patch) = found.as_ref().and_then(|found| self.publication.conflicts(found)) {
            let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
            let cleared = within(CALL, self.objects.patch(&name, &params, &patch)).await;
            if let Err(error) = cleared {
                return Err(
                    explain(&self.objects, error, "failed to remove conflicting fields").await
                );
            }
        }
        let desired = self.publication.desired(found.as_ref(), &pem)?;
        let written = match self.apply(desired).await {
            Ok(written) => written,
            Err(error) => return Err(explain(&self.objects, error, "failed to write it").await),
        };
        // If the definition lacks the optional field, the object never has the desired content.
        let before = found.and_then(|found| found.meta().resource_version.clone());
        let changed = before.is_none() || before != written.meta().resource_version;
        if changed {
            tracing::info!("wrote {}", self.title());
        }
        Ok(changed)
    }

    /// Server-side apply rejects a field that an older definition lacks; other writes drop it.
    async fn apply(&mut self, mut desired: Value) -> kube::Result<P::Object> {
        let params = PatchParams::apply(self.publication.manager()).force();
        let (objects, name) = (self.objects.clone(), self.publication.name().to_owned());
        let write = async |desired: Value| {
            within(CALL, objects.patch(&name, &params, &Patch::Apply(desired))).await
        };
        let Some(field) = P::OPTIONAL_FIELD else { return write(desired).await };
        if !self.crd_lacks_field {
            match write(desired.clone()).await {
                Err(error) if is_unknown(field, &error) => self.crd_lacks_field = true,
                written => return written,
            }
        }
        if let Some(spec) = desired["spec"].as_object_mut() {
            spec.remove(field);
        }
        write(desired).await
    }
}

/// Adds what to do if the API server does not know the kind.
async fn explain<K: Clone + Resource<DynamicType = ()>>(
    objects: &Api<K>,
    error: kube::Error,
    context: &'static str,
) -> anyhow::Error {
    let is_unknown = matches!(&error, kube::Error::Api(status) if status.code == 404);
    let error = anyhow::Error::from(error);
    if !is_unknown {
        return error.context(context);
    }
    error.context(next_step::<K>(&objects.clone().into_client()).await)
}

fn is_unknown(field: &str, error: &kube::Error) -> bool {
    let unknown = |text: &str| text.contains(field) && text.contains("not declared");
    matches!(error, kube::Error::Api(status) if unknown(&status.message))
}
