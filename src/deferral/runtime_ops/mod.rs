//! The mode `runtime-ops`: crust_ops (KEP-2857, "Container RUntime STorage Operations (crust_ops)
//! Proxy"). Over a unix socket, a CSI plugin hands a volume to a container runtime and requests its
//! statistics and expansion. crust_ops writes the files of the volume ([`crate::crust`] or Kata's
//! layout) and runs the runtime's program.
//!
//! A call passes through [`request`] (validation), [`layout`] (files and program), [`program`]
//! (bounded execution) and [`output`] (parsing the program's output). A failure is a [`refusal`]
//! with one gRPC code. All state is in the entries.

mod args;
mod collect;
mod layout;
mod locks;
pub mod output;
mod program;
mod refusal;
mod request;
mod server;
mod service;

pub use args::Args;
pub use server::run;
