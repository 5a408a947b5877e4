//! The admission webhooks, called by a real API server for real pods, which no node runs.

mod deferral;
mod opt_in;
mod policy;
mod read_only;
pub mod rig;
mod service;
mod undone;
