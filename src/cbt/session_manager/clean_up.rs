//! `--clean-up`, for uninstalling: deletes all sessions, whether or not a manager is running, so
//! that no finalizer blocks the deletion of an object.

use kube::api::{DeleteParams, ListParams};
use kube::{Api, Client, ResourceExt};

use super::{end, finalizer};
use kubernetes::cache::{Object, in_time, list};
use kubernetes::client::tolerate;
use kubernetes::session::{SnapshotSessionData, SnapshotSessionRequest};

/// Deletes all requests and all data.
///
/// # Errors
/// The API server refuses a call.
pub async fn run(client: &Client) -> anyhow::Result<()> {
    let mut requests = 0;
    for request in all::<SnapshotSessionRequest>(client).await? {
        let namespace = request.namespace().unwrap_or_default();
        let api: Api<SnapshotSessionRequest> = Api::namespaced(client.clone(), &namespace);
        let name = request.name_any();
        tolerate(in_time(api.delete(&name, &DeleteParams::default())).await, &[404])?;
        // A running manager may be faster.
        if let Some(still) = in_time(api.get_opt(&name)).await? {
            tolerate(finalizer::release(&api, &still).await, &[409])?;
        }
        requests += 1;
    }
    let mut data = 0;
    for one in all::<SnapshotSessionData>(client).await? {
        end::delete(client, &one).await?;
        data += 1;
    }
    println!("deleted {requests} SnapshotSessionRequests and {data} SnapshotSessionData");
    Ok(())
}

/// All objects of a kind; none if the kind is not defined any more.
async fn all<K: Object>(client: &Client) -> kube::Result<Vec<K>> {
    match list(&Api::all(client.clone()), ListParams::default(), |_| true).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(Vec::new()),
        found => found,
    }
}
