//! Runtime assisted mounting (KEP-2857) with kubelet's calls: the real driver over its socket, with
//! a scripted crust_ops that can fail, and with the real one. No failure leads to a mount on this
//! host.

mod away;
mod crust_ops;
mod downgrade;
mod inline;
mod publish;
mod real;
mod refused;
mod rig;
