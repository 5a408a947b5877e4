//! The mode `aggregated-api`: VolumeSnapshotDelta (KEP-3314, VolumeSnapshotDelta), served through
//! the aggregation layer of the Kubernetes API server. Objects are created and never stored: each
//! request is authenticated by the front proxy, authorized by the API server, and served by the
//! driver's sidecar, one page at a time.
//!
//! Any number of replicas may serve. The leader maintains the conditions of DriverDiscovery
//! objects.

mod accept;
mod args;
mod decode;
pub mod delta;
pub mod discovery;
pub mod endpoint;
pub mod failure;
mod front_proxy;
mod groups;
mod metrics;
mod openapi;
mod routes;
mod server;

pub use args::Args;
pub use server::run;

/// This role, in errors about its permissions.
const ROLE: &str = "aggregated API server";
/// Its listener, in metrics.
const LISTENER: &str = "api";
