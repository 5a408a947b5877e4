//! Reconciles SnapshotSessionRequests while this process leads. Each reconciliation performs the
//! next step and can be repeated at any time: `establish` moves a request from Pending to Ready or
//! Failed, `end` completes its deletion. [`super::sweep`] deletes orphaned data.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::controller::{Action, Config};
use tokio_stream::StreamExt;

use super::context::{Context, Error};
use super::{end, establish, sweep};
use kubernetes::cache::controller;
use kubernetes::session::{SessionState, SnapshotSessionRequest};

/// Maximum number of concurrent reconciliations.
const CONCURRENCY: u16 = 16;
/// Delay of a reconciliation, to combine changes, including those of this process itself.
const DEBOUNCE: Duration = Duration::from_millis(20);
/// Delay of a retry after a conflict, and after any other failure.
const AFTER_CONFLICT: Duration = Duration::from_millis(100);
const AFTER_FAILURE: Duration = Duration::from_secs(2);

/// Reconciles all requests until the future is dropped.
pub async fn run(context: Arc<Context>) {
    let controller = controller(context.requests.clone())
        .with_config(Config::default().debounce(DEBOUNCE).concurrency(CONCURRENCY));
    let known = controller.store();
    let mut outcomes = pin!(controller.run(reconcile, retry, context.clone()));
    let reconciling = async {
        while let Some(outcome) = outcomes.next().await {
            if let Err(error) = outcome {
                tracing::debug!(%error, "failed to reconcile a request");
            }
        }
    };
    tokio::select! {
        () = reconciling => {}
        () = sweep::run(&context, &known) => {}
    }
}

/// Performs the next step of a request.
async fn reconcile(
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
            Ok(context.next_reconciliation(&request, now))
        }
        SessionState::Failed => Ok(context.next_reconciliation(&request, now)),
    }
}

fn retry(request: Arc<SnapshotSessionRequest>, error: &Error, context: Arc<Context>) -> Action {
    if error.is_conflict() {
        // The cached request was outdated.
        return Action::requeue(AFTER_CONFLICT);
    }
    context.metrics.attempt_failed();
    if !error.is_overloaded() {
        let namespace = request.namespace().unwrap_or_default();
        tracing::warn!(namespace, name = request.name_any(), %error, "failed to reconcile a request; retrying");
    }
    Action::requeue(AFTER_FAILURE)
}
