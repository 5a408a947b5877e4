//! The mode `node-proxy`: a proxy between kubelet and any CSI driver. It implements kubelet's part
//! of runtime assisted mounting (KEP-2857, "Enhancements to Kubelet"), which no released kubelet
//! has. A pod opts in with an annotation. Calls for its volumes get the proposal's fields if the
//! driver has the capabilities, and the proxy stores deferred volumes on disk.
//!
//! All calls are forwarded as bytes ([`forward`]). Four calls are decoded ([`node`], [`publish`]),
//! and fields are appended without encoding the message again ([`message`]), so that unknown fields
//! survive. The proxy causes no failure for pods without the annotation that they would not have
//! without the proxy.

mod args;
pub mod call;
pub mod deferral_request;
mod events;
mod forward;
mod host_mounts;
pub mod message;
mod node;
mod pods;
mod proxy;
mod publish;
pub mod publish_target;
mod refusal;
mod reports;
mod server;
mod state_dir;
mod store;

pub use args::Args;
pub use server::run;
