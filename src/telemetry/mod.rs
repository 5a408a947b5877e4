//! What every role shows of itself: logs on stderr, Prometheus metrics and health over HTTP, and the
//! one place that turns signals into an orderly end. Knows no role and no backend.

pub mod accept;
pub mod alone;
pub mod complaint;
pub mod http;
pub mod klog;
pub mod logs;
pub mod metrics;
pub mod role;
pub mod rounds;
pub mod shutdown;
