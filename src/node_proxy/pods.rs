//! The pods of this node, and what is told of them. A pod that the watch has told of is known also while the API server is away.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::future::pending;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference, PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::PostParams;
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::time::sleep;

use super::opt_in::Place;
use crate::grpc::cut;
use crate::kubernetes::cache::{Cache, Key, in_time};
use crate::telemetry::shutdown::Shutdown;

/// Time between two looks at what the watch has told.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Time between two questions for a pod.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// The same of a pod is told once in so long: kubelet repeats a call that fails every few seconds.
const TELL_AGAIN: Duration = Duration::from_secs(60);
/// Bytes of an event's message, at most.
const MAX_MESSAGE: usize = 1000;
const COMPONENT: &str = "csi-loopback-node-proxy";

/// Which pod a call is for, where kubelet says more than the path does (pod info on mount).
#[derive(Debug, Clone)]
pub struct Named {
    pub namespace: String,
    pub name: String,
}

/// Cheap to clone.
#[derive(Clone)]
pub struct Pods {
    client: Client,
    cache: Cache<Pod>,
    node: String,
    wait: Duration,
    told: Arc<Mutex<BTreeMap<(String, String), Instant>>>,
}

impl Pods {
    /// Starts to watch the pods of a node.
    pub fn start(client: &Client, node: &str, wait: Duration, shutdown: Shutdown) -> Self {
        let one = client.clone();
        let of = move |namespace: &str| Api::namespaced(one.clone(), namespace);
        let of_node = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
        let cache = Cache::start(Api::all(client.clone()), of, of_node, uid, shutdown);
        Self { client: client.clone(), cache, node: node.to_owned(), wait, told: Arc::default() }
    }

    /// The pod of a call. None where nobody can say within the time: a pod that never opted in is not to wait for ever.
    pub async fn find(&self, place: &Place, named: Option<&Named>) -> Option<Arc<Pod>> {
        let told = async {
            loop {
                if let Some(pod) = self.cache.last_told_with(&place.pod_uid).pop() {
                    return pod;
                }
                sleep(LOOK_AGAIN).await;
            }
        };
        let fetched = async {
            let Some(Named { namespace, name }) = named else { return pending().await };
            let key = Key::new(namespace, name);
            loop {
                match self.cache.fetch(&key).await {
                    Ok(Some(pod)) if pod.metadata.uid.as_deref() == Some(&place.pod_uid) => {
                        return pod;
                    }
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

    /// The PersistentVolume that a claim is bound to.
    pub async fn volume_of(&self, namespace: &str, claim: &str) -> kube::Result<Option<String>> {
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), namespace);
        let found = in_time(claims.get_opt(claim)).await?;
        Ok(found.and_then(|claim| claim.spec).and_then(|spec| spec.volume_name))
    }

    /// Tells the pod's readers why its volume is not mounted, as kubelet would. It is no part of a call: that is answered already.
    pub fn failed_mount(&self, pod: &Pod, message: &str) {
        let (Some(namespace), Some(name)) = (&pod.metadata.namespace, &pod.metadata.name) else {
            return;
        };
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        if !self.is_news(&uid, message) {
            return;
        }
        let now = Time(k8s_openapi::jiff::Timestamp::now());
        let event = Event {
            metadata: ObjectMeta {
                generate_name: Some(format!("{name}.")),
                namespace: Some(namespace.clone()),
                ..ObjectMeta::default()
            },
            involved_object: ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Pod".into()),
                name: Some(name.clone()),
                namespace: Some(namespace.clone()),
                uid: Some(uid),
                ..ObjectReference::default()
            },
            type_: Some("Warning".into()),
            reason: Some("FailedMount".into()),
            message: Some(cut(message, MAX_MESSAGE)),
            source: Some(EventSource {
                component: Some(COMPONENT.into()),
                host: Some(self.node.clone()),
            }),
            reporting_component: Some(COMPONENT.into()),
            reporting_instance: Some(self.node.clone()),
            first_timestamp: Some(now.clone()),
            last_timestamp: Some(now),
            count: Some(1),
            ..Event::default()
        };
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        tokio::spawn(async move {
            if let Err(error) = in_time(events.create(&PostParams::default(), &event)).await {
                tracing::warn!(%error, "an event could not be told");
            }
        });
    }

    fn is_news(&self, uid: &str, message: &str) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.retain(|_, at| at.elapsed() < TELL_AGAIN);
        let key = (uid.to_owned(), message.to_owned());
        let is_news = !told.contains_key(&key);
        told.entry(key).or_insert_with(Instant::now);
        is_news
    }
}

fn uid(pod: &Pod) -> Option<Cow<'_, str>> {
    pod.metadata.uid.as_deref().map(Into::into)
}
