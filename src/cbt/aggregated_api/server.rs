//! The life of the server: flags, API server, certificate, authentication, routes, election.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use k8s_openapi::api::authentication::v1::UserInfo;
use kube::{Api, Client};
use tokio::task::JoinHandle;

use super::LISTENER;
use super::args::Args;
use super::delta::{self, Deltas};
use super::discovery;
use super::endpoint::Endpoints;
use super::failure::Failure;
use super::front_proxy::FrontProxy;
use super::metrics::Metrics;
use super::routes::{self, DeltaService, routes};
use kubernetes::api_service::CaBundle;
use kubernetes::leader::{Election, candidate_name};
use kubernetes::publish::maintain;
use kubernetes::snapshot_delta::VolumeSnapshotDelta;
use kubernetes::tls::identity::Identity;
use kubernetes::{https, tls};
use telemetry::http::Pages;
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Field manager of writes to other parties' objects.
const MANAGER: &str = "csi-loopback-aggregated-api";

/// Serves until a signal arrives.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    args.role.clone().run(|shutdown| serve(args, shutdown))
}

async fn serve(args: Args, shutdown: Shutdown) -> anyhow::Result<()> {
    let kubernetes = args.kubernetes.connect().await?;
    let namespace = args.tls.authority.namespace()?;
    let identity = args.tls.start("aggregated-api", &kubernetes, &shutdown).await?;
    let (metrics, (of_deltas, of_discovery)) = Metrics::new(|registry| {
        identity.register(registry);
        (delta::metrics::Metrics::new(registry), discovery::Metrics::new(registry))
    });
    let endpoints = Endpoints::new(kubernetes.clone(), &namespace, &args.service_account);
    let deltas = deltas(&args, &kubernetes, endpoints.clone(), of_deltas, &shutdown).await?;
    let front_proxy = FrontProxy::start(&kubernetes, shutdown.clone());
    let served = Served { front_proxy: front_proxy.clone(), metrics: metrics.clone(), deltas };
    let api = serve_api(&args, &kubernetes, identity, served, &shutdown).await?;
    args.role.serve_http(pages(front_proxy, metrics), &shutdown).await?;
    let election = Election {
        leases: Api::namespaced(kubernetes.clone(), &namespace),
        name: args.lease.clone(),
        identity: candidate_name(args.identity.as_deref().unwrap_or("server"))?,
        duration: args.lease_duration,
    };
    tracing::info!(version = env!("CARGO_PKG_VERSION"), namespace, "serving VolumeSnapshotDelta");
    let leads = election.start(shutdown.clone());
    let context =
        discovery::Context::new(kubernetes, endpoints, discovery::PROBE_INTERVAL, of_discovery);
    discovery::run(leads, Arc::new(context), &shutdown).await;
    // Running requests may complete.
    api.await.context("failed to serve the API")?;
    tracing::info!("stopped");
    Ok(())
}

/// Creates the service of VolumeSnapshotDeltas.
async fn deltas(
    args: &Args,
    kubernetes: &Client,
    endpoints: Endpoints,
    metrics: delta::metrics::Metrics,
    shutdown: &Shutdown,
) -> anyhow::Result<Deltas> {
    // A separate rate limit: many reviews do not delay other calls.
    let reviews = args.kubernetes.connect().await?;
    Ok(Deltas::new(delta::Settings {
        client: kubernetes.clone(),
        reviews,
        review_ttl: args.review_cache_ttl,
        endpoints,
        max_limit: args.max_limit,
        user_rate: args.user_rate(),
        rate: args.total_rate(),
        timeout: delta::TIMEOUT,
        metrics,
        shutdown: shutdown.clone(),
    }))
}

impl DeltaService for Deltas {
    async fn create(
        &self,
        user: &UserInfo,
        namespace: &str,
        request: VolumeSnapshotDelta,
    ) -> Result<VolumeSnapshotDelta, Failure> {
        Deltas::create(self, user, namespace, request).await
    }
}

/// Dependencies of the routes.
struct Served<C> {
    front_proxy: FrontProxy,
    metrics: Metrics,
    deltas: C,
}

/// Starts to serve the API and, with a self-signed authority, to publish its certificate.
async fn serve_api<C: DeltaService>(
    args: &Args,
    kubernetes: &Client,
    identity: Identity,
    served: Served<C>,
    shutdown: &Shutdown,
) -> anyhow::Result<JoinHandle<()>> {
    let listener = tls::listen(args.port).await.with_context(|| format!("--port {}", args.port))?;
    let address = listener.local_addr()?;
    let config = tls::server_config_requesting_client_certificates(
        &args.tls.files,
        identity.certificates,
        tls::HTTPS,
    )?;
    let incoming = tls::incoming(listener, LISTENER, config, shutdown.clone());
    if let Some(trusted) = identity.trusted {
        let publication = CaBundle::new(&args.api_service, MANAGER);
        task::spawn(maintain(kubernetes.clone(), publication, trusted, shutdown.clone()));
    }
    tracing::info!(%address, "serving the API");
    let Served { front_proxy, metrics, deltas } = served;
    let routes = routes(deltas, front_proxy, metrics, shutdown.clone());
    let longest = routes::LIMITS.request;
    Ok(task::spawn(https::serve(incoming, routes, longest, shutdown.clone())))
}

/// Health and metrics.
fn pages(front_proxy: FrontProxy, metrics: Metrics) -> Pages {
    let health = move || match front_proxy.is_known() {
        true => Ok(()),
        false => Err("the front proxy's configuration is not known yet".into()),
    };
    Pages::new(Arc::new(health), Arc::new(move || metrics.scrape()))
}
