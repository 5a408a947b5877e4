//! The endpoint of a Service on each node, from its EndpointSlices, which the control plane writes. With
//! nothing else is a node's address found: no handle and no other object names one.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};

use super::cache::{Cache, Clients, Key, in_time};
use super::cached::SERVICE;
use telemetry::shutdown::Shutdown;

/// Watches the EndpointSlices of one Service. Clones share the watch.
#[derive(Clone)]
pub struct NodeEndpoints {
    service: Key,
    slices: Cache<EndpointSlice>,
    nodes: Api<Node>,
}

impl NodeEndpoints {
    /// Starts the watch.
    pub fn start(clients: Clients, service: Key, shutdown: Shutdown) -> Self {
        let Clients { watch, lookups } = clients;
        let select = watcher::Config::default().labels(&format!("{SERVICE}={}", service.name));
        let nodes = Api::all(lookups.clone());
        let of = move |namespace: &str| Api::namespaced(lookups.clone(), namespace);
        let watched = Api::namespaced(watch, &service.namespace);
        Self { slices: Cache::start(watched, of, select, service_of, shutdown), service, nodes }
    }

    /// The address of the endpoint on this node that accepts connections.
    ///
    /// # Errors
    /// The EndpointSlices cannot be read.
    pub async fn on(&self, node: &str) -> Result<Option<SocketAddr>, Arc<kube::Error>> {
        let slices = self.slices.with_recent(&self.service.name).await?;
        Ok(slices.iter().find_map(|slice| address(slice, node)))
    }

    /// Whether the cluster has a node with this name.
    ///
    /// # Errors
    /// The Node cannot be read.
    pub async fn has_node(&self, node: &str) -> kube::Result<bool> {
        Ok(in_time(self.nodes.get_metadata_opt(node)).await?.is_some())
    }
}

fn service_of(slice: &EndpointSlice) -> Option<Cow<'_, str>> {
    slice.labels().get(SERVICE).map(Cow::from)
}

fn address(slice: &EndpointSlice, node: &str) -> Option<SocketAddr> {
    let port = slice.ports.iter().flatten().find_map(|port| port.port)?;
    let port = u16::try_from(port).ok().filter(|port| *port != 0)?;
    let here = |endpoint: &&Endpoint| endpoint.node_name.as_deref() == Some(node);
    let usable = slice.endpoints.iter().filter(here).find(|endpoint| is_usable(endpoint))?;
    let address: IpAddr = usable.addresses.iter().find_map(|text| text.parse().ok())?;
    Some(SocketAddr::new(address, port))
}

/// An unknown readiness counts as ready (EndpointConditions).
fn is_usable(endpoint: &Endpoint) -> bool {
    endpoint.conditions.as_ref().is_none_or(|conditions| {
        conditions.ready != Some(false) && conditions.terminating != Some(true)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_is_reached_at_its_own_ready_endpoint() {
        let endpoint = |node: &str, address: &str, conditions: serde_json::Value| json!({ "addresses": [address], "nodeName": node, "conditions": conditions });
        let slice: EndpointSlice = serde_json::from_value(json!({
            "addressType": "IPv4",
            "ports": [{ "name": "metadata", "port": 7443 }],
            "endpoints": [
                endpoint("a", "10.0.0.1", json!({ "ready": false })),
                endpoint("a", "10.0.0.2", json!({ "ready": true, "terminating": true })),
                endpoint("a", "10.0.0.3", json!({ "ready": true })),
                endpoint("b", "10.0.0.4", json!({ "ready": false })),
                endpoint("c", "fd00::5", json!({})),
                endpoint("d", "d.example.com", json!({ "ready": true })),
                json!({ "addresses": ["10.0.0.6"] }),
            ],
        }))
        .unwrap();
        let at = |node: &str| address(&slice, node).map(|address| address.to_string());
        assert_eq!(at("a").as_deref(), Some("10.0.0.3:7443"));
        assert_eq!(at("c").as_deref(), Some("[fd00::5]:7443"));
        for none in ["b", "d", "e", ""] {
            assert_eq!(at(none), None, "{none}");
        }
    }
}
