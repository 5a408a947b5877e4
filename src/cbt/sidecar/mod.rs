//! The mode `sidecar`: the API endpoint of a CSI driver for backup applications (KEP-3314). It runs
//! in the driver's pod. It serves the Kubernetes SnapshotMetadata API over TLS, as released, with
//! session tokens, or both, and pages of changed blocks over HTTPS to the aggregated API server. It
//! authenticates and authorizes callers, resolves Kubernetes names to the driver's handles, and
//! relays the driver's responses unchanged.
//!
//! State consists of watches and cached reviews, so any number of replicas may run.

mod access;
mod args;
mod call;
mod cbt_http;
mod check;
mod directory;
mod driver_link;
mod fields;
mod metrics;
mod nodes;
pub mod publish;
mod refusal;
mod relay;
mod request;
mod resolve;
mod secrets;
mod server;
mod service;
mod session;
mod snapshot_metadata;
pub mod standalone;
mod stream_limit;

pub use args::Args;
pub use server::run;
