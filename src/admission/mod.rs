//! The mode `admission`: webhooks for pods with volumes of one driver. They make content volumes
//! read-only (KEP-596, "Read-only volumes"), enforce the policy of the namespace for inline volumes
//! (KEP-596, "Security Considerations"), and set and validate the annotation that defers volumes to
//! the pod's container runtime (KEP-2857). The validation of the annotation applies to volumes of
//! every driver.
//!
//! The webhooks are stateless: any number of replicas may run.

mod args;
mod claims;
mod deferral;
mod metrics;
mod opt_in;
mod policy;
mod read_only;
mod server;
mod validator;
mod volumes;
mod webhooks;

pub use args::Args;
pub use server::run;

/// Component name in permission errors.
const ROLE: &str = "admission webhooks";
