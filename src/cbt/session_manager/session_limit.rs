//! The maximum number of requests in a namespace. Their number comes from a watch, so that a flood of
//! creations over the limit causes no call to the API server. While the watch is not running, it
//! comes from a list of at most as many objects as the limit. Both contain only metadata.
//!
//! Requests that were admitted and not reported yet are not counted: concurrent creations can exceed
//! the limit. Only a ResourceQuota is exact.

use std::borrow::Cow;

use kube::api::ListParams;
use kube::core::PartialObjectMeta;
use kube::{Api, Client};

use super::ROLE;
use kubernetes::admission::{Refusal, Verdict};
use kubernetes::cache::{self, Cache, Clients, in_time};
use kubernetes::client::failure;
use kubernetes::session::SnapshotSessionRequest;
use telemetry::shutdown::Shutdown;

type Metadata = PartialObjectMeta<SnapshotSessionRequest>;

/// The limit of each namespace. Clones share the watch.
#[derive(Clone)]
pub struct SessionLimit {
    max: u32,
    /// Indexed by namespace.
    requests: Cache<Metadata>,
    client: Client,
}

impl SessionLimit {
    /// Starts to watch all requests. `None` if `max` is 0, which means no limit.
    pub fn start(max: u32, clients: Clients, shutdown: &Shutdown) -> Option<Self> {
        let client = clients.lookups.clone();
        let watch = || cache::of_all_namespaces(clients, namespace, shutdown.clone());
        (max > 0).then(|| Self { max, requests: watch(), client })
    }

    /// Whether the namespace has room for another request.
    pub async fn check(&self, namespace: &str) -> Verdict {
        let count = self.count(namespace).await.map_err(|error| {
            let failure = failure(ROLE, "list SnapshotSessionRequests", &error);
            Refusal::unknown("the number of SnapshotSessionRequests in the namespace", &failure)
        })?;
        let max = self.max;
        if count < u64::from(max) {
            return Ok(());
        }
        Err(Refusal::not_allowed(format!(
            "the namespace {namespace} has {count} SnapshotSessionRequests, and the maximum is {max}; delete some, wait \
             until they expire, or increase --max-sessions-per-namespace of the session manager"
        )))
    }

    async fn count(&self, namespace: &str) -> kube::Result<u64> {
        if let Some(count) = self.requests.count_with(namespace) {
            return Ok(count as u64);
        }
        let requests: Api<Metadata> = Api::namespaced(self.client.clone(), namespace);
        let page = in_time(requests.list(&ListParams::default().limit(self.max))).await?;
        let more = page.metadata.remaining_item_count.and_then(|more| u64::try_from(more).ok());
        Ok(page.items.len() as u64 + more.unwrap_or(0))
    }
}

fn namespace(request: &Metadata) -> Option<Cow<'_, str>> {
    request.metadata.namespace.as_deref().map(Into::into)
}

#[cfg(test)]
pub mod tests {
    use kube::runtime::watcher;
    use serde_json::json;

    use super::*;
    use kubernetes::fake_api::{FakeApi, WATCHED};

    /// Creates a request in the namespace `apps`.
    pub fn put(api: &FakeApi, name: &str) {
        let path = "/apis/cbt.storage.k8s.io/v1alpha2/namespaces/apps/snapshotsessionrequests";
        let metadata = json!({ "name": name, "namespace": "apps" });
        api.put(&format!("{path}/{name}"), json!({ "metadata": metadata, "spec": {} }));
    }

    /// A limit without a watch, which this API server does not permit.
    pub fn limit(api: &FakeApi, max: u32) -> SessionLimit {
        let (_phase, shutdown) = Shutdown::manual();
        let (all, client) = (Api::all(api.client()), api.client());
        let of = |namespace: &str| panic!("a lookup in {namespace}");
        let select = watcher::Config::default().labels(WATCHED);
        SessionLimit { max, requests: Cache::start(all, of, select, namespace, shutdown), client }
    }

    #[tokio::test]
    async fn a_number_that_is_not_known_refuses() {
        let api = FakeApi::default();
        api.fail();
        let refused = limit(&api, 2).check("apps").await.unwrap_err();
        assert_eq!(refused.code(), 503);
        assert!(refused.message().contains("list SnapshotSessionRequests"), "{refused:?}");
    }
}
