//! Every role with a real Kubernetes API server, which the tests share. Names of namespaces and
//! drivers are unique to a test.

mod admission;
mod aggregated_api;
mod aggregated_surface;
mod cbt_http;
mod conformance;
mod definitions;
mod former_definition;
mod frozen;
mod kubernetes;
mod movers;
mod node_forget;
mod node_proxy;
mod node_proxy_safety;
mod nodes;
mod session;
mod session_api;
mod session_webhook;
mod sidecar;
mod sidecar_certificates;
mod snapshot_delta_flow;
