//! `--clean-up`: for uninstalling. Deletes every session, with or without a manager that runs, so that no finalizer keeps
//! an object and nothing is left behind.

use kube::api::{DeleteParams, ListParams};
use kube::{Api, Client, ResourceExt};

use super::end;
use crate::kubernetes::cache::in_time;
use crate::kubernetes::session::{SnapshotSessionData, SnapshotSessionRequest};

/// Objects in one page of a list.
const PAGE: u32 = 500;

/// Deletes all requests and all data.
///
/// # Errors
/// What the API server refuses.
pub async fn run(client: &Client) -> anyhow::Result<()> {
    let mut requests = 0;
    for request in all::<SnapshotSessionRequest>(client).await? {
        let namespace = request.namespace().unwrap_or_default();
        let api: Api<SnapshotSessionRequest> = Api::namespaced(client.clone(), &namespace);
        let name = request.name_any();
        tolerate(in_time(api.delete(&name, &DeleteParams::default())).await.map(drop), 404)?;
        // A manager that runs may be faster.
        if let Some(still) = in_time(api.get_opt(&name)).await? {
            tolerate(end::release(&api, &still).await, 409)?;
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

/// Everything of a kind; nothing where the kind is not known any more.
async fn all<K>(client: &Client) -> kube::Result<Vec<K>>
where
    K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let api: Api<K> = Api::all(client.clone());
    let mut found = Vec::new();
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let list = match in_time(api.list(&page)).await {
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(found),
            list => list?,
        };
        found.extend(list.items);
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page.continue_token = Some(token),
            None => return Ok(found),
        }
    }
}

fn tolerate(outcome: kube::Result<()>, code: u16) -> kube::Result<()> {
    match outcome {
        Err(kube::Error::Api(status)) if status.code == code => Ok(()),
        outcome => outcome,
    }
}
