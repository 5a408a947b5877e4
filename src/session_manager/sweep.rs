//! Data that no request accounts for: its request is gone (somebody took the finalizer away, or a leader that had lost its lease
//! without knowing made it too late), has another token, or has expired. Found in what the watches have told, confirmed with the
//! API server, and deleted.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, ResourceExt};
use tokio::time::sleep;

use super::controller::Context;
use super::end;
use crate::kubernetes::cache::in_time;
use crate::kubernetes::session::{SnapshotSessionData, SnapshotSessionRequest};

/// Time between two rounds. A round in which all is well asks the API server for nothing.
const EVERY: Duration = Duration::from_secs(5);

/// Sweeps for as long as it is polled. `known` are the requests.
pub async fn run(context: &Context, known: &Store<SnapshotSessionRequest>) {
    // An error means that the watch of requests has ended, and everything with it.
    if known.wait_until_ready().await.is_err() {
        return;
    }
    loop {
        for data in context.data.all().unwrap_or_default() {
            if !is_suspect(&data, known) {
                continue;
            }
            if let Err(error) = settle(context, &data).await {
                tracing::warn!(%error, "data of a session that is over could not be deleted; trying again");
            }
        }
        sleep(EVERY).await;
    }
}

/// Whether something is wrong with it, as far as is known here.
fn is_suspect(data: &SnapshotSessionData, known: &Store<SnapshotSessionRequest>) -> bool {
    let reference = &data.spec.request;
    let key = ObjectRef::new(&reference.name).within(&reference.namespace);
    is_expired(data) || known.get(&key).is_none_or(|request| !accounts_for(&request, data))
}

fn is_expired(data: &SnapshotSessionData) -> bool {
    data.spec.expiration_time.0 <= Timestamp::now()
}

/// Whether the request has this data. The token is in the request before the data is made.
fn accounts_for(request: &SnapshotSessionRequest, data: &SnapshotSessionData) -> bool {
    request.metadata.uid.as_deref() == Some(&data.spec.request.uid)
        && request.session_token() == data.metadata.name.as_deref()
}

async fn settle(context: &Context, data: &SnapshotSessionData) -> kube::Result<()> {
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
    tracing::info!(
        namespace,
        request,
        of = reference.namespace,
        "data of a session that is over is deleted"
    );
    Ok(())
}
