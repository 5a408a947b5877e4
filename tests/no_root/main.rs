//! Tests of files and messages. They run as any user, in parallel.

mod architecture;
mod deploy_crds;
mod fuzz;
mod language;
mod monitoring;
mod names;
mod requirements;
mod source;
mod tree;
mod versions;
mod wire;
