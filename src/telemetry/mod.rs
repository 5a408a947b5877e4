//! Shared by all roles: logs on stderr, Prometheus metrics and health over HTTP, and graceful
//! shutdown on signals. Does not depend on any role or on the backend.

pub mod accept;
pub mod fair_limit;
pub mod http;
pub mod klog;
pub mod log_budget;
pub mod logs;
pub mod metrics;
pub mod peer;
pub mod periodic;
pub mod rate_limited_log;
pub mod role;
pub mod shutdown;
pub mod single_flight;
