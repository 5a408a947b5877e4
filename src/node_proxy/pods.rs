//! The pods of this node. One that the watch has told of is known also while the API server is away.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::memory::PodRef;
use super::refusal::{Refusal, Result};
use crate::kubernetes::cache::{Cache, Key, in_time};
use crate::kubernetes::defer_annotation;
use crate::telemetry::shutdown::Shutdown;

/// Time between two looks at what the watch has told.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Time between two questions for a pod.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Cheap to clone.
#[derive(Clone)]
pub struct Pods {
    client: Client,
    cache: Cache<Pod>,
    wait: Duration,
}

impl Pods {
    /// Starts to watch the pods of a node. A call waits at most so long for what the API server is to tell.
    pub fn start(client: Client, node: &str, wait: Duration, shutdown: Shutdown) -> Self {
        let one = client.clone();
        let of = move |namespace: &str| Api::namespaced(one.clone(), namespace);
        let of_node = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
        let cache = Cache::start(Api::all(client.clone()), of, of_node, uid, shutdown);
        Self { client, cache, wait }
    }

    /// The pod with this uid, by the watch or else by namespace and name. None where nobody can say within the time.
    pub async fn find(&self, uid: &str, named: Option<&(String, String)>) -> Option<Arc<Pod>> {
        let told = async {
            loop {
                if let Some(pod) = self.known(uid) {
                    return pod;
                }
                sleep(LOOK_AGAIN).await;
            }
        };
        let fetched = async {
            let Some((namespace, name)) = named else { return pending().await };
            let key = Key::new(namespace, name);
            loop {
                match self.cache.fetch(&key).await {
                    // One of the same name and another uid is another pod.
                    Ok(Some(pod)) if pod.metadata.uid.as_deref() == Some(uid) => return pod,
                    _ => sleep(ASK_AGAIN).await,
                }
            }
        };
        tokio::select! {
            biased;
            pod = told => Some(pod),
            pod = fetched => Some(pod),
            () = sleep(self.wait) => None,
        }
    }

    /// The pod with this uid, as the watch has told it last.
    pub fn known(&self, uid: &str) -> Option<Arc<Pod>> {
        self.cache.last_told_with(uid).pop()
    }

    /// The uids of all pods of the node that have opted in. None while the watch does not run.
    pub fn opted_in(&self) -> Option<BTreeSet<String>> {
        let pods = self.cache.all()?.into_iter();
        let opted = pods.filter(|pod| !defer_annotation::names(pod).is_empty());
        Some(opted.filter_map(|pod| pod.metadata.uid.clone()).collect())
    }

    /// Tells when the watch has told something.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.cache.changes()
    }

    /// Whether the claim that is bound to a PersistentVolume is one of those that are left.
    pub async fn ask(
        &self,
        pod: &Pod,
        claims: &BTreeMap<String, bool>,
        volume: &str,
    ) -> Result<bool> {
        let unknown = |why: String| Refusal::ClaimsUnknown { volume: volume.to_owned(), why };
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), namespace);
        let asked = async {
            for (claim, opted) in claims {
                let found = in_time(api.get_opt(claim)).await.map_err(|error| {
                    unknown(format!(
                        "asking for the claim {claim:?} (get persistentvolumeclaims): {error}"
                    ))
                })?;
                let bound = found.and_then(|claim| claim.spec).and_then(|spec| spec.volume_name);
                if bound.as_deref() == Some(volume) {
                    return Ok(*opted);
                }
            }
            Err(unknown("none of the pod's claims is".into()))
        };
        let late = |_| unknown(format!("the API server does not say within {:?}", self.wait));
        timeout(self.wait, asked).await.map_err(late)?
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

fn uid(pod: &Pod) -> Option<Cow<'_, str>> {
    pod.metadata.uid.as_deref().map(Into::into)
}
