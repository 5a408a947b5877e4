//! Tests of files and messages. They run as any user, in parallel.

mod architecture;
mod chart;
mod conformance;
mod deploy_crds;
mod fuzz;
mod generated;
mod language;
mod monitoring;
mod names;
mod requirements;
mod tree;
mod versions;
mod wire;
