//! What a server shows to its clients: a certificate, and how that is kept fresh.

use anyhow::{Context, bail};
use kube::Client;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use super::{Certificates, authority};
use crate::kubernetes::metadata_service::Address;
use crate::telemetry::shutdown::Shutdown;

/// The flags of a role that the API server reaches at one address.
#[derive(Debug, Clone, clap::Args)]
// Its group would have the name `Args`, as that of the role that flattens it.
#[group(skip)]
pub struct Args {
    #[command(flatten)]
    pub files: super::Args,

    #[command(flatten)]
    pub authority: authority::Args,

    /// Where the API server reaches it, as host:port: the name of a Service. The certificate of --self-signed is for
    /// this host.
    #[arg(long, value_name = "ADDRESS")]
    pub service_address: Option<Address>,
}

impl Args {
    /// As [`start`], for a role of this name that publishes its authority itself.
    pub async fn start(
        &self,
        mode: &'static str,
        client: &Client,
        shutdown: &Shutdown,
    ) -> anyhow::Result<Identity> {
        let wanted = Wanted {
            mode,
            files: &self.files,
            authority: &self.authority,
            address: self.service_address.as_ref(),
        };
        start(client, wanted, &[], shutdown).await
    }
}

/// The certificate that new connections get, and what clients are told of its authority.
pub struct Identity {
    pub certificates: Certificates,
    /// What clients are to trust of an authority of its own (PEM), for who publishes it.
    pub trusted: Option<watch::Receiver<String>>,
}

/// What a mode is to show.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// Name of the mode.
    pub mode: &'static str,
    pub files: &'a super::Args,
    pub authority: &'a authority::Args,
    /// Where clients reach it.
    pub address: Option<&'a Address>,
}

/// Takes the certificate that the flags name, or makes one for the host of the address and for `more_hosts` at which
/// clients reach it, and begins to keep it fresh.
///
/// # Errors
/// No certificate, or none that can be used; which flag says so.
pub async fn start(
    client: &Client,
    wanted: Wanted<'_>,
    more_hosts: &[&str],
    shutdown: &Shutdown,
) -> anyhow::Result<Identity> {
    let Wanted { mode, files, authority, address } = wanted;
    if authority.self_signed {
        let address = address.context("--self-signed needs --service-address")?;
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
            "no certificate to serve with: give --tls-cert and --tls-key (or TLS_CERT_PATH and TLS_KEY_PATH), or \
             --self-signed"
        );
    };
    let (certificates, watcher) = Certificates::from_files(cert, key)?;
    tokio::spawn(watcher.watch(shutdown.clone()));
    Ok(Identity { certificates, trusted: None })
}

impl Identity {
    /// Shows in the metrics how fresh it is.
    pub fn register(&self, registry: &mut Registry) {
        registry.register_collector(Box::new(Freshness(self.certificates.clone())));
    }
}

/// The certificate's end and the failures to take a new one, read at each scrape.
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
            "When the certificate in use ends, in seconds since 1970",
            None,
            MetricType::Gauge,
        )?)?;
        ConstCounter::new(self.0.reload_failures()).encode(encoder.encode_descriptor(
            "certificate_reload_failures",
            "New certificates that could not be taken",
            None,
            MetricType::Counter,
        )?)
    }
}
