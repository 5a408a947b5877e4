//! What holds of files and messages alone: these tests run as any user, in parallel.

mod deploy_crds;
mod fuzz;
mod session_promises;
mod wire;
