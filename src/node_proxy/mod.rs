//! The mode `node-proxy`: between kubelet and a CSI driver, any driver, it does what the proposal for runtime assisted mounting
//! asks of kubelet (KEP-2857, "Enhancements to Kubelet"), since a kubelet of today does not. A pod opts in by an annotation; calls
//! for its volumes get the proposal's fields, if the driver has the capabilities; that a volume was left to a runtime is
//! remembered on disk.
//!
//! Calls are passed on as the bytes that they are. Four are looked at, and added to, never written anew: what a later CSI
//! has in them stays.

mod append;
mod args;
mod forward;
mod memory;
mod node;
mod opt_in;
mod pods;
mod reports;
mod server;

pub use args::Args;
pub use server::run;
