//! The mode `runtime-ops`, crust_ops (KEP-2857, "Container RUntime STorage Operations (crust_ops) Proxy"): a CSI plugin says on
//! a unix socket which volume a container runtime is to mount, and asks how it is; this hands it over by files
//! ([`crate::crust`], or Kata's own) and runs the runtime's program for the rest.
//!
//! A call goes through [`request`] (what was asked, checked), [`layout`] (which files, which program), [`program`] (run it within
//! bounds) and [`answer`] (what it said); why not is a [`refusal`], one reason, one code. Nothing is kept here: all there is to
//! know is in the entries.

pub(crate) mod answer;
mod args;
mod collect;
mod layout;
mod program;
mod refusal;
mod request;
mod server;
mod service;
mod turns;

pub use args::Args;
pub use server::run;
