//! The mode `session-manager`: snapshot sessions (KEP-3314, session design, "The Snapshot Session
//! Manager"). A validating webhook admits a request only if its creator may get the snapshots and
//! the namespace has room. A controller turns each request into a session, with a
//! SnapshotSessionData for the driver's sidecar and a token for the backup application, and deletes
//! it at its expiry.
//!
//! Any number of replicas may run: all serve the webhook, the leader runs the controller. All state
//! is in the cluster.

mod access_policy;
mod args;
mod cause;
mod clean_up;
mod context;
mod controller;
mod end;
mod establish;
mod finalizer;
mod lifetime;
mod metrics;
mod resolve;
mod server;
mod session_limit;
mod status;
mod sweep;
mod token;
mod webhook;

/// This role, in errors about its permissions.
const ROLE: &str = "session manager";

pub use args::Args;
pub use server::run;
