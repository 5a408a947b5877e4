//! What all pods of this program have in common. A webhook may add containers to a pod, which do not
//! end with it: the pod opts out of meshes, and only its own container counts.

use k8s_openapi::api::core::v1::{ContainerState, Pod};
use serde_json::Value;

const LABELS: [(&str, &str); 3] = [
    ("sidecar.istio.io/inject", "false"),
    ("istio.io/dataplane-mode", "none"),
    ("kuma.io/sidecar-injection", "disabled"),
];
const ANNOTATIONS: [(&str, &str); 4] = [
    ("sidecar.istio.io/inject", "false"),
    ("linkerd.io/inject", "disabled"),
    ("kuma.io/sidecar-injection", "disabled"),
    ("consul.hashicorp.com/connect-inject", "false"),
];

/// Adds the labels and annotations of a pod to which no mesh adds a container.
pub fn outside_meshes(metadata: &mut Value) {
    for (place, all) in [("labels", &LABELS[..]), ("annotations", &ANNOTATIONS)] {
        for (key, value) in all {
            metadata[place][key] = (*value).into();
        }
    }
}

/// The state of the container with this name.
pub fn container_state<'p>(pod: &'p Pod, name: &str) -> Option<&'p ContainerState> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses.iter().find(|status| status.name == name)?.state.as_ref()
}
