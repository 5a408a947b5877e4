//! The end of a session: deletes its data and thereby the token, then the finalizer and thereby the
//! request.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt};

use super::context::{Context, Error};
use super::finalizer;
use kubernetes::cache::{in_time, list};
use kubernetes::client::tolerate;
use kubernetes::session::{REQUEST_LABEL, SnapshotSessionData, SnapshotSessionRequest};

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
    for one in data_of(context, request).await?.iter().filter(|one| !keep(one)) {
        delete(&context.client, one).await?;
    }
    Ok(())
}

/// The data of a request: what the watch reports, and, because it must be deleted too, the object
/// of the request's token that the watch has not reported yet. Lists all data of the cluster only
/// if a watch is not running or the driver's namespace is not known.
pub async fn data_of(
    context: &Context,
    request: &SnapshotSessionRequest,
) -> kube::Result<Vec<Arc<SnapshotSessionData>>> {
    let uid = request.metadata.uid.as_deref().unwrap_or_default();
    let Some(mut cached) = context.data.cached_with(uid) else {
        return list_data(context, uid).await;
    };
    let Some(token) = request.session_token() else { return Ok(cached) };
    if cached.iter().any(|one| one.name_any() == token) {
        return Ok(cached);
    }
    let Some(namespaces) = driver_namespaces(context, request) else {
        return list_data(context, uid).await;
    };
    for namespace in namespaces {
        let api: Api<SnapshotSessionData> = Api::namespaced(context.client.clone(), &namespace);
        let found = in_time(api.get_opt(token)).await?;
        cached.extend(found.filter(|found| found.spec.request.uid == uid).map(Arc::new));
    }
    Ok(cached)
}

/// Where the data of a request can be. `None` if that is not known.
fn driver_namespaces(
    context: &Context,
    request: &SnapshotSessionRequest,
) -> Option<BTreeSet<String>> {
    let driver = request.status.as_ref()?.driver.as_deref()?;
    let found = context.resolver.configurations.cached_with(driver)?;
    let namespaces: BTreeSet<_> =
        found.iter().map(|one| one.spec.driver_namespace.clone()).collect();
    Some(namespaces).filter(|namespaces| !namespaces.is_empty())
}

async fn list_data(context: &Context, uid: &str) -> kube::Result<Vec<Arc<SnapshotSessionData>>> {
    let all: Api<SnapshotSessionData> = Api::all(context.client.clone());
    let select = ListParams::default().labels(&format!("{REQUEST_LABEL}={uid}"));
    let found = list(&all, select, |one| one.spec.request.uid == uid).await?;
    Ok(found.into_iter().map(Arc::new).collect())
}

/// Deletes one object; a missing one is not an error.
pub async fn delete(client: &kube::Client, data: &SnapshotSessionData) -> kube::Result<()> {
    let namespace = data.namespace().unwrap_or_default();
    let api: Api<SnapshotSessionData> = Api::namespaced(client.clone(), &namespace);
    tolerate(in_time(api.delete(&data.name_any(), &DeleteParams::default())).await, &[404])
}
