//! The end of a session: deletes its data and thereby the token, then the finalizer and thereby the
//! request.

use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt};

use super::context::{Context, Error};
use super::finalizer;
use crate::kubernetes::cache::{in_time, list};
use crate::kubernetes::client::tolerate;
use crate::kubernetes::session::{REQUEST_LABEL, SnapshotSessionData, SnapshotSessionRequest};

/// Completes the deletion of a request.
pub async fn end(context: &Context, request: &SnapshotSessionRequest) -> Result<(), Error> {
    if !finalizer::holds(request) {
        return Ok(());
    }
    delete_data(context, request, |_| false).await?;
    finalizer::release(&context.requests_in_namespace_of(request), request).await?;
    context.metrics.ended();
    let namespace = request.namespace().unwrap_or_default();
    tracing::info!(namespace, name = request.name_any(), "a session has ended");
    Ok(())
}

/// Deletes the data of a request in all namespaces, except objects for which `keep` returns true.
pub async fn delete_data(
    context: &Context,
    request: &SnapshotSessionRequest,
    keep: impl Fn(&SnapshotSessionData) -> bool,
) -> kube::Result<()> {
    let uid = request.metadata.uid.as_deref().unwrap_or_default();
    for one in list_data(context, uid).await?.iter().filter(|one| !keep(one)) {
        delete(&context.client, one).await?;
    }
    Ok(())
}

/// Lists the data of a request from the API server: data that the watch has not reported yet must
/// be deleted, too.
pub async fn list_data(context: &Context, uid: &str) -> kube::Result<Vec<SnapshotSessionData>> {
    let all: Api<SnapshotSessionData> = Api::all(context.client.clone());
    let select = ListParams::default().labels(&format!("{REQUEST_LABEL}={uid}"));
    list(&all, select, |one| one.spec.request.uid == uid).await
}

/// Deletes one object; a missing one is not an error.
pub async fn delete(client: &kube::Client, data: &SnapshotSessionData) -> kube::Result<()> {
    let namespace = data.namespace().unwrap_or_default();
    let api: Api<SnapshotSessionData> = Api::namespaced(client.clone(), &namespace);
    tolerate(in_time(api.delete(&data.name_any(), &DeleteParams::default())).await, &[404])
}
