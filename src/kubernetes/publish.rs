//! Objects that say where something is and whom to trust there, kept as they should be: made or put right by server-side
//! apply, when a watch tells of a change and now and then without, whenever the certificates change. All replicas write
//! the same, under one name of a field manager, so none has to lead. An object stays when its keeper ends: another replica may go on.

use std::time::Duration;

use kube::api::{Patch, PatchParams};
use kube::core::ClusterResourceScope;
use kube::runtime::watcher::watch_object;
use kube::{Api, Client, Resource};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_stream::{Stream, StreamExt};

use super::cache::Object;
use super::client::within;
use crate::telemetry::complaint::Complaint;
use crate::telemetry::shutdown::Shutdown;

/// The object is looked at as often even where the watch says nothing.
const RESYNC: Duration = Duration::from_secs(30);
/// Time after an attempt that failed: the first, and the longest. A change that the watch tells ends it.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Time after one that wrote, so that somebody who keeps undoing it makes no load.
const SETTLE: Duration = Duration::from_millis(500);
/// How long one call to the API server may take.
const CALL: Duration = Duration::from_secs(10);

/// What an object is to be.
pub trait Publication: Send + 'static {
    type Object: Object + Resource<Scope = ClusterResourceScope>;

    /// Field of the spec that not every CustomResourceDefinition of the kind has.
    const OPTIONAL_FIELD: Option<&'static str> = None;

    /// As whom the fields are written.
    fn manager(&self) -> &'static str;

    /// The object's name.
    fn name(&self) -> &str;

    fn is_as_it_should_be(&self, found: &Self::Object, pem: &str) -> bool;

    /// What server-side apply is to make of it, with certificates in PEM.
    ///
    /// # Errors
    /// It cannot be made of what was found; why, and what to do.
    fn wanted(&self, found: Option<&Self::Object>, pem: &str) -> anyhow::Result<Value>;

    /// What another manager has set and server-side apply cannot take away, but has to go: as a merge patch that leaves a valid
    /// object.
    fn in_the_way(&self, _found: &Self::Object) -> Option<Value> {
        None
    }

    /// Sees the object each time that it is read: for warnings.
    fn look(&mut self, _found: &Self::Object) {}
}

/// Keeps the object, with the certificates in `pem`, until draining begins. Whatever goes wrong is logged once and tried again.
pub async fn keep<P: Publication>(
    client: Client,
    publication: P,
    pem: watch::Receiver<String>,
    shutdown: Shutdown,
) {
    let objects: Api<P::Object> = Api::all(client);
    let seen = watch_object(objects.clone(), publication.name());
    let publisher = Publisher {
        objects,
        publication,
        pem,
        complaint: Complaint::default(),
        crd_lacks_field: false,
    };
    tokio::select! {
        () = publisher.keep(seen) => {}
        () = shutdown.draining() => {}
    }
}

/// What the watch says.
type Seen<K> = kube::runtime::watcher::Result<Option<K>>;

struct Publisher<P: Publication> {
    objects: Api<P::Object>,
    publication: P,
    pem: watch::Receiver<String>,
    complaint: Complaint,
    /// Whether the definition is one without [`Publication::OPTIONAL_FIELD`].
    crd_lacks_field: bool,
}

impl<P: Publication> Publisher<P> {
    async fn keep(mut self, seen: impl Stream<Item = Seen<P::Object>>) {
        tokio::pin!(seen);
        let mut pause = BACKOFF.0;
        loop {
            match self.publish().await {
                Ok(wrote) => {
                    pause = BACKOFF.0;
                    if self.complaint.is_over() {
                        tracing::info!("{} is in order", self.title());
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

    /// Waits until the object or what it should be may have changed.
    async fn next_reason(&mut self, mut seen: impl Stream<Item = Seen<P::Object>> + Unpin) {
        let watched = async {
            match seen.next().await {
                Some(Ok(_)) => sleep(SETTLE).await,
                // Without a watch it is looked at now and then.
                Some(Err(_)) | None => sleep(RESYNC).await,
            }
        };
        tokio::select! {
            // Nobody has more to say: what is published is still kept.
            Ok(()) = self.pem.changed() => {}
            () = watched => {}
            () = sleep(RESYNC) => {}
        }
    }

    fn complain(&mut self, error: &anyhow::Error) {
        let error = format!("{error:#}");
        if self.complaint.is_new(&error) {
            tracing::warn!(error, "{} cannot be kept; trying again", self.title());
        }
    }

    fn title(&self) -> String {
        format!("{} {}", P::Object::kind(&()), self.publication.name())
    }

    /// Returns whether it changed the object.
    async fn publish(&mut self) -> anyhow::Result<bool> {
        let pem = self.pem.borrow_and_update().clone();
        let name = self.publication.name().to_owned();
        let found = within(CALL, self.objects.get_opt(&name)).await;
        let found = found.map_err(|error| told::<P>(error, "reading"))?;
        if let Some(found) = &found {
            self.publication.look(found);
        }
        if found.as_ref().is_some_and(|found| self.publication.is_as_it_should_be(found, &pem)) {
            return Ok(false);
        }
        if let Some(patch) = found.as_ref().and_then(|found| self.publication.in_the_way(found)) {
            let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
            let cleared = self.objects.patch(&name, &params, &patch);
            within(CALL, cleared).await.map_err(|error| told::<P>(error, "clearing"))?;
        }
        let wanted = self.publication.wanted(found.as_ref(), &pem)?;
        let written = self.apply(wanted).await.map_err(|error| told::<P>(error, "writing"))?;
        // Where the definition lacks the optional field, the object never is as it should be.
        let before = found.and_then(|found| found.meta().resource_version.clone());
        let changed = before.is_none() || before != written.meta().resource_version;
        if changed {
            tracing::info!("{} written", self.title());
        }
        Ok(changed)
    }

    /// Server-side apply refuses a field that the definition lacks, as an older one does; other writes drop it.
    async fn apply(&mut self, mut wanted: Value) -> kube::Result<P::Object> {
        let params = PatchParams::apply(self.publication.manager()).force();
        let (objects, name) = (self.objects.clone(), self.publication.name().to_owned());
        let write = async |wanted: Value| {
            within(CALL, objects.patch(&name, &params, &Patch::Apply(wanted))).await
        };
        let Some(field) = P::OPTIONAL_FIELD else { return write(wanted).await };
        if !self.crd_lacks_field {
            match write(wanted.clone()).await {
                Err(error) if is_unknown(field, &error) => self.crd_lacks_field = true,
                written => return written,
            }
        }
        if let Some(spec) = wanted["spec"].as_object_mut() {
            spec.remove(field);
        }
        write(wanted).await
    }
}

fn is_unknown(field: &str, error: &kube::Error) -> bool {
    let unknown = |text: &str| text.contains(field) && text.contains("not declared");
    matches!(error, kube::Error::Api(status) if unknown(&status.message))
}

/// Says what to do where the API server knows no such objects.
fn told<P: Publication>(error: kube::Error, doing: &'static str) -> anyhow::Error {
    let is_unknown = matches!(&error, kube::Error::Api(status) if status.code == 404);
    let error = anyhow::Error::from(error);
    if !is_unknown {
        return error.context(doing);
    }
    let (plural, group) = (P::Object::plural(&()), P::Object::group(&()));
    let version = P::Object::version(&());
    error.context(format!("install the CustomResourceDefinition {plural}.{group} ({version})"))
}
