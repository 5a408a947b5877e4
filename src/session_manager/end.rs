//! The end of a session: first its data, and with it the token; then the finalizer, and with it the request.

use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use super::controller::{Context, Error};
use crate::kubernetes::cache::in_time;
use crate::kubernetes::session::{
    FINALIZER, REQUEST_LABEL, SnapshotSessionData, SnapshotSessionRequest,
};

/// Lets a request that is being deleted go.
pub async fn end(context: &Context, request: &SnapshotSessionRequest) -> Result<(), Error> {
    if !request.finalizers().iter().any(|one| one == FINALIZER) {
        return Ok(());
    }
    delete_data(context, request, |_| false).await?;
    let namespace = request.namespace().unwrap_or_default();
    let name = request.name_any();
    release(&Api::namespaced(context.client.clone(), &namespace), request).await?;
    context.metrics.ended();
    tracing::info!(namespace, name, "a session has ended");
    Ok(())
}

/// Takes the finalizer away.
pub async fn release(
    requests: &Api<SnapshotSessionRequest>,
    request: &SnapshotSessionRequest,
) -> kube::Result<()> {
    let others: Vec<_> = request.finalizers().iter().filter(|one| *one != FINALIZER).collect();
    let patch = json!({ "metadata": {
        "resourceVersion": request.resource_version(), "finalizers": others,
    }});
    let (name, params) = (request.name_any(), PatchParams::default());
    match in_time(requests.patch(&name, &params, &Patch::Merge(&patch))).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error),
    }
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
    let found = in_time(all.list(&select)).await?.items;
    Ok(found.into_iter().filter(|one| one.spec.request.uid == uid).collect())
}

/// Deletes one; that it is gone already is as good.
pub async fn delete(client: &kube::Client, data: &SnapshotSessionData) -> kube::Result<()> {
    let namespace = data.namespace().unwrap_or_default();
    let api: Api<SnapshotSessionData> = Api::namespaced(client.clone(), &namespace);
    match in_time(api.delete(&data.name_any(), &DeleteParams::default())).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error),
    }
}
