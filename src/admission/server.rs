//! Starts and serves the webhooks: flags, API server, certificate, policy.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use kube::Client;
use tokio::sync::watch;

use super::args::Args;
use super::metrics::Metrics;
use super::policy::{Policies, PolicyError};
use super::validator::Validator;
use super::webhooks;
use kubernetes::https::{self, Bounds, refuse_in_text};
use kubernetes::publish::maintain;
use kubernetes::tls;
use kubernetes::webhook_configuration::CaBundle;
use telemetry::http::Pages;
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Field manager of server-side apply.
const MANAGER: &str = "csi-loopback-admission";
/// The name of the port in metrics.
const LISTENER: &str = "webhook";

/// Serves until a termination signal.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    args.role.clone().run(|shutdown| serve(args, shutdown))
}

async fn serve(args: Args, shutdown: Shutdown) -> anyhow::Result<()> {
    let kubernetes = args.kubernetes.connect().await?;
    let namespace = args.tls.authority.namespace()?;
    let identity = args.tls.start("admission", &kubernetes, &shutdown).await?;
    let metrics = Metrics::new(|registry| identity.register(registry));
    let policies = Policies::start(&kubernetes, &namespace, &args.policy, shutdown.clone());
    // A separate client has its own rate limit, so that a flood of reviews does not delay reads of
    // the policy and writes of the certificate.
    let reviews = args.kubernetes.connect().await?;
    let validator = Validator::start(&reviews, &args.driver_name, policies.clone(), &shutdown);
    let listener = tls::listen(args.port).await.with_context(|| format!("--port {}", args.port))?;
    let address = listener.local_addr()?;
    let config = args.clients.server_config(&args.tls.files, identity.certificates, &shutdown)?;
    let incoming = tls::incoming(listener, LISTENER, config, shutdown.clone());
    if let Some(trusted) = &identity.trusted {
        publish(&args, &kubernetes, trusted, &shutdown);
    }
    args.role.serve_http(pages(&policies, &metrics), &shutdown).await?;
    let driver = &args.driver_name;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), %address, namespace, driver, "serving webhooks");
    let bounds = Bounds::new(webhooks::LIMITS, LISTENER);
    let routes = bounds.around(webhooks::routes(&validator, &metrics), refuse_in_text);
    https::serve(incoming, routes, webhooks::LIMITS.request, shutdown.clone()).await;
    tracing::info!("stopped");
    Ok(())
}

/// Starts to maintain the caBundle in both webhook configurations.
fn publish(
    args: &Args,
    kubernetes: &Client,
    trusted: &watch::Receiver<String>,
    shutdown: &Shutdown,
) {
    let name = &args.webhook_configuration;
    let mutating: CaBundle<MutatingWebhookConfiguration> = CaBundle::new(name, MANAGER);
    let validating: CaBundle<ValidatingWebhookConfiguration> = CaBundle::new(name, MANAGER);
    task::spawn(maintain(kubernetes.clone(), mutating, trusted.clone(), shutdown.clone()));
    task::spawn(maintain(kubernetes.clone(), validating, trusted.clone(), shutdown.clone()));
}

/// Health and metrics.
fn pages(policies: &Policies, metrics: &Metrics) -> Pages {
    let (metrics, policies, scraped) = (metrics.clone(), policies.clone(), policies.clone());
    let health = move || match policies.current() {
        Ok(_) => Ok(()),
        Err(PolicyError::Invalid(problem) | PolicyError::NotLoaded(problem)) => Err(problem),
    };
    Pages::new(Arc::new(health), Arc::new(move || metrics.scrape(scraped.is_current())))
}
