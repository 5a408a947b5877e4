//! The mode `node-proxy`: between kubelet and a CSI driver, any driver, it does what the proposal for runtime assisted mounting
//! asks of kubelet (KEP-2857, "Enhancements to Kubelet"), since a kubelet of today does not. A pod opts in by an annotation; calls
//! for its volumes get the proposal's fields, if the driver has the capabilities; that a volume was left to a runtime is
//! remembered on disk.
//!
//! Calls are passed on as the bytes that they are ([`forward`]). Four are looked at ([`node`], [`publish`]), and added to, never written
//! anew ([`message`]): what a later CSI has in them stays. A pod that did not opt in gets no failure from here that it would not
//! have had without.

mod args;
pub(crate) mod call;
mod disk;
mod events;
mod forward;
mod host;
mod memory;
pub(crate) mod message;
mod node;
pub(crate) mod place;
mod pods;
mod publish;
mod refusal;
mod reports;
mod server;
pub(crate) mod wish;

pub use args::Args;
pub use server::run;
