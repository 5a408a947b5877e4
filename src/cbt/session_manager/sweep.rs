//! Deletes orphaned data: its request was deleted (its finalizer was removed, or a former leader
//! created the data too late), has another token, or has expired. The watches report candidates,
//! and a query to the API server confirms them.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, ResourceExt};
use tokio::time::sleep;

use super::context::Context;
use super::end;
use kubernetes::cache::in_time;
use kubernetes::session::{SnapshotSessionData, SnapshotSessionRequest};

/// Pause between rounds. A round without orphans makes no calls.
const INTERVAL: Duration = Duration::from_secs(5);

/// Runs rounds until the future is dropped.
pub async fn run(context: &Context, known: &Store<SnapshotSessionRequest>) {
    // An error means that the watch of requests has ended, and with it the controller.
    if known.wait_until_ready().await.is_err() {
        return;
    }
    loop {
        for data in context.data.all().unwrap_or_default() {
            if !is_suspect(&data, known) {
                continue;
            }
            if let Err(error) = delete_if_orphaned(context, &data).await {
                tracing::warn!(%error, "failed to delete orphaned session data; retrying");
            }
        }
        sleep(INTERVAL).await;
    }
}

/// Whether the data looks orphaned, by the watches' state.
fn is_suspect(data: &SnapshotSessionData, known: &Store<SnapshotSessionRequest>) -> bool {
    let reference = &data.spec.request;
    let key = ObjectRef::new(&reference.name).within(&reference.namespace);
    is_expired(data) || known.get(&key).is_none_or(|request| !accounts_for(&request, data))
}

fn is_expired(data: &SnapshotSessionData) -> bool {
    data.spec.expiration_time.0 <= Timestamp::now()
}

/// Whether the data belongs to the request. The request has its token before the data is created.
fn accounts_for(request: &SnapshotSessionRequest, data: &SnapshotSessionData) -> bool {
    request.metadata.uid.as_deref() == Some(&data.spec.request.uid)
        && request.session_token() == data.metadata.name.as_deref()
}

async fn delete_if_orphaned(context: &Context, data: &SnapshotSessionData) -> kube::Result<()> {
    let reference = &data.spec.request;
    if !is_expired(data) {
        let requests: Api<SnapshotSessionRequest> =
            Api::namespaced(context.client.clone(), &reference.namespace);
        let request = in_time(requests.get_opt(&reference.name)).await?;
        if request.is_some_and(|request| accounts_for(&request, data)) {
            return Ok(());
        }
    }
    end::delete(&context.client, data).await?;
    context.metrics.swept();
    let (namespace, request) = (data.namespace().unwrap_or_default(), &reference.name);
    tracing::info!(namespace, request, of = reference.namespace, "deleted orphaned session data");
    Ok(())
}
