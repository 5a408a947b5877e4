//! The webhooks from start to end: flags, API server, certificate, policy.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use kube::Client;
use tokio::sync::watch;

use super::args::Args;
use super::judge::Judge;
use super::metrics::Metrics;
use super::policy::{Policies, Unknown};
use super::webhooks;
use crate::kubernetes::publish::keep;
use crate::kubernetes::webhook_configuration::CaBundle;
use crate::kubernetes::{https, tls};
use crate::telemetry::http::Pages;
use crate::telemetry::shutdown::Shutdown;

/// As whom fields of others' objects are written.
const MANAGER: &str = "csi-loopback-admission";

/// Serves until a signal has come.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    args.role.clone().run(|shutdown| serve(args, shutdown))
}

async fn serve(args: Args, shutdown: Shutdown) -> anyhow::Result<()> {
    let kubernetes = args.kubernetes.connect().await?;
    let namespace = args.tls.authority.namespace()?;
    let identity = args.tls.start("admission", &kubernetes, &shutdown).await?;
    let metrics = Metrics::new(|registry| identity.register(registry));
    let policies = Policies::start(&kubernetes, &namespace, &args.policy, shutdown.clone());
    // A rate of its own: a flood of reviews keeps neither policy nor certificate from the API server.
    let reviews = args.kubernetes.connect().await?;
    let judge = Judge::start(&reviews, &args.driver_name, policies.clone(), &shutdown);
    let listener = tls::listen(args.port).await.with_context(|| format!("--port {}", args.port))?;
    let address = listener.local_addr()?;
    let config = tls::server_config(&args.tls.files, identity.certificates, tls::HTTPS)?;
    let incoming = tls::incoming(listener, config, shutdown.clone());
    if let Some(trusted) = &identity.trusted {
        publish(&args, &kubernetes, trusted, &shutdown);
    }
    args.role.serve_http(pages(&policies, &metrics), &shutdown).await?;
    let driver = &args.driver_name;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), %address, namespace, driver, "serving the webhooks");
    let routes = webhooks::routes(&judge, &metrics);
    https::serve(incoming, routes, webhooks::LIMITS, shutdown.clone()).await;
    tracing::info!("stopped");
    Ok(())
}

/// Begins to keep the authority known to the API server, in both configurations.
fn publish(
    args: &Args,
    kubernetes: &Client,
    trusted: &watch::Receiver<String>,
    shutdown: &Shutdown,
) {
    let name = &args.webhook_configuration;
    let mutating: CaBundle<MutatingWebhookConfiguration> = CaBundle::new(name, MANAGER);
    let validating: CaBundle<ValidatingWebhookConfiguration> = CaBundle::new(name, MANAGER);
    tokio::spawn(keep(kubernetes.clone(), mutating, trusted.clone(), shutdown.clone()));
    tokio::spawn(keep(kubernetes.clone(), validating, trusted.clone(), shutdown.clone()));
}

/// Health and metrics.
fn pages(policies: &Policies, metrics: &Metrics) -> Pages {
    let (metrics, policies, scraped) = (metrics.clone(), policies.clone(), policies.clone());
    let health = move || match policies.current() {
        Ok(_) => Ok(()),
        Err(Unknown::Nonsense(problem) | Unknown::Unheard(problem)) => Err(problem),
    };
    Pages::new(Arc::new(health), Arc::new(move || metrics.scrape(scraped.is_taken())))
}
