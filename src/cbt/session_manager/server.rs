//! The life of the manager: flags, API server, certificate, webhook, election, controller.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::task::JoinHandle;

use super::access_policy::AccessPolicy;
use super::args::Args;
use super::context::Context;
use super::controller;
use super::lifetime::Lifetimes;
use super::metrics::Metrics;
use super::resolve::{self, Resolver};
use super::session_limit::SessionLimit;
use super::{clean_up, webhook};
use kubernetes::cache::Clients;
use kubernetes::https::{self, Bounds, refuse_in_text};
use kubernetes::leader::{Election, candidate_name, while_leading};
use kubernetes::publish::maintain;
use kubernetes::session::SnapshotSessionData;
use kubernetes::tls::identity::Identity;
use kubernetes::webhook_configuration::CaBundle;
use kubernetes::{cache, tls};
use telemetry::http::Pages;
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Reporter of events, and field manager of writes to other parties' objects.
const MANAGER: &str = "csi-loopback-session-manager";
/// The name of the webhook's port in metrics.
const LISTENER: &str = "webhook";

/// Serves until a signal arrives.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    args.role.clone().run(|shutdown| async move {
        if !args.clean_up {
            return serve(args, shutdown).await;
        }
        let kubernetes = args.kubernetes.connect_as_user().await?;
        tokio::select! {
            done = clean_up::run(&kubernetes) => done,
            () = shutdown.draining() => anyhow::bail!("stopped before all sessions were deleted"),
        }
    })
}

async fn serve(args: Args, shutdown: Shutdown) -> anyhow::Result<()> {
    let kubernetes = args.kubernetes.connect().await?;
    let namespace = args.tls.authority.namespace()?;
    let identity = args.tls.start("session-manager", &kubernetes, &shutdown).await?;
    let metrics = Metrics::new(|registry| identity.register(registry));
    let context = Arc::new(context(&args, &kubernetes, &namespace, &metrics, &shutdown)?);
    let webhook = serve_webhook(&args, &kubernetes, identity, &shutdown).await?;
    args.role.serve_http(pages(&context), &shutdown).await?;
    let election = Election {
        leases: Api::namespaced(kubernetes.clone(), &namespace),
        name: args.lease.clone(),
        identity: candidate_name(args.identity.as_deref().unwrap_or("manager"))?,
        duration: args.lease_duration,
    };
    tracing::info!(version = env!("CARGO_PKG_VERSION"), namespace, "managing snapshot sessions");
    let leading = |leads| context.metrics.leading(leads);
    // Each write names its version, and the next leader continues from the last write.
    let work = || controller::run(context.clone());
    while_leading(election.start(shutdown.clone()), leading, work, &shutdown).await;
    // Running calls may complete.
    webhook.await.context("failed to serve the webhook")?;
    tracing::info!("stopped");
    Ok(())
}

/// Starts to serve the webhook and, with a self-signed authority, to publish its certificate.
async fn serve_webhook(
    args: &Args,
    kubernetes: &Client,
    identity: Identity,
    shutdown: &Shutdown,
) -> anyhow::Result<JoinHandle<()>> {
    // A separate rate limit: many reviews do not delay the controller.
    let reviews = args.kubernetes.connect().await?;
    let listener = tls::listen(args.port).await.with_context(|| format!("--port {}", args.port))?;
    let address = listener.local_addr()?;
    let config = args.clients.server_config(&args.tls.files, identity.certificates, shutdown)?;
    let incoming = tls::incoming(listener, LISTENER, config, shutdown.clone());
    if let Some(trusted) = identity.trusted {
        let publication: CaBundle<ValidatingWebhookConfiguration> =
            CaBundle::new(&args.webhook_configuration, MANAGER);
        task::spawn(maintain(kubernetes.clone(), publication, trusted, shutdown.clone()));
    }
    tracing::info!(%address, "serving the webhook");
    let clients = Clients { watch: kubernetes.clone(), lookups: reviews.clone() };
    let limit = SessionLimit::start(args.max_sessions_per_namespace, clients, shutdown);
    let policy = args.clients.client_ca.is_none().then(|| AccessPolicy::new(&reviews));
    if let Some(policy) = policy.clone() {
        // Logs before the first request that access is not verified.
        task::spawn(async move { policy.is_in_force().await });
    }
    let bounds = Bounds::new(webhook::LIMITS, LISTENER);
    let routes = bounds.around(webhook::routes(reviews, limit, policy), refuse_in_text);
    let longest = webhook::LIMITS.request;
    Ok(task::spawn(https::serve(incoming, routes, longest, shutdown.clone())))
}

fn context(
    args: &Args,
    kubernetes: &Client,
    namespace: &str,
    metrics: &Metrics,
    shutdown: &Shutdown,
) -> anyhow::Result<Context> {
    let all = watcher::Config::default;
    let resolver = Resolver {
        snapshots: cache::of_all_namespaces(kubernetes, |_| None, shutdown.clone()),
        contents: cache::of_cluster(kubernetes, all(), |_| None, shutdown.clone()),
        configurations: cache::of_cluster(
            kubernetes,
            all(),
            resolve::driver_label,
            shutdown.clone(),
        ),
        all_configurations: Api::all(kubernetes.clone()),
    };
    let reporter = Reporter { controller: MANAGER.to_owned(), instance: args.identity.clone() };
    Ok(Context {
        requests: Api::all(kubernetes.clone()),
        resolver,
        data: cache::of_all_namespaces(
            kubernetes,
            |data: &SnapshotSessionData| Some((&data.spec.request.uid).into()),
            shutdown.clone(),
        ),
        lifetimes: Lifetimes::start(kubernetes, namespace, &args.config_map, shutdown.clone()),
        recorder: Recorder::new(kubernetes.clone(), reporter),
        metrics: metrics.clone(),
        ready_timeout: args.ready_timeout,
        resync: args.resync,
        client: kubernetes.clone(),
    })
}

/// Health and metrics.
fn pages(context: &Arc<Context>) -> Pages {
    let (metrics, watched) = (context.metrics.clone(), context.clone());
    let health = move || match watched.lifetimes.is_known() {
        true => Ok(()),
        false => Err("the ConfigMap has not been read from the API server yet".into()),
    };
    Pages::new(Arc::new(health), Arc::new(move || metrics.scrape()))
}
