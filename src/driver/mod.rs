//! The mode `driver`: serves the CSI services and the SnapshotMetadata service of snapshot sessions
//! on a unix socket, as a thin translation layer over [`crate::backend`].
//!
//! Each RPC is a blocking function from request to response; [`call`] runs it. [`request`]
//! validates requests, [`response`] builds responses, and [`status`] maps every error to a gRPC
//! status. This module keeps no state: a restarted driver continues from what the backend finds on
//! disk.

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
mod metadata_socket;
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
mod target_root;
pub(crate) mod topology;
mod volume_admin;

use std::path::PathBuf;

use tonic::{Request, Response, Status};

pub use args::Args;
#[cfg(test)]
pub use args::{DeferArgs, FaultArgs, InlineArgs};
pub use server::run;

use crate::backend::{self, Backend, Style};
use crate::telemetry::shutdown::Shutdown;
use call::{Calls, Describe, Subject};
use fault::Faults;
use target_root::TargetRoot;
use topology::NodeTopology;

/// State that all services share. Clones refer to the same backend and counters.
#[derive(Clone)]
pub struct Plugin {
    backend: Backend,
    calls: Calls,
    faults: Faults,
    shutdown: Shutdown,
    driver_name: String,
    topology: NodeTopology,
    style: Style,
    /// Whether ListSnapshotDeltas is served.
    snapshot_deltas: bool,
    /// Whether new inline volumes are created (`--inline`). Existing ones are always served.
    new_inline_volumes: bool,
    deferrals: deferral::Deferrals,
    /// Confines the paths of NodeStageVolume and NodePublishVolume.
    target_root: Option<TargetRoot>,
}

impl Plugin {
    /// A path where this driver mounts, see [`TargetRoot`].
    fn node_path(&self, field: &'static str, value: &str) -> backend::Result<PathBuf> {
        TargetRoot::path(self.target_root.as_ref(), field, value)
    }

    /// Runs a unary call; `method` is the name of the RPC.
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
