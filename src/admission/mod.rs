//! The mode `admission`: webhooks for pods with inline volumes of one driver (KEP-596, "Read-only volumes" and "Security
//! Considerations"). One sets what a volume of read-only content needs in a pod; one holds pods to the policy of their
//! namespace, and warns of templates whose pods it will refuse.
//!
//! Any number of replicas may run; none keeps anything.

mod args;
mod server;

pub use args::Args;
pub use server::run;
