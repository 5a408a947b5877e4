//! What is told of a pod, as kubelet would tell it. It is no part of a call: that is answered whether or not it can be told.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::Semaphore;

use super::memory::PodRef;
use crate::grpc::cut;
use crate::kubernetes::cache::in_time;

/// The same of a pod is told once in so long: kubelet repeats a call that fails every few seconds.
const TELL_AGAIN: Duration = Duration::from_secs(60);
/// Of so many different things at most it is known when they were told; more are not told.
const MAX_TOLD: usize = 1024;
/// Events under way; more are not told.
const MAX_UNDER_WAY: usize = 32;
/// Bytes of an event's message, at most (the API server takes 1 KiB).
const MAX_MESSAGE: usize = 1000;
const COMPONENT: &str = "csi-loopback-node-proxy";

/// Cheap to clone.
#[derive(Clone)]
pub struct Events {
    client: Client,
    node: String,
    told: Arc<Mutex<BTreeMap<(String, String), Instant>>>,
    under_way: Arc<Semaphore>,
}

impl Events {
    pub fn new(client: Client, node: &str) -> Self {
        let under_way = Arc::new(Semaphore::new(MAX_UNDER_WAY));
        Self { client, node: node.to_owned(), told: Arc::default(), under_way }
    }

    /// Tells the pod's readers what is the matter with a volume's mount.
    pub fn failed_mount(&self, pod: &PodRef, message: &str) {
        let Ok(permit) = self.under_way.clone().try_acquire_owned() else { return };
        if pod.name.is_empty() || !self.is_news(&pod.uid, message) {
            return;
        }
        let event = event(pod, &self.node, message);
        let events: Api<Event> = Api::namespaced(self.client.clone(), &pod.namespace);
        tokio::spawn(async move {
            let _permit = permit;
            if let Err(error) = in_time(events.create(&PostParams::default(), &event)).await {
                tracing::warn!(%error, "an event could not be told");
            }
        });
    }

    fn is_news(&self, uid: &str, message: &str) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.retain(|_, at| at.elapsed() < TELL_AGAIN);
        let key = (uid.to_owned(), message.to_owned());
        let is_news = told.len() < MAX_TOLD && !told.contains_key(&key);
        if is_news {
            told.insert(key, Instant::now());
        }
        is_news
    }
}

fn event(pod: &PodRef, node: &str, message: &str) -> Event {
    let now = Time(k8s_openapi::jiff::Timestamp::now());
    Event {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}.", pod.name)),
            namespace: Some(pod.namespace.clone()),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            name: Some(pod.name.clone()),
            namespace: Some(pod.namespace.clone()),
            uid: Some(pod.uid.clone()),
            ..ObjectReference::default()
        },
        type_: Some("Warning".into()),
        reason: Some("FailedMount".into()),
        message: Some(cut(message, MAX_MESSAGE)),
        source: Some(EventSource {
            component: Some(COMPONENT.into()),
            host: Some(node.to_owned()),
        }),
        reporting_component: Some(COMPONENT.into()),
        reporting_instance: Some(node.to_owned()),
        first_timestamp: Some(now.clone()),
        last_timestamp: Some(now),
        count: Some(1),
        ..Event::default()
    }
}
