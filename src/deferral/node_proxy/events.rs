//! Records events for pods, as kubelet does. Events are independent of calls: a call does not fail
//! when its event cannot be recorded.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::Semaphore;

use super::store::PodRef;
use common::text::truncate;
use kubernetes::cache::in_time;
use telemetry::task;

/// Interval at which an identical event of a pod is repeated. kubelet retries a failed call every
/// few seconds.
const REPEAT_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of different events within that interval; more are dropped.
const MAX_RECENT: usize = 1024;
/// Maximum number of events being recorded; more are dropped.
const MAX_IN_FLIGHT: usize = 32;
/// Maximum bytes of an event's message (the API server accepts 1 KiB).
const MAX_MESSAGE: usize = 1000;
const COMPONENT: &str = "csi-loopback-node-proxy";

/// Records events; clones share the limits.
#[derive(Clone)]
pub struct Events {
    client: Client,
    node: String,
    recent: Arc<Mutex<RecentEvents>>,
    in_flight: Arc<Semaphore>,
}

impl Events {
    pub fn new(client: Client, node: &str) -> Self {
        let in_flight = Arc::new(Semaphore::new(MAX_IN_FLIGHT));
        Self { client, node: node.to_owned(), recent: Arc::default(), in_flight }
    }

    /// Records a FailedMount event for the pod.
    pub fn failed_mount(&self, pod: &PodRef, message: &str) {
        let Ok(permit) = self.in_flight.clone().try_acquire_owned() else { return };
        let is_new = {
            let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
            recent.is_new(&pod.uid, message, Instant::now())
        };
        if pod.name.is_empty() || !is_new {
            return;
        }
        let event = event(pod, &self.node, message);
        let events: Api<Event> = Api::namespaced(self.client.clone(), &pod.namespace);
        task::spawn(async move {
            let _permit = permit;
            if let Err(error) = in_time(events.create(&PostParams::default(), &event)).await {
                tracing::warn!(%error, "failed to record event");
            }
        });
    }
}

/// The time of each recent event, by pod uid and message.
#[derive(Debug, Default)]
struct RecentEvents(BTreeMap<(String, String), Instant>);

impl RecentEvents {
    fn is_new(&mut self, uid: &str, message: &str, now: Instant) -> bool {
        self.0.retain(|_, at| now.duration_since(*at) < REPEAT_INTERVAL);
        let key = (uid.to_owned(), message.to_owned());
        let is_new = self.0.len() < MAX_RECENT && !self.0.contains_key(&key);
        if is_new {
            self.0.insert(key, now);
        }
        is_new
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
        message: Some(truncate(message, MAX_MESSAGE)),
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
    fn identical_events_are_recorded_once_a_minute() {
        let (mut recent, begun) = (RecentEvents::default(), Instant::now());
        assert!(recent.is_new("u", "a", begun));
        assert!(!recent.is_new("u", "a", begun + REPEAT_INTERVAL / 2));
        assert!(recent.is_new("u", "b", begun) && recent.is_new("w", "a", begun));
        assert!(recent.is_new("u", "a", begun + REPEAT_INTERVAL));
    }

    #[test]
    fn the_number_of_recorded_events_is_bounded() {
        let (mut recent, now) = (RecentEvents::default(), Instant::now());
        let new = (0..2 * MAX_RECENT).filter(|n| recent.is_new("u", &n.to_string(), now));
        assert_eq!(new.count(), MAX_RECENT);
    }

    #[test]
    fn an_event_names_its_pod_and_fits_the_api_limit() {
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
