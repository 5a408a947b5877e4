//! Lifecycle of the driver: flags, backend, socket, server, graceful shutdown.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::try_join;
use tonic::transport::Server;

use super::Plugin;
use super::args::Args;
use super::deferral::Deferrals;
use super::fault::Faults;
use super::gauges::Gauges;
use super::metadata_socket;
use super::target_root::TargetRoot;
use super::topology::NodeTopology;
use grpc::call::Calls;
use grpc::proto::admin::v1::base_admin_server::BaseAdminServer;
use grpc::proto::admin::v1::pool_admin_server::PoolAdminServer;
use grpc::proto::admin::v1::volume_admin_server::VolumeAdminServer;
use grpc::proto::csi::v1::controller_server::ControllerServer;
use grpc::proto::csi::v1::group_controller_server::GroupControllerServer;
use grpc::proto::csi::v1::identity_server::IdentityServer;
use grpc::proto::csi::v1::node_server::NodeServer;
use grpc::proto::csi::v1::snapshot_metadata_server::SnapshotMetadataServer;
use grpc::proto::snapshotsession::snapshot_metadata_server::SnapshotMetadataServer as SessionServer;
use grpc::{reflection, serve, socket};
use storage::{Backend, Config, FreezeGuard};
use telemetry::http::{self, HealthCheck, Pages};
use telemetry::metrics::Metrics;
use telemetry::notify;
use telemetry::periodic;
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Maximum number of threads that calls block.
const BLOCKING_THREADS: usize = 64;
/// Interval between checks of the free space of the pool.
const PRESSURE_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between searches for blocks of the pool image that a copy of it shares.
const SHARING_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between searches for change records whose retention has ended.
const RETENTION_INTERVAL: Duration = Duration::from_secs(60);
/// Interval between searches for inline volumes whose pod is gone.
const INLINE_INTERVAL: Duration = Duration::from_secs(10);

/// Serves until a signal arrives and the running calls are done. Volumes stay attached: pods
/// continue, and the next driver takes over.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    storage::limit_malloc_arenas();
    args.role.clone().run_blocking(BLOCKING_THREADS, |shutdown| serve(args, shutdown))
}

/// Serves until the shutdown ends, and the running calls are done.
///
/// # Errors
/// The backend cannot be opened, or a socket cannot be created; the message names the flag.
pub async fn serve(args: Args, shutdown: Shutdown) -> anyhow::Result<()> {
    let guard = args.freeze_guard();
    if std::process::id() == 1 && matches!(guard, FreezeGuard::Child { .. }) {
        tracing::warn!(
            "the driver is process 1 of its container, so a kill of the container also kills its freeze guard; run a \
             freeze guard in another container and pass its socket with --freeze-guard"
        );
    }
    let Args {
        endpoint,
        socket_mode,
        socket_group,
        metadata_endpoint,
        metadata_socket_group,
        target_root,
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
        node_local,
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
    // Detect addresses in use before a new pool is created.
    http::try_listen(role.http_endpoint.as_ref()).await?;
    socket::try_listen(path, socket_group.as_deref()).context("--endpoint")?;
    if let Some(path) = &metadata_endpoint {
        let tried = socket::try_listen(path.as_ref(), metadata_socket_group.as_deref());
        tried.context("--metadata-endpoint")?;
    }
    // Open the backend before the socket exists: its lock rejects a second driver.
    let backend = task::blocking(move || Backend::open(config)).await??;
    let metrics = Metrics::new(vec![Box::new(Gauges::new(backend.clone()))]);
    let calls = Calls::new(metrics.clone());
    let plugin = Plugin {
        backend: backend.clone(),
        calls: calls.clone(),
        faults: Faults::new(faults.fault),
        shutdown: shutdown.clone(),
        topology: NodeTopology::new(&driver_name, node_id.as_str()),
        driver_name,
        style: block_metadata_type.style(block_size),
        snapshot_deltas: enable_snapshot_deltas,
        node_local,
        new_inline_volumes: inline.new,
        deferrals: Deferrals::new(defer.enable_defer_fs_ops, metrics.clone()),
        target_root: target_root.map(TargetRoot),
    };
    let pages = Pages::new(health(&backend), Arc::new(move || metrics.scrape()));
    role.serve_http(pages, &shutdown).await?;
    // First, so that it exists when the CSI socket does.
    let group = metadata_socket_group.as_deref();
    let metadata = metadata_endpoint
        .map(|path| socket::listen(path.as_ref(), socket_mode, group))
        .transpose()?;
    let (listener, _guard) = socket::listen(path, socket_mode, socket_group.as_deref())?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        driver = plugin.driver_name,
        node = plugin.topology.node_id(),
        pool = backend.pool_description(),
        socket = %path.display(),
        "serving CSI"
    );
    notify::ready();
    spawn_housekeeping(&backend, &shutdown);
    let metadata = async {
        let Some((listener, _guard)) = metadata else { return Ok(()) };
        let router = metadata_socket::router(plugin.clone())?;
        serve::until_shutdown(router, listener, &calls, &shutdown).await
    };
    let csi = serve::until_shutdown(router(plugin.clone())?, listener, &calls, &shutdown);
    try_join!(csi, metadata).map(drop)
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

/// A periodic task of the backend.
type Task = fn(&Backend) -> storage::Result<()>;

/// Spawns the backend's periodic tasks.
fn spawn_housekeeping(backend: &Backend, shutdown: &Shutdown) {
    let tasks: [(Duration, Task); 4] = [
        (PRESSURE_INTERVAL, Backend::relieve_pressure),
        (SHARING_INTERVAL, Backend::unshare_image),
        (RETENTION_INTERVAL, Backend::forget_expired),
        (INLINE_INTERVAL, Backend::collect_inline),
    ];
    for (interval, task) in tasks {
        let backend = backend.clone();
        task::spawn(periodic::run(interval, move || task(&backend), shutdown.clone()));
    }
}
