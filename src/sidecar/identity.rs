//! What the sidecar shows to its clients: a certificate, and how that is kept fresh.

use anyhow::{Context, bail};
use kube::Client;
use prometheus_client::registry::Registry;

use super::{Args, publish};
use crate::kubernetes::tls::{Bundles, Certificates, authority};
use crate::telemetry::shutdown::Shutdown;

/// The certificate that new connections get, and what clients are told of its authority.
pub struct Identity {
    pub certificates: Certificates,
    /// For the one who publishes it, where somebody does.
    pub bundles: Option<Bundles>,
}

/// Takes the certificate that the flags name, or makes one, and begins to keep it fresh.
///
/// # Errors
/// No certificate, or none that can be used; which flag says so.
pub async fn start(args: &Args, client: &Client, shutdown: &Shutdown) -> anyhow::Result<Identity> {
    let managed = args.publish.manage_service;
    if args.authority.self_signed {
        let address = args
            .publish
            .service_address
            .as_ref()
            .context("--self-signed needs --service-address")?;
        let names = vec![address.host().to_owned()];
        let started =
            authority::start(client.clone(), &args.authority, names, managed, shutdown.clone());
        let (certificates, bundles) = started.await?;
        return Ok(Identity { certificates, bundles: managed.then_some(bundles) });
    }
    let Some((cert, key)) = args.tls.files() else {
        bail!(
            "no certificate to serve with: give --tls-cert and --tls-key (or TLS_CERT_PATH and TLS_KEY_PATH), or \
             --self-signed"
        );
    };
    let (certificates, watcher) = Certificates::from_files(cert, key)?;
    tokio::spawn(watcher.watch(shutdown.clone()));
    let bundles = match managed {
        true => Some(publish::bundles_of_files(&args.publish, &args.tls, shutdown.clone())?),
        false => None,
    };
    Ok(Identity { certificates, bundles })
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
