//! Watches the pods of this node. Pods that the watch has reported stay available while the API
//! server is not.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::refusal::{Refusal, Result};
use super::store::PodRef;
use kubernetes::cache::{Cache, Key, in_time};
use kubernetes::defer_annotation;
use kubernetes::pod::{CONFIG_HASH, MIRROR, Pod};
use telemetry::shutdown::Shutdown;

/// Interval of polling the watch's cache.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Interval of requests for a pod.
const FETCH_INTERVAL: Duration = Duration::from_secs(1);

/// The pods of this node; clones share the cache.
#[derive(Clone)]
pub struct Pods {
    client: Client,
    cache: Cache<Pod>,
    wait: Duration,
}

impl Pods {
    /// Starts to watch the pods of a node. `wait` limits how long a call waits for the API server.
    pub fn start(client: Client, node: &str, wait: Duration, shutdown: Shutdown) -> Self {
        let one = client.clone();
        let of = move |namespace: &str| Api::namespaced(one.clone(), namespace);
        let of_node = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
        let cache = Cache::start(Api::all(client.clone()), of, of_node, kubelets_uid, shutdown);
        Self { client, cache, wait }
    }

    /// Finds the pod with this uid in the watch's cache, or else by namespace and name. `None`: it
    /// was not found within the time limit.
    pub async fn find(&self, uid: &str, named: Option<&(String, String)>) -> Option<Arc<Pod>> {
        let watched = async {
            loop {
                if let Some(pod) = self.known(uid) {
                    return pod;
                }
                sleep(POLL_INTERVAL).await;
            }
        };
        let fetched = async {
            let Some((namespace, name)) = named else { return pending().await };
            let key = Key::new(namespace, name);
            loop {
                match self.cache.fetch(&key).await {
                    // A pod with the same name and another uid is a different pod.
                    Ok(Some(pod)) if kubelets_uid(&pod).as_deref() == Some(uid) => return pod,
                    _ => sleep(FETCH_INTERVAL).await,
                }
            }
        };
        tokio::select! {
            biased;
            pod = watched => Some(pod),
            pod = fetched => Some(pod),
            () = sleep(self.wait) => None,
        }
    }

    /// The pod with this uid, as the watch last reported it. A pod that only claims to be the
    /// mirror of that uid is not preferred over the pod that has it.
    pub fn known(&self, uid: &str) -> Option<Arc<Pod>> {
        let mut found = self.cache.last_cached_with(uid);
        let own = found.iter().position(|pod| pod.metadata.uid.as_deref() == Some(uid));
        match own {
            Some(own) => Some(found.swap_remove(own)),
            None => found.pop(),
        }
    }

    /// The uids of all pods of the node that have opted in. `None`: the watch does not run.
    pub fn opted_in(&self) -> Option<BTreeSet<String>> {
        let pods = self.cache.all()?.into_iter();
        let opted = pods.filter(|pod| !defer_annotation::names(pod).is_empty());
        Some(opted.filter_map(|pod| kubelets_uid(&pod).map(Cow::into_owned)).collect())
    }

    /// Whether the watch runs.
    pub fn is_live(&self) -> bool {
        self.cache.is_live()
    }

    /// Changes whenever the watch has reported something.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.cache.changes()
    }

    /// Finds which of `claims` is bound to a PersistentVolume, and whether it is deferred.
    pub async fn find_claim(
        &self,
        pod: &Pod,
        claims: &BTreeMap<String, bool>,
        volume: &str,
    ) -> Result<(String, bool)> {
        let unknown = |why: String| Refusal::ClaimsUnknown { volume: volume.to_owned(), why };
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), namespace);
        let search = async {
            for (claim, opted) in claims {
                let found = in_time(api.get_opt(claim)).await.map_err(|error| {
                    unknown(format!(
                        "reading the claim {claim:?} (get persistentvolumeclaims): {error}"
                    ))
                })?;
                let bound = found.and_then(|claim| claim.spec).and_then(|spec| spec.volume_name);
                if bound.as_deref() == Some(volume) {
                    return Ok((claim.clone(), *opted));
                }
            }
            Err(unknown("none of the pod's claims is bound to it".into()))
        };
        let late = |_| unknown(format!("the API server did not respond within {:?}", self.wait));
        timeout(self.wait, search).await.map_err(late)?
    }
}

impl PodRef {
    pub fn of(pod: &Pod) -> Self {
        let metadata = pod.metadata.clone();
        Self {
            namespace: metadata.namespace.unwrap_or_default(),
            name: metadata.name.unwrap_or_default(),
            uid: metadata.uid.unwrap_or_default(),
        }
    }
}

/// The uid that kubelet uses for the pod. kubelet chooses the uid of a static pod, and its mirror
/// pod has it as an annotation.
fn kubelets_uid(pod: &Pod) -> Option<Cow<'_, str>> {
    let metadata = &pod.metadata;
    let annotation = |name| metadata.annotations.as_ref()?.get(name);
    let owners = metadata.owner_references.iter().flatten();
    let is_mirror =
        annotation(MIRROR).is_some() && owners.clone().any(|owner| owner.kind == "Node");
    let uid = match annotation(CONFIG_HASH) {
        Some(hash) if is_mirror => Some(hash),
        _ => metadata.uid.as_ref(),
    };
    uid.map(|uid| uid.as_str().into())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn uid(annotations: Value, owner: &str) -> String {
        let owners = json!([{ "apiVersion": "v1", "kind": owner, "name": "n", "uid": "of-owner" }]);
        let metadata =
            json!({ "uid": "api", "annotations": annotations, "ownerReferences": owners });
        let pod: Pod = serde_json::from_value(json!({ "metadata": metadata })).unwrap();
        kubelets_uid(&pod).unwrap().into_owned()
    }

    #[test]
    fn a_static_pod_has_the_uid_of_its_mirrors_annotation() {
        let mirror = json!({ CONFIG_HASH: "static", MIRROR: "static" });
        assert_eq!(uid(mirror.clone(), "Node"), "static");
        // Annotations that any user can write do not make a mirror pod.
        assert_eq!(uid(mirror, "ReplicaSet"), "api");
        assert_eq!(uid(json!({ CONFIG_HASH: "static" }), "Node"), "api");
        assert_eq!(uid(json!({}), "Node"), "api");
    }
}
