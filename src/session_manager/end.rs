//! The end of a session: first its data, and with it the token; then the finalizer, and with it the request.

use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt};

use super::controller::{Context, Error};
use super::finalizer;
use crate::kubernetes::cache::{in_time, list};
use crate::kubernetes::client::tolerate;
use crate::kubernetes::session::{REQUEST_LABEL, SnapshotSessionData, SnapshotSessionRequest};

/// Lets a request that is being deleted go.
pub async fn end(context: &Context, request: &SnapshotSessionRequest) -> Result<(), Error> {
    if !finalizer::holds(request) {
        return Ok(());
    }
    delete_data(context, request, |_| false).await?;
    finalizer::release(&context.requests_beside(request), request).await?;
    context.metrics.ended();
    let namespace = request.namespace().unwrap_or_default();
    tracing::info!(namespace, name = request.name_any(), "a session has ended");
    Ok(())
}

/// Deletes the data of a request, in whatever namespace it is, except what is to be kept.
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

/// The data of a request as the API server knows it now: deleting what the watch has not told yet cannot be made up for.
pub async fn list_data(context: &Context, uid: &str) -> kube::Result<Vec<SnapshotSessionData>> {
    let all: Api<SnapshotSessionData> = Api::all(context.client.clone());
    let select = ListParams::default().labels(&format!("{REQUEST_LABEL}={uid}"));
    list(&all, select, |one| one.spec.request.uid == uid).await
}

/// Deletes one; that it is gone already is as good.
pub async fn delete(client: &kube::Client, data: &SnapshotSessionData) -> kube::Result<()> {
    let namespace = data.namespace().unwrap_or_default();
    let api: Api<SnapshotSessionData> = Api::namespaced(client.clone(), &namespace);
    tolerate(in_time(api.delete(&data.name_any(), &DeleteParams::default())).await, &[404])
}
