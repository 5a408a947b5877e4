//! The shared state of reconciliation, and errors that make it retry. Depends on no step of it.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Preconditions};
use kube::runtime::controller::Action;
use kube::runtime::events::{Event, EventType, Recorder};
use kube::{Api, Client, Resource, ResourceExt};

use super::lifetime::Lifetimes;
use super::metrics::Metrics;
use super::resolve::Resolver;
use common::text::truncate;
use kubernetes::cache::{Cache, in_time};
use kubernetes::client::is_overloaded;
use kubernetes::session::{SnapshotSessionData, SnapshotSessionRequest};

/// Maximum bytes of an event's note (events.k8s.io/v1: 1 kB).
const MAX_NOTE: usize = 1000;

/// Shared state of reconciliation.
pub struct Context {
    pub client: Client,
    pub requests: Api<SnapshotSessionRequest>,
    pub resolver: Resolver,
    /// Indexed by the uid of the request.
    pub data: Cache<SnapshotSessionData>,
    pub lifetimes: Lifetimes,
    pub recorder: Recorder,
    pub metrics: Metrics,
    /// Time from a request's creation for its snapshots to become ready.
    pub ready_timeout: Duration,
    /// Interval at which a request is reconciled even without a change.
    pub resync: Duration,
}

/// Why a reconciliation was not completed. It is retried.
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
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Api(kube::Error::Api(status)) if status.code == 409)
    }

    pub fn is_overloaded(&self) -> bool {
        matches!(self, Self::Api(error) if is_overloaded(error))
    }
}

impl Context {
    /// The API of requests in the namespace of this one.
    pub fn requests_in_namespace_of(
        &self,
        request: &SnapshotSessionRequest,
    ) -> Api<SnapshotSessionRequest> {
        Api::namespaced(self.client.clone(), &request.namespace().unwrap_or_default())
    }

    /// Schedules the next reconciliation: at expiry, or after the resync interval.
    pub fn next_reconciliation(&self, request: &SnapshotSessionRequest, now: Timestamp) -> Action {
        let remaining = request.expiration_time().map_or(self.resync, |expiration| {
            Duration::try_from(expiration.0.duration_since(now)).unwrap_or_default()
        });
        // Slightly later, so that the session has expired by its clock.
        Action::requeue(self.resync.min(remaining + Duration::from_millis(5)))
    }

    pub async fn delete_expired(&self, request: &SnapshotSessionRequest) -> Result<(), Error> {
        let (namespace, name) = (request.namespace().unwrap_or_default(), request.name_any());
        // Not a newer request of the same name.
        let only = Preconditions { uid: request.metadata.uid.clone(), ..Preconditions::default() };
        let params = DeleteParams::default().preconditions(only);
        match in_time(self.requests_in_namespace_of(request).delete(&name, &params)).await {
            Ok(_) => {
                self.metrics.expired();
                tracing::info!(namespace, name, "deleted an expired session");
                Ok(())
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Records an event on the request. A failure is only logged.
    pub async fn record_event(
        &self,
        request: &SnapshotSessionRequest,
        kind: EventType,
        reason: &str,
        note: &str,
    ) {
        let event = Event {
            type_: kind,
            reason: reason.to_owned(),
            note: Some(truncate(note, MAX_NOTE)),
            action: "Session".to_owned(),
            secondary: None,
        };
        let published = in_time(self.recorder.publish(&event, &request.object_ref(&()))).await;
        if let Err(error) = published {
            tracing::debug!(%error, reason, "failed to record an event");
        }
    }
}
