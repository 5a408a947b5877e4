//! Runtime assisted mounting (KEP-2857) as kubelet sees it: the real driver over its socket, with a crust_ops that a test can
//! make fail, and with the real one. Whatever fails, nothing is ever mounted on this host instead.

mod away;
mod crust_ops;
mod downgrade;
mod inline;
mod publish;
mod real;
mod refused;
mod rig;
mod skew;
