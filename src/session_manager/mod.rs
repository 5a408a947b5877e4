//! The mode `session-manager`: snapshot sessions (KEP-3314, session design, "The Snapshot Session Manager"). A validating webhook
//! lets only those ask for a session who may read its snapshots; a controller turns each request into a session, for
//! which a driver's sidecar has a SnapshotSessionData and the backup application a token, and ends it when its time is over.
//!
//! Any number of replicas may run: all serve the webhook, one of them leads and runs the controller. What they know is in
//! the cluster.

mod args;
mod cause;
mod clean_up;
mod controller;
mod end;
mod establish;
mod finalizer;
mod lifetime;
mod metrics;
mod resolve;
mod server;
mod status;
mod sweep;
mod token;
mod webhook;

pub use args::Args;
pub use server::run;
