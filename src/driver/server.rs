//! The driver from start to end: flags, backend, socket, server, drain.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::task::spawn_blocking;
use tonic::transport::Server;

use super::Plugin;
use super::args::Args;
use super::call::Calls;
use super::deferral::Deferrals;
use super::fault::Faults;
use super::gauges::Gauges;
use super::topology::Place;
use crate::backend::{self, Backend, Config, FreezeGuard};
use crate::grpc::{reflection, serve, socket};
use crate::proto::admin::v1::base_admin_server::BaseAdminServer;
use crate::proto::admin::v1::pool_admin_server::PoolAdminServer;
use crate::proto::admin::v1::volume_admin_server::VolumeAdminServer;
use crate::proto::csi::v1::controller_server::ControllerServer;
use crate::proto::csi::v1::group_controller_server::GroupControllerServer;
use crate::proto::csi::v1::identity_server::IdentityServer;
use crate::proto::csi::v1::node_server::NodeServer;
use crate::proto::csi::v1::snapshot_metadata_server::SnapshotMetadataServer;
use crate::proto::snapshotsession::snapshot_metadata_server::SnapshotMetadataServer as SessionServer;
use crate::telemetry::http::{self, HealthCheck, Pages};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::rounds;
use crate::telemetry::shutdown::Shutdown;

/// Threads that calls may block, at most.
const BLOCKING_THREADS: usize = 64;
/// Time between two looks at the room in the pool.
const RELIEVE_EVERY: Duration = Duration::from_secs(1);
/// Time between two looks for records that are past their retention.
const FORGET_EVERY: Duration = Duration::from_secs(60);
/// Time between two looks for inline volumes whose pod is gone.
const COLLECT_EVERY: Duration = Duration::from_secs(10);

/// Serves until a signal has come and the running calls are done. Volumes stay attached: pods go on,
/// and the next driver takes over.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    backend::bound_arenas();
    args.role.clone().run_blocking(BLOCKING_THREADS, |shutdown| serve(args, shutdown))
}

/// A delta over a long chain of snapshots holds a file open for each of them.
fn raise_file_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "could not raise the limit of open files");
    }
}

async fn serve(args: Args, shutdown: Shutdown) -> anyhow::Result<()> {
    raise_file_limit();
    let guard = args.freeze_guard();
    if std::process::id() == 1 && matches!(guard, FreezeGuard::Own { .. }) {
        tracing::warn!(
            "the driver is the first process of its container, so its own freeze guard is killed with it; run one in another \
             container and give its socket as --freeze-guard"
        );
    }
    let Args {
        endpoint,
        socket_mode,
        socket_group,
        driver_name,
        node_id,
        data_dir,
        pool,
        pool_size,
        pool_sparse,
        pool_block_size,
        overcommit,
        block_metadata_type,
        block_size,
        change_record_retention,
        enable_snapshot_deltas,
        freeze_guard: _,
        inline,
        defer,
        faults,
        role,
    } = args;
    let config = Config {
        data_dir,
        pool,
        pool_size,
        pool_sparse,
        pool_block_size,
        retention: change_record_retention,
        overcommit,
        inline: inline.limits(),
        runtime: defer.runtime(),
        freeze_guard: guard,
    };
    let path = endpoint.as_ref();
    // What refuses the start later on must do so before a new pool is made.
    http::try_listen(role.http_endpoint.as_ref()).await?;
    socket::try_listen(path, socket_group.as_deref())?;
    // Before the socket is made: the backend's lock refuses a second driver.
    let backend = spawn_blocking(move || Backend::open(config)).await??;
    let metrics = Metrics::new(vec![Box::new(Gauges::new(backend.clone()))]);
    let calls = Calls::new(metrics.clone());
    let plugin = Plugin {
        backend: backend.clone(),
        calls: calls.clone(),
        faults: Faults::new(faults.fault),
        shutdown: shutdown.clone(),
        place: Place::new(&driver_name, node_id.as_str()),
        driver_name,
        style: block_metadata_type.style(block_size),
        snapshot_deltas: enable_snapshot_deltas,
        new_inline_volumes: inline.new,
        deferrals: Deferrals::new(defer.enable_defer_fs_ops, metrics.clone()),
    };
    let pages = Pages::new(health(&backend), Arc::new(move || metrics.scrape()));
    role.serve_http(pages, &shutdown).await?;
    let (listener, _guard) = socket::listen(path, socket_mode, socket_group.as_deref())?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        driver = plugin.driver_name,
        node = plugin.place.node_id(),
        pool = backend.pool_description(),
        socket = %path.display(),
        "serving CSI"
    );
    keep_house(&backend, &shutdown);
    serve::until_told(router(plugin)?, listener, &calls, &shutdown).await
}

/// The services that the socket serves, as reflection lists them.
const SERVICES: [&str; 9] = [
    "csi.v1.Identity",
    "csi.v1.Controller",
    "csi.v1.GroupController",
    "csi.v1.SnapshotMetadata",
    "csi.v1.Node",
    "snapshotsession.SnapshotMetadata",
    "csiloopback.admin.v1.PoolAdmin",
    "csiloopback.admin.v1.BaseAdmin",
    "csiloopback.admin.v1.VolumeAdmin",
];

fn router(plugin: Plugin) -> anyhow::Result<tonic::transport::server::Router> {
    let router = Server::builder()
        .add_service(IdentityServer::new(plugin.clone()))
        .add_service(ControllerServer::new(plugin.clone()))
        .add_service(GroupControllerServer::new(plugin.clone()))
        .add_service(SnapshotMetadataServer::new(plugin.clone()))
        .add_service(SessionServer::new(plugin.clone()))
        .add_service(PoolAdminServer::new(plugin.clone()))
        .add_service(BaseAdminServer::new(plugin.clone()))
        .add_service(VolumeAdminServer::new(plugin.clone()))
        .add_service(NodeServer::new(plugin));
    reflection::add(router, &SERVICES)
}

fn health(backend: &Backend) -> HealthCheck {
    let backend = backend.clone();
    Arc::new(move || backend.healthy().map_err(|error| error.to_string()))
}

/// A round of the backend's housekeeping.
type Round = fn(&Backend) -> backend::Result<()>;

/// Starts the backend's housekeeping.
fn keep_house(backend: &Backend, shutdown: &Shutdown) {
    let rounds: [(Duration, Round); 3] = [
        (RELIEVE_EVERY, Backend::relieve_pressure),
        (FORGET_EVERY, Backend::forget_expired),
        (COLLECT_EVERY, Backend::collect_inline),
    ];
    for (every, round) in rounds {
        let backend = backend.clone();
        tokio::spawn(rounds::keep(every, move || round(&backend), shutdown.clone()));
    }
}
