//! The mode `aggregated-api`: VolumeSnapshotDelta (KEP-3314, VolumeSnapshotDelta), served through the aggregation layer of the
//! Kubernetes API server. Created and never stored: each request is authenticated by the front proxy's word,
//! authorized by the API server, answered by the driver's sidecar, page by page.
//!
//! Any number of replicas may serve. One of them leads and keeps the conditions of DriverDiscovery objects.

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

/// What this role says of itself where it lacks a right.
const WHO: &str = "aggregated API server";
