//! What happens to SnapshotSessionRequests, while this process leads. Each look at a request does the next thing that is due
//! and can be repeated at any time: `establish` from Pending to Ready or Failed, `end` at its end. [`super::sweep`] sees to data
//! that no request accounts for.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Preconditions};
use kube::runtime::controller::{Action, Config, Controller};
use kube::runtime::events::{Event, EventType, Recorder};
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use tokio_stream::StreamExt;

use super::lifetime::Lifetimes;
use super::metrics::Metrics;
use super::resolve::Resolver;
use super::{end, establish, sweep};
use crate::grpc::cut;
use crate::kubernetes::cache::{Cache, in_time};
use crate::kubernetes::client::is_crowded;
use crate::kubernetes::session::{SessionState, SnapshotSessionData, SnapshotSessionRequest};

/// Requests that are worked on at once.
const AT_ONCE: u16 = 16;
/// So long a change waits for others, and the watch for what this process has written itself.
const DEBOUNCE: Duration = Duration::from_millis(20);
/// Time to the next attempt: after a write that met another's, and after any other failure.
const AFTER_CONFLICT: Duration = Duration::from_millis(100);
const AFTER_FAILURE: Duration = Duration::from_secs(2);
/// Bytes of an event's note, at most (events.k8s.io/v1: 1 kB).
const MAX_NOTE: usize = 1000;

/// What looking after sessions needs.
pub struct Context {
    pub client: Client,
    pub requests: Api<SnapshotSessionRequest>,
    pub resolver: Resolver,
    /// Indexed by the uid of the request.
    pub data: Cache<SnapshotSessionData>,
    pub lifetimes: Lifetimes,
    pub recorder: Recorder,
    pub metrics: Metrics,
    /// From a request's creation on, how long its snapshots have to become ready.
    pub ready_timeout: Duration,
    /// A request is looked at as often even where no watch says anything.
    pub resync: Duration,
}

/// Why a look at a request came to no end. It is looked at again.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("{0:#}")]
    Other(anyhow::Error),
}

impl Error {
    fn is_conflict(&self) -> bool {
        matches!(self, Self::Api(kube::Error::Api(status)) if status.code == 409)
    }

    fn is_crowded(&self) -> bool {
        matches!(self, Self::Api(error) if is_crowded(error))
    }
}

/// Looks after all requests, for as long as it is polled.
pub async fn run(context: Arc<Context>) {
    let controller = Controller::new(context.requests.clone(), watcher::Config::default())
        .with_config(Config::default().debounce(DEBOUNCE).concurrency(AT_ONCE));
    let known = controller.store();
    let mut looks = pin!(controller.run(look, after_failure, context.clone()));
    let looking = async {
        while let Some(outcome) = looks.next().await {
            if let Err(error) = outcome {
                tracing::debug!(%error, "a look at a request");
            }
        }
    };
    tokio::select! {
        () = looking => {}
        () = sweep::run(&context, &known) => {}
    }
}

/// Does what is due.
async fn look(
    request: Arc<SnapshotSessionRequest>,
    context: Arc<Context>,
) -> Result<Action, Error> {
    if request.metadata.deletion_timestamp.is_some() {
        end::end(&context, &request).await?;
        return Ok(Action::await_change());
    }
    let now = Timestamp::now();
    if request.expiration_time().is_some_and(|expiration| expiration.0 <= now) {
        context.delete_expired(&request).await?;
        return Ok(Action::await_change());
    }
    match request.state() {
        SessionState::Pending => establish::advance(&context, &request, now).await,
        SessionState::Ready => {
            establish::note_revocation(&context, &request, now).await?;
            Ok(context.next_look(&request, now))
        }
        SessionState::Failed => Ok(context.next_look(&request, now)),
    }
}

fn after_failure(
    request: Arc<SnapshotSessionRequest>,
    error: &Error,
    context: Arc<Context>,
) -> Action {
    if error.is_conflict() {
        // What is known of the request was not the newest.
        return Action::requeue(AFTER_CONFLICT);
    }
    context.metrics.troubled();
    if !error.is_crowded() {
        let namespace = request.namespace().unwrap_or_default();
        tracing::warn!(namespace, name = request.name_any(), %error, "a request waits; trying again");
    }
    Action::requeue(AFTER_FAILURE)
}

impl Context {
    /// The requests of this one's namespace.
    pub fn requests_beside(&self, request: &SnapshotSessionRequest) -> Api<SnapshotSessionRequest> {
        Api::namespaced(self.client.clone(), &request.namespace().unwrap_or_default())
    }

    /// When the request is due again: at its end, or when it is time to look whether all is well.
    pub fn next_look(&self, request: &SnapshotSessionRequest, now: Timestamp) -> Action {
        let left = request.expiration_time().map_or(self.resync, |expiration| {
            Duration::try_from(expiration.0.duration_since(now)).unwrap_or_default()
        });
        // A little later, so that it is over then.
        Action::requeue(self.resync.min(left + Duration::from_millis(5)))
    }

    async fn delete_expired(&self, request: &SnapshotSessionRequest) -> Result<(), Error> {
        let (namespace, name) = (request.namespace().unwrap_or_default(), request.name_any());
        // Not one that has the name by now.
        let only = Preconditions { uid: request.metadata.uid.clone(), ..Preconditions::default() };
        let params = DeleteParams::default().preconditions(only);
        match in_time(self.requests_beside(request).delete(&name, &params)).await {
            Ok(_) => {
                self.metrics.expired();
                tracing::info!(namespace, name, "a session has expired");
                Ok(())
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Says so on the request. That it cannot be said ends nothing.
    pub async fn tell(
        &self,
        request: &SnapshotSessionRequest,
        kind: EventType,
        reason: &str,
        note: &str,
    ) {
        let event = Event {
            type_: kind,
            reason: reason.to_owned(),
            note: Some(cut(note, MAX_NOTE)),
            action: "Session".to_owned(),
            secondary: None,
        };
        let told = in_time(self.recorder.publish(&event, &request.object_ref(&()))).await;
        if let Err(error) = told {
            tracing::debug!(%error, reason, "an event could not be written");
        }
    }
}
