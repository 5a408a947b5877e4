//! A server's certificate and how it is renewed.

use anyhow::{Context, bail};
use kube::Client;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use super::{Certificates, authority};
use crate::metadata_service::Address;
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// The flags of a role that the API server reaches at one address.
#[derive(Debug, Clone, clap::Args)]
// The default name, `Args`, would collide with the group of the struct that flattens this one.
#[group(skip)]
pub struct Args {
    #[command(flatten)]
    pub files: super::Args,

    #[command(flatten)]
    pub authority: authority::Args,

    /// Address of this server for the API server, as host:port of a Service; the certificate of
    /// --self-signed is valid for it
    #[arg(long, value_name = "ADDRESS")]
    pub service_address: Option<Address>,
}

impl Args {
    /// [`start`] for a role of this name. The role publishes its authority itself.
    pub async fn start(
        &self,
        mode: &'static str,
        client: &Client,
        shutdown: &Shutdown,
    ) -> anyhow::Result<Identity> {
        let source = CertificateSource {
            mode,
            files: &self.files,
            authority: &self.authority,
            address: self.service_address.as_ref(),
        };
        start(client, source, &[], shutdown).await
    }
}

/// The certificate of new connections, and the authority that clients must trust.
pub struct Identity {
    pub certificates: Certificates,
    /// With a self-signed authority: the CA certificates (PEM) to publish.
    pub trusted: Option<watch::Receiver<String>>,
}

/// Where a mode's certificate comes from.
#[derive(Debug, Clone, Copy)]
pub struct CertificateSource<'a> {
    /// Name of the mode.
    pub mode: &'static str,
    pub files: &'a super::Args,
    pub authority: &'a authority::Args,
    /// Address for clients.
    pub address: Option<&'a Address>,
}

/// Loads the certificate that the flags name, or issues one for the host of the address and
/// `more_hosts`, and starts to renew it.
///
/// # Errors
/// There is no usable certificate; the message names the flag.
pub async fn start(
    client: &Client,
    source: CertificateSource<'_>,
    more_hosts: &[&str],
    shutdown: &Shutdown,
) -> anyhow::Result<Identity> {
    let CertificateSource { mode, files, authority, address } = source;
    if authority.self_signed {
        let address = address.context("--self-signed requires --service-address")?;
        let mut names = vec![address.host().to_owned()];
        names.extend(more_hosts.iter().map(|host| (*host).to_owned()));
        names.dedup();
        let (client, shutdown) = (client.clone(), shutdown.clone());
        let started = authority::start(client, authority, mode, names, shutdown);
        let (certificates, trusted) = started.await?;
        return Ok(Identity { certificates, trusted: Some(trusted) });
    }
    let Some((cert, key)) = files.files() else {
        bail!(
            "no certificate to serve with: set --tls-cert and --tls-key (or TLS_CERT_PATH and TLS_KEY_PATH), or \
             --self-signed"
        );
    };
    let (certificates, watcher) = Certificates::from_files(cert, key)?;
    task::spawn(watcher.watch(shutdown.clone()));
    Ok(Identity { certificates, trusted: None })
}

impl Identity {
    /// Adds metrics about the certificate.
    pub fn register(&self, registry: &mut Registry) {
        registry.register_collector(Box::new(Freshness(self.certificates.clone())));
    }
}

/// The certificate's expiry and reload failures, read at each scrape.
#[derive(Debug)]
struct Freshness(Certificates);

impl prometheus_client::collector::Collector for Freshness {
    fn encode(
        &self,
        mut encoder: prometheus_client::encoding::DescriptorEncoder<'_>,
    ) -> Result<(), std::fmt::Error> {
        use prometheus_client::encoding::EncodeMetric;
        use prometheus_client::metrics::MetricType;
        use prometheus_client::metrics::counter::ConstCounter;
        use prometheus_client::metrics::gauge::ConstGauge;
        let end = self.0.not_after().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        ConstGauge::new(end.as_secs() as i64).encode(encoder.encode_descriptor(
            "certificate_expiry_timestamp_seconds",
            "Expiry of the certificate in use, in seconds since 1970",
            None,
            MetricType::Gauge,
        )?)?;
        ConstCounter::new(self.0.reload_failures()).encode(encoder.encode_descriptor(
            "certificate_reload_failures",
            "Changed certificates that were rejected",
            None,
            MetricType::Counter,
        )?)
    }
}
