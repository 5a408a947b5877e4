//! The mode `runtime-ops`, crust_ops (KEP-2857, "Container RUntime STorage Operations (crust_ops) Proxy"): a CSI plugin says on
//! a unix socket which volume a container runtime is to mount, and asks how it is; this hands it over by files
//! ([`crate::crust`], or Kata's own) and runs the runtime's program for the rest.

mod args;
mod server;

pub use args::Args;
pub use server::run;
