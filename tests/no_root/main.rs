//! What holds of files and messages alone: these tests run as any user, in parallel.

mod deploy_crds;
mod fuzz;
mod language;
mod requirements;
mod tree;
mod wire;
