//! The mode `admission`: webhooks for pods with volumes of one driver. One sets what an inline volume of read-only content needs in a
//! pod (KEP-596, "Read-only volumes"); one holds pods with inline volumes to the policy of their namespace ("Security Considerations").
//! One names, in an annotation of the pod, the claims and inline volumes that the pod's container runtime mounts (KEP-2857); and one,
//! whichever the driver, keeps that annotation.
//!
//! Any number of replicas may run; none keeps anything.

mod args;
mod claims;
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
