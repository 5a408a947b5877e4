//! The mode `driver`: serves the CSI services and the SnapshotMetadata service of snapshot sessions
//! on a unix socket, as a thin translation layer over [`storage`]. And the mode `freeze-guard`,
//! which thaws filesystems if the driver is killed.
//!
//! Each RPC is a blocking function from request to response; [`grpc::call`] runs it. This member
//! keeps no state: a restarted driver continues from what the backend finds on disk.
//!
//! | module | owns |
//! |---|---|
//! | `identity`, [`controller`], `controller_snapshots`, [`group_controller`], `node`, [`inline`] | the CSI services |
//! | [`snapshot_metadata`], `snapshot_deltas`, `session`, [`stream`], `frame`, `delta_token` | changed blocks, as streams and as pages |
//! | `pool_admin`, `base_admin`, `volume_admin` | the driver's own services, for its commands |
//! | [`request`], `response`, `status` | validation; building responses; every error's gRPC status |
//! | [`deferral`], `crust` | mounts that a container runtime makes (KEP-2857) |
//! | `health`, `gauges` | the condition of volumes and of the pool, as messages and as metrics |
//! | [`topology`], `target_root` | which node and which paths a request may name |
//! | [`fault`] | fault injection for developers of backup clients |
//! | `args`, `server`, `metadata_socket` | flags and life cycle; the sidecar's socket |
//! | [`freeze_guard`] | the mode `freeze-guard`; it imports nothing of the driver |

// Input may be hostile, so no code may panic on it. Tests may panic.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod args;
mod base_admin;
pub mod controller;
mod controller_snapshots;
mod crust;
pub mod deferral;
mod delta_token;
pub mod fault;
mod frame;
pub mod freeze_guard;
mod gauges;
pub mod group_controller;
mod health;
mod identity;
pub mod inline;
mod metadata_socket;
mod node;
mod pool_admin;
pub mod request;
mod response;
mod server;
mod session;
mod snapshot_deltas;
pub mod snapshot_metadata;
mod status;
pub mod stream;
mod target_root;
pub mod topology;
mod volume_admin;

use std::path::PathBuf;

use tonic::{Request, Response, Status};

pub use args::{Args, DeferArgs, FaultArgs, InlineArgs};
pub use fault::Rule;
pub use server::{run, serve};

use fault::Faults;
use grpc::call::{Calls, Describe, Subject};
use status::Answer;
use storage::{Backend, Style};
use target_root::TargetRoot;
use telemetry::shutdown::Shutdown;
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
    /// Whether other nodes have drivers of the same name (`--node-local`).
    node_local: bool,
    /// Whether new inline volumes are created (`--inline`). Existing ones are always served.
    new_inline_volumes: bool,
    deferrals: deferral::Deferrals,
    /// Confines the paths of NodeStageVolume and NodePublishVolume.
    target_root: Option<TargetRoot>,
}

impl Plugin {
    /// A path where this driver mounts, see [`TargetRoot`].
    fn node_path(&self, field: &'static str, value: &str) -> storage::Result<PathBuf> {
        TargetRoot::path(self.target_root.as_ref(), field, value)
    }

    /// Runs a unary call; `method` is the name of the RPC.
    async fn call<Q, R>(
        &self,
        method: &'static str,
        request: Request<Q>,
        run: fn(&Self, Q) -> Answer<R>,
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
            run(&plugin, request).map_err(status::of)
        };
        self.calls.unary(method, request, work).await
    }
}
