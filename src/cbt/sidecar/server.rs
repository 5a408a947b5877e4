//! The life of the sidecar: flags, API server, driver, certificate, servers, drain.

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::http::StatusCode;
use axum::response::Response;
use kube::Client;
use kube::runtime::watcher;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_stream::Stream;
use tonic::Status;
use tonic::service::Routes;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use super::access::{Audience, Authenticator};
use super::args::Args;
use super::call::ConcurrencyLimit;
use super::directory::Cluster;
use super::driver_link::{Driver, DriverLink};
use super::metrics::Metrics;
use super::nodes::{self, NodeApi, Nodes, Remote};
use super::refusal::{Reason, Refusal};
use super::resolve::Resolver;
use super::secrets::SecretFinder;
use super::service::Sidecar;
use super::session::{Sessions, Tokens};
use super::snapshot_metadata::SnapshotMetadataApi;
use super::stream_limit::StreamLimit;
use super::{cbt_http, publish};
use grpc::proto::csi::v1::snapshot_metadata_server::SnapshotMetadataServer as NodeServer;
use grpc::proto::snapshotmetadata::snapshot_metadata_server::SnapshotMetadataServer;
use grpc::proto::snapshotsession::snapshot_metadata_server::SnapshotMetadataServer as SessionServer;
use kubernetes::cache::{self, Clients};
use kubernetes::https::{self, Bounds, Limits};
use kubernetes::metadata_service::Address;
use kubernetes::publish::{Publication, maintain};
use kubernetes::review::Reviewer;
use kubernetes::snapshot::{self, VolumeSnapshotClass};
use kubernetes::tls::identity::{CertificateSource, Identity};
use kubernetes::tls::{Certificates, Connection};
use kubernetes::{bound_snapshot, client, tls};
use telemetry::http::{self, HealthCheck, Pages};
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Maximum number of concurrent calls.
const CALLS: usize = 8192;
/// Limits of a request: a message with its prefix (gRPC over HTTP/2, Length-Prefixed-Message), and
/// the time to receive it.
const REQUEST: Limits = Limits { body: (64 << 10) + 5, request: Duration::from_secs(10) };
/// The name of the port in metrics.
const LISTENER: &str = "grpc";
/// Time after the longest stream to end its connection.
const AFTER_STREAM: Duration = Duration::from_secs(30);

/// Serves until a signal arrives and the running streams are complete.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let args = args.settled();
    let mut role = args.role.clone();
    args.klog.apply(&mut role.log);
    role.run(|shutdown| serve(args, shutdown))
}

async fn serve(args: Args, shutdown: Shutdown) -> anyhow::Result<()> {
    args.check()?;
    let is_used = args.session_api || args.cbt_http.enabled || args.nodes.node_signer.is_some();
    let namespace = is_used.then(|| args.authority.namespace()).transpose()?;
    let kubernetes = client::connect(args.kubeconfig.as_deref(), args.rate()).await?;
    let driver = driver(&args, &shutdown);
    let mut identity = identity(&args, &kubernetes, &shutdown).await?;
    let page_metrics = cbt_http::Metrics::new();
    let metrics = Metrics::new(|registry| {
        identity.register(registry);
        if args.cbt_http.enabled {
            page_metrics.register(registry);
        }
    });
    let lookups = client::connect(args.kubeconfig.as_deref(), args.rate()).await?;
    let base = Base { args, namespace, kubernetes, lookups, driver, metrics, shutdown };
    let (authenticator_sender, authenticator) = watch::channel(None);
    let (apis, remote) = base.apis(authenticator).await?;
    let pages = base.pages(remote, &identity, &page_metrics).await?;
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_service_status("", ServingStatus::NotServing).await;
    // The port accepts connections before the HTTP endpoint reports health.
    let incoming = base.listen(&identity).await?;
    let followed_state = watch::Sender::new(Driver::NotReady("it has not been polled yet".into()));
    base.serve_http(followed_state.subscribe(), pages.as_ref().map(|pages| pages.leads.clone()))
        .await?;
    let trusted = identity.trusted.take();
    let shutdown = base.shutdown.clone();
    let longest = longest(&base.args);
    let reviews = client::connect(base.args.kubeconfig.as_deref(), base.args.rate()).await?;
    let follower = DriverFollower {
        base,
        reviews,
        authenticator: authenticator_sender,
        health,
        followed_state,
    };
    task::spawn(follower.driver(trusted));
    serve_grpc(longest, incoming, routes(apis).add_service(health_service), shutdown).await;
    if let Some(pages) = pages {
        pages.task.await.context("cbt-http")?;
    }
    tracing::info!("stopped");
    Ok(())
}

/// Maximum time of a call and its connection.
pub(super) fn longest(args: &Args) -> Duration {
    args.max_duration() + AFTER_STREAM
}

/// Serves until the shutdown has ended all calls, which take at most `longest`.
pub(super) async fn serve_grpc(
    longest: Duration,
    incoming: impl Stream<Item = io::Result<Connection>> + Unpin,
    routes: Routes,
    shutdown: Shutdown,
) {
    let routes = Bounds::new(REQUEST, LISTENER).around_streams(routes.into_axum_router(), refuse);
    let served = https::serve(incoming, routes, longest, shutdown.clone());
    tokio::select! {
        () = served => {}
        () = shutdown.overdue() => tracing::warn!("closing connections that did not finish in time"),
    }
}

/// Connections with a completed handshake.
pub(super) fn accept(
    args: &Args,
    listener: TcpListener,
    certificates: Certificates,
    shutdown: &Shutdown,
) -> anyhow::Result<impl Stream<Item = io::Result<Connection>> + Send + Unpin + use<>> {
    let address = listener.local_addr()?;
    let config = tls::server_config(&args.tls, certificates, tls::GRPC)?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), %address, "serving the SnapshotMetadata API");
    Ok(tls::incoming(listener, LISTENER, config, shutdown.clone()))
}

/// The enabled APIs.
struct Apis {
    metadata: Option<SnapshotMetadataApi<Cluster>>,
    sessions: Option<Sessions>,
    node: Option<NodeApi>,
}

fn routes(apis: Apis) -> Routes {
    let Apis { metadata, sessions, node } = apis;
    let mut routes = Routes::builder();
    if let Some(metadata) = metadata {
        routes.add_service(SnapshotMetadataServer::new(metadata));
    }
    if let Some(sessions) = sessions {
        routes.add_service(SessionServer::new(sessions));
    }
    if let Some(node) = node {
        routes.add_service(NodeServer::new(node));
    }
    routes.routes()
}

/// The status of a call whose request exceeds [`REQUEST`].
fn refuse(code: StatusCode, message: String) -> Response {
    let status = match code {
        StatusCode::PAYLOAD_TOO_LARGE => Status::out_of_range(message),
        StatusCode::REQUEST_TIMEOUT => Status::deadline_exceeded(message),
        StatusCode::SERVICE_UNAVAILABLE => Refusal::new(Reason::TooMany, message).status(),
        _ => Status::cancelled(message),
    };
    status.into_http()
}

pub(super) fn driver(args: &Args, shutdown: &Shutdown) -> DriverLink {
    let probe_deltas = args.cbt_http.enabled;
    let streams = args.max_streams as usize;
    // Pages may also be streams of the driver.
    let streams = if probe_deltas { streams * 2 } else { streams };
    if let Some(name) = &args.nodes.driver_name {
        let none = || async { Err(io::Error::other("it runs on other nodes")) };
        return DriverLink::remote(name, streams, none);
    }
    DriverLink::start(&args.csi_address, streams, args.timeout, probe_deltas, shutdown.clone())
}

/// What all calls share.
pub(super) fn sidecar(
    args: &Args,
    driver: &DriverLink,
    metrics: &Metrics,
    shutdown: &Shutdown,
) -> Sidecar {
    Sidecar {
        driver: driver.clone(),
        nodes: None,
        metrics: metrics.clone(),
        calls: ConcurrencyLimit::new(CALLS),
        streams: StreamLimit::new(args.max_streams as usize),
        max_duration: args.max_duration(),
        stall_timeout: Some(args.stall_timeout).filter(|time| !time.is_zero()),
        check_streams: args.check_streams,
        denied_as: args.denied_as.code(),
        invalid_tokens: Arc::default(),
        shutdown: shutdown.clone(),
    }
}

/// The certificate, and the bundle to publish if objects are managed.
async fn identity(
    args: &Args,
    kubernetes: &Client,
    shutdown: &Shutdown,
) -> anyhow::Result<Identity> {
    let (publish, managed) = (&args.publish, args.publish.manage_service);
    let source = CertificateSource {
        mode: "sidecar",
        files: &args.tls,
        authority: &args.authority,
        address: publish.service_address.as_ref(),
    };
    let more: Vec<&str> = args.discovery().map(Address::host).into_iter().collect();
    let mut identity = tls::identity::start(kubernetes, source, &more, shutdown).await?;
    if !managed {
        identity.trusted = None;
    } else if identity.trusted.is_none() {
        identity.trusted = Some(publish::authorities(publish, &args.tls, shutdown.clone())?);
    }
    Ok(identity)
}

/// What all parts share.
struct Base {
    args: Args,
    /// Namespace of the driver and the sidecar, if needed.
    namespace: Option<String>,
    /// For the lease, watches, and published objects.
    kubernetes: Client,
    /// For lookups of authenticated calls.
    lookups: Client,
    driver: DriverLink,
    metrics: Metrics,
    shutdown: Shutdown,
}

impl Base {
    /// The APIs, and the drivers of many nodes.
    async fn apis(
        &self,
        authenticator: watch::Receiver<Option<Authenticator>>,
    ) -> anyhow::Result<(Apis, Option<Remote>)> {
        let mut sidecar = sidecar(&self.args, &self.driver, &self.metrics, &self.shutdown);
        let nodes = &self.args.nodes;
        if let (Some(_), Some(front)) = (&nodes.serve_node, &nodes.front_account) {
            let node = NodeApi { sidecar, authenticator, front: front.clone() };
            return Ok((Apis { metadata: None, sessions: None, node: Some(node) }, None));
        }
        // Pages of one driver do not need the watches.
        if !self.args.metadata_api && !self.args.session_api && nodes.node_service.is_none() {
            return Ok((Apis { metadata: None, sessions: None, node: None }, None));
        }
        let streams = self.args.max_streams as usize;
        let clients = Clients { watch: self.kubernetes.clone(), lookups: self.lookups.clone() };
        let namespace = self.namespace.as_deref();
        let started =
            Nodes::start(nodes, streams, clients, namespace, &self.metrics, &self.shutdown);
        sidecar.nodes = started.await?;
        let cluster = self.cluster(authenticator);
        let resolver = &cluster.resolver;
        let remote =
            sidecar.nodes.clone().map(|nodes| Remote { nodes, resolver: resolver.clone() });
        let sessions = match &self.namespace {
            Some(namespace) if self.args.session_api => {
                Some(self.sessions(namespace, &sidecar, &cluster).await?)
            }
            _ => None,
        };
        let metadata =
            self.args.metadata_api.then_some(SnapshotMetadataApi { sidecar, directory: cluster });
        Ok((Apis { metadata, sessions, node: None }, remote))
    }

    fn cluster(&self, authenticator: watch::Receiver<Option<Authenticator>>) -> Cluster {
        let Self { args, lookups, shutdown, .. } = self;
        let clients = || Clients { watch: self.kubernetes.clone(), lookups: lookups.clone() };
        let classes = cache::of_cluster(
            clients(),
            watcher::Config::default(),
            |class: &VolumeSnapshotClass| Some((&class.driver).into()),
            shutdown.clone(),
        );
        Cluster {
            driver: self.driver.clone(),
            authenticator,
            resolver: Resolver {
                bound: bound_snapshot::Resolver {
                    snapshots: cache::of_all_namespaces(clients(), |_| None, shutdown.clone()),
                    contents: cache::of_cluster(
                        clients(),
                        watcher::Config::default(),
                        snapshot::handle,
                        shutdown.clone(),
                    ),
                },
                base_reference: args.base_reference,
            },
            secrets: SecretFinder { client: lookups.clone(), classes },
        }
    }

    /// The session API. Lookups of unknown tokens use a client with a separate rate limit.
    async fn sessions(
        &self,
        namespace: &str,
        sidecar: &Sidecar,
        cluster: &Cluster,
    ) -> anyhow::Result<Sessions> {
        let lookups = client::connect(self.args.kubeconfig.as_deref(), self.args.rate()).await?;
        let tokens = Tokens::start(&self.kubernetes, lookups, namespace, self.shutdown.clone());
        let (resolver, secrets) = (cluster.resolver.clone(), cluster.secrets.clone());
        Ok(Sessions { sidecar: sidecar.clone(), tokens, resolver, secrets })
    }

    /// cbt-http, if enabled.
    async fn pages(
        &self,
        remote: Option<Remote>,
        identity: &Identity,
        metrics: &cbt_http::Metrics,
    ) -> anyhow::Result<Option<cbt_http::Served>> {
        let Some(namespace) = self.namespace.as_deref().filter(|_| self.args.cbt_http.enabled)
        else {
            return Ok(None);
        };
        let Self { args, kubernetes, driver, shutdown, .. } = self;
        let start = cbt_http::Start {
            args,
            kubernetes,
            namespace,
            driver,
            remote,
            identity,
            metrics,
            shutdown,
        };
        cbt_http::start(start).await.map(Some)
    }

    async fn serve_http(
        &self,
        state: watch::Receiver<Driver>,
        leads: Option<HealthCheck>,
    ) -> anyhow::Result<()> {
        let Self { args, shutdown, .. } = self;
        let metrics = self.metrics.clone();
        let pages = Pages {
            health: Arc::new(move || match &*state.borrow() {
                Driver::Ready { .. } => Ok(()),
                Driver::NotReady(why) => Err(format!("the CSI driver is not ready: {why}")),
            }),
            metrics: (!args.disable_metrics).then(|| {
                (args.metrics_path.clone(), Arc::new(move || metrics.scrape()) as http::Scrape)
            }),
            checks: leads.map(|leads| (cbt_http::LEADER_PATH, leads)).into_iter().collect(),
        };
        args.role.serve_http(pages, shutdown).await
    }

    async fn listen(
        &self,
        identity: &Identity,
    ) -> anyhow::Result<impl Stream<Item = io::Result<Connection>> + Unpin + use<>> {
        let port = self.args.port;
        let listener = tls::listen(port).await.with_context(|| format!("--port {port}"))?;
        accept(&self.args, listener, identity.certificates.clone(), &self.shutdown)
    }
}

/// Follows the driver's state: updates health, the audience's source and the published objects.
struct DriverFollower {
    base: Base,
    /// Client for reviews. Its separate rate limit keeps invalid tokens from delaying the lease,
    /// watches and lookups.
    reviews: Client,
    authenticator: watch::Sender<Option<Authenticator>>,
    health: HealthReporter,
    /// The driver's state after these updates.
    followed_state: watch::Sender<Driver>,
}

impl DriverFollower {
    async fn driver(self, mut trusted: Option<watch::Receiver<String>>) {
        let mut state = self.base.driver.state();
        loop {
            let now = state.borrow_and_update().clone();
            let status = match &now {
                Driver::Ready { name, capable, .. } => {
                    self.base.metrics.driver(name, *capable);
                    if self.authenticator.borrow().is_none() {
                        self.begin(name, trusted.take());
                    }
                    ServingStatus::Serving
                }
                Driver::NotReady(_) => {
                    self.base.metrics.driver_not_ready();
                    ServingStatus::NotServing
                }
            };
            self.health.set_service_status("", status).await;
            self.followed_state.send_replace(now);
            tokio::select! {
                changed = state.changed() => if changed.is_err() { return },
                () = self.base.shutdown.draining() => {
                    self.health.set_service_status("", ServingStatus::NotServing).await;
                    return;
                }
            }
        }
    }

    /// Starts what needs the driver's name.
    fn begin(&self, driver: &str, trusted: Option<watch::Receiver<String>>) {
        if let (Some(trusted), Some(address)) = (&trusted, &self.base.args.publish.service_address)
        {
            self.advertise(driver, address, trusted);
        }
        // The sidecar publishes the audience itself, so it need not read the object.
        let own = trusted.is_some().then(|| driver.to_owned());
        let node = self.base.args.nodes.serve_node.as_deref();
        let of_node = node.map(|node| nodes::audience(driver, node));
        let audience = match of_node.or(self.base.args.audience.clone()).or(own) {
            Some(audience) => Audience::Fixed(audience),
            // Only the released API needs an audience.
            None if !self.base.args.metadata_api => return,
            None => {
                let name = self.base.args.service_name.clone().unwrap_or_else(|| driver.to_owned());
                let select = watcher::Config::default().fields(&format!("metadata.name={name}"));
                let services = cache::of_cluster(
                    &self.base.kubernetes,
                    select,
                    |_| None,
                    self.base.shutdown.clone(),
                );
                Audience::Of { services: Box::new(services), name }
            }
        };
        let reviewer = Reviewer::new(self.reviews.clone(), self.base.args.review_cache_ttl);
        self.authenticator.send_replace(Some(Authenticator { audience, reviewer }));
    }

    /// Starts to maintain the objects by which clients find the sidecar.
    fn advertise(&self, driver: &str, address: &Address, trusted: &watch::Receiver<String>) {
        let (args, driver, address) = (&self.base.args, driver.to_owned(), address.clone());
        if let Some(address) = args.discovery().cloned() {
            self.keep(publish::Discovery { driver: driver.clone(), address }, trusted);
        }
        if let Some(namespace) = self.base.namespace.clone().filter(|_| args.session_api) {
            let (driver, address) = (driver.clone(), address.clone());
            self.keep(publish::Configuration { driver, address, namespace }, trusted);
        }
        if args.metadata_api {
            let audience = args.audience.clone().unwrap_or_else(|| driver.clone());
            let requires_base = args.publish.require_base_snapshot_for_delta;
            self.keep(publish::Service { driver, address, audience, requires_base }, trusted);
        }
    }

    fn keep(&self, publication: impl Publication, trusted: &watch::Receiver<String>) {
        let (kubernetes, shutdown) = (self.base.kubernetes.clone(), self.base.shutdown.clone());
        task::spawn(maintain(kubernetes, publication, trusted.clone(), shutdown));
    }
}
