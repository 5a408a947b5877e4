//! The mode `admission`: webhooks for pods with inline volumes of one driver (KEP-596, "Read-only volumes" and "Security
//! Considerations"). One sets what a volume of read-only content needs in a pod, and which volumes the pod's container runtime
//! mounts (KEP-2857); one holds pods to the policy of their namespace. And one,
//! whichever the driver, keeps the annotation by which pods opt in to mounts by their runtime.
//!
//! Any number of replicas may run; none keeps anything.

mod args;
mod deferral;
mod judge;
mod metrics;
mod opt_in;
mod policy;
mod read_only;
mod server;
mod volumes;
mod webhooks;

pub use args::Args;
pub use server::run;

/// Who is told to have no right.
const ROLE: &str = "admission webhooks";
