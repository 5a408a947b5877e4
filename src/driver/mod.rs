//! The mode `driver`: the CSI services and that of snapshot sessions on a unix socket, a thin translation over
//! [`crate::backend`].
//!
//! Each RPC is a plain function from request to response that may block; [`call`] runs it. What a
//! client sends is checked in [`request`], what it gets is put together in [`response`], and every
//! error becomes a status in [`status`]. No state is kept here: a restarted driver goes on from what
//! the backend finds on disk.

mod args;
mod base_admin;
pub(crate) mod call;
pub(crate) mod controller;
mod controller_snapshots;
mod crust;
pub(crate) mod deferral;
mod delta_token;
pub(crate) mod fault;
mod frame;
mod gauges;
pub(crate) mod group_controller;
mod health;
mod identity;
pub(crate) mod inline;
mod node;
mod pool_admin;
pub(crate) mod request;
mod response;
mod server;
mod session;
mod snapshot_deltas;
pub(crate) mod snapshot_metadata;
mod status;
pub(crate) mod stream;
pub(crate) mod topology;
mod volume_admin;

use tonic::{Request, Response, Status};

pub use args::Args;
#[cfg(test)]
pub use args::{DeferArgs, FaultArgs, InlineArgs};
pub use server::run;

use crate::backend::{Backend, Style};
use crate::telemetry::shutdown::Shutdown;
use call::{Calls, Describe, Subject};
use fault::Faults;
use topology::Place;

/// What the services share. Cheap to clone.
#[derive(Clone)]
pub struct Plugin {
    backend: Backend,
    calls: Calls,
    faults: Faults,
    shutdown: Shutdown,
    driver_name: String,
    place: Place,
    style: Style,
    /// Whether ListSnapshotDeltas is served.
    snapshot_deltas: bool,
    /// Whether new inline volumes are made (`--inline`); existing ones are served in any case.
    new_inline_volumes: bool,
    deferrals: deferral::Deferrals,
}

impl Plugin {
    /// Runs a call with one answer; `method` is the name of the RPC.
    async fn call<Q, R>(
        &self,
        method: &'static str,
        request: Request<Q>,
        run: fn(&Self, Q) -> Result<R, Status>,
    ) -> Result<Response<R>, Status>
    where
        Q: Describe + Send + 'static,
        R: Describe + Send + 'static,
    {
        let plugin = self.clone();
        let work = move |request| {
            if plugin.faults.any() {
                plugin.faults.before(method, &Subject::of(&request))?;
            }
            run(&plugin, request)
        };
        self.calls.unary(method, request, work).await
    }
}
