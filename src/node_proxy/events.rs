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
    told: Arc<Mutex<Told>>,
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
        let is_news = {
            let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            told.is_news(&pod.uid, message, Instant::now())
        };
        if pod.name.is_empty() || !is_news {
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
}

/// What was told of whom, and when.
#[derive(Debug, Default)]
struct Told(BTreeMap<(String, String), Instant>);

impl Told {
    fn is_news(&mut self, uid: &str, message: &str, now: Instant) -> bool {
        self.0.retain(|_, at| now.duration_since(*at) < TELL_AGAIN);
        let key = (uid.to_owned(), message.to_owned());
        let is_news = self.0.len() < MAX_TOLD && !self.0.contains_key(&key);
        if is_news {
            self.0.insert(key, now);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_of_a_pod_is_told_once_a_minute() {
        let (mut told, begun) = (Told::default(), Instant::now());
        assert!(told.is_news("u", "a", begun));
        assert!(!told.is_news("u", "a", begun + TELL_AGAIN / 2));
        assert!(told.is_news("u", "b", begun) && told.is_news("w", "a", begun));
        assert!(told.is_news("u", "a", begun + TELL_AGAIN));
    }

    #[test]
    fn of_many_things_a_bounded_number_is_told() {
        let (mut told, now) = (Told::default(), Instant::now());
        let news = (0..2 * MAX_TOLD).filter(|n| told.is_news("u", &n.to_string(), now));
        assert_eq!(news.count(), MAX_TOLD);
    }

    #[test]
    fn an_event_is_of_its_pod_and_not_longer_than_the_api_server_takes() {
        let pod = PodRef { namespace: "n".into(), name: "p".into(), uid: "u".into() };
        let event = event(&pod, "node", &"words ".repeat(1000));
        assert!(event.message.unwrap().len() <= 1024);
        let of = event.involved_object;
        assert_eq!(
            (of.kind.as_deref(), of.name.as_deref(), of.uid.as_deref()),
            (Some("Pod"), Some("p"), Some("u"))
        );
        assert_eq!(
            (event.type_.as_deref(), event.reason.as_deref()),
            (Some("Warning"), Some("FailedMount"))
        );
    }
}
