//! What every process that serves has in common, whatever it serves: logs on stderr, Prometheus
//! metrics and health over HTTP, limits of what clients can cause, and graceful shutdown on
//! signals. It depends on no role, on no protocol except HTTP for probes, and not on the storage
//! backend.
//!
//! | module | owns |
//! |---|---|
//! | [`role`] | the flags of all roles, and the run of a role from its start to its exit code |
//! | [`on_demand`] | flags that are defined only for the selected mode |
//! | [`logs`], [`klog`] | the log, its level and format; the flags of Kubernetes' Go programs for it |
//! | [`log_budget`], [`rate_limited_log`] | log lines that clients or recurring problems cause |
//! | [`metrics`] | the metrics of a process and the labels that they may have |
//! | [`http`] | `/healthz`, `/health` and `/metrics` |
//! | [`shutdown`] | running, draining, ending |
//! | [`accept`], [`peer`], [`fair_limit`] | connections: accepting them, whose they are, sharing a limit |
//! | [`periodic`], [`single_flight`] | background work that may block |
//! | [`memo`] | results of lookups, kept for a while |
//! | [`task`] | tasks of tokio |
//!
//! Promise: a log has no secret. Below info only the program's own members may log, because a
//! library logs what passes through it ([`logs`]).

// Input may be hostile, so no code may panic on it. Tests may panic.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod accept;
pub mod fair_limit;
pub mod http;
pub mod klog;
pub mod log_budget;
pub mod logs;
pub mod memo;
pub mod metrics;
pub mod notify;
pub mod on_demand;
pub mod peer;
pub mod periodic;
pub mod process;
pub mod rate_limited_log;
pub mod role;
pub mod shutdown;
pub mod single_flight;
pub mod task;
