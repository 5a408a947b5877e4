//! The parts of the proxy that all calls share. [`super::node`] and [`super::publish`] implement
//! the calls.

use super::events::Events;
use super::forward::Driver;
use super::host_mounts::HostMounts;
use super::message::BufferLimit;
use super::pods::Pods;
use super::reports::Reports;
use super::store::StateStore;
use grpc::call::Calls;
use telemetry::metrics::Metrics;

/// The state of the proxy; clones share it.
#[derive(Clone)]
pub struct Proxy {
    pub driver: Driver,
    pub store: StateStore,
    pub pods: Pods,
    pub host_mounts: HostMounts,
    pub events: Events,
    pub reports: Reports,
    pub metrics: Metrics,
    pub calls: Calls,
    pub request_limit: BufferLimit,
    /// Separate from `request_limit`: a request keeps its permit while it waits for its response,
    /// so requests alone could exhaust a shared limit and never finish.
    pub response_limit: BufferLimit,
}
