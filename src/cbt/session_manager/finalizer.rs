//! The finalizer of a request, which blocks its deletion while there may be data of it in another
//! namespace. It is added and removed over the version that was read.

use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use kubernetes::cache::in_time;
use kubernetes::client::tolerate;
use kubernetes::session::{FINALIZER, SnapshotSessionRequest};

/// Whether the request has the finalizer.
pub fn holds(request: &SnapshotSessionRequest) -> bool {
    request.finalizers().iter().any(|one| one == FINALIZER)
}

/// Adds the finalizer and returns the request.
pub async fn hold(
    requests: &Api<SnapshotSessionRequest>,
    request: &SnapshotSessionRequest,
) -> kube::Result<SnapshotSessionRequest> {
    if holds(request) {
        return Ok(request.clone());
    }
    let mut all = request.finalizers().to_vec();
    all.push(FINALIZER.to_owned());
    write(requests, request, &all).await
}

/// Removes the finalizer; a deleted request is not an error.
pub async fn release(
    requests: &Api<SnapshotSessionRequest>,
    request: &SnapshotSessionRequest,
) -> kube::Result<()> {
    let mut others = request.finalizers().to_vec();
    others.retain(|one| one != FINALIZER);
    tolerate(write(requests, request, &others).await, &[404])
}

async fn write(
    requests: &Api<SnapshotSessionRequest>,
    request: &SnapshotSessionRequest,
    finalizers: &[String],
) -> kube::Result<SnapshotSessionRequest> {
    let patch = Patch::Merge(json!({ "metadata": {
        "resourceVersion": request.resource_version(), "finalizers": finalizers,
    }}));
    in_time(requests.patch(&request.name_any(), &PatchParams::default(), &patch)).await
}
