//! The mode `admission`: webhooks for pods with volumes of one driver. They make content volumes
//! read-only (KEP-596, "Read-only volumes"), enforce the policy of the namespace for inline volumes
//! (KEP-596, "Security Considerations"), and set and validate the annotation that defers volumes to
//! the pod's container runtime (KEP-2857). The validation of the annotation applies to volumes of
//! every driver.
//!
//! The webhooks are stateless: any number of replicas may run. Attributes of inline volumes are
//! parsed by [`common::inline`], as the driver parses them, so that a webhook admits exactly what
//! the driver accepts.
//!
//! | module | owns |
//! |---|---|
//! | `webhooks`, `server`, `args` | which webhook serves which path; the life cycle; the flags |
//! | `read_only` | content volumes become read-only |
//! | `policy`, `validator`, `volumes` | the policy of a namespace, and whether a pod's inline volumes fit it |
//! | `deferral`, `opt_in`, `claims` | the policy of deferred volumes, the annotation, the StorageClass of a claim |
//! | `metrics` | verdicts |

// Input may be hostile, so no code may panic on it. Tests may panic.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

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
