//! What the sidecar shows to its clients: a certificate, and how that is kept fresh.

use anyhow::bail;
use prometheus_client::registry::Registry;

use super::Args;
use crate::kubernetes::tls::Certificates;
use crate::telemetry::shutdown::Shutdown;

/// The certificate that new connections get.
pub struct Identity {
    pub certificates: Certificates,
}

/// Takes the certificate that the flags name and begins to keep it fresh.
///
/// # Errors
/// No certificate, or none that can be used; which flag says so.
pub fn start(args: &Args, shutdown: &Shutdown) -> anyhow::Result<Identity> {
    let Some((cert, key)) = args.tls.files() else {
        bail!(
            "no certificate to serve with: give --tls-cert and --tls-key (or TLS_CERT_PATH and TLS_KEY_PATH)"
        );
    };
    let (certificates, watcher) = Certificates::from_files(cert, key)?;
    tokio::spawn(watcher.watch(shutdown.clone()));
    Ok(Identity { certificates })
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
