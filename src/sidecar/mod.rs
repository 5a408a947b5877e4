//! The mode `sidecar`: the front door of a CSI driver for backup applications (KEP-3314). It sits in the driver's pod,
//! serves the Kubernetes SnapshotMetadata API over TLS, as released, with session tokens, or both, and pages of changed blocks
//! over HTTPS to the aggregated API server, finds out who asks and
//! whether they may, turns names of Kubernetes into handles of the driver, and relays the driver's answer as it is.
//!
//! It keeps no state but what watches and reviews remember for a while: any number of replicas may run.

mod access;
mod args;
mod bases;
mod call;
mod cbt_http;
mod check;
mod driver_link;
mod fields;
mod metrics;
pub mod publish;
mod refusal;
mod relay;
mod released;
mod request;
mod resolve;
mod secrets;
mod server;
mod service;
mod session;

pub use args::Args;
pub use server::run;
