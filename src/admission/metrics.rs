//! Metrics of the webhooks. Labels come from fixed sets: no content of a review becomes a label.

use std::fmt;
use std::sync::Arc;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use kubernetes::admission::{Observer, Outcome};

/// Upper bounds of the histogram's buckets in seconds. The API server times out after 5 s.
const BUCKETS: [f64; 9] = [0.000_5, 0.001, 0.002_5, 0.01, 0.05, 0.25, 1.0, 2.5, 5.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Review {
    webhook: &'static str,
    verdict: &'static str,
}

/// Clones share the registry and its metrics.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    reviews: Family<Review, Histogram, fn() -> Histogram>,
    policy_taken: Gauge,
}

impl Metrics {
    /// `more` registers the metrics of other components.
    pub fn new(more: impl FnOnce(&mut Registry)) -> Self {
        let mut registry = Registry::with_prefix("csi_loopback_admission");
        let reviews: Family<Review, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(BUCKETS));
        registry.register(
            "review_duration_seconds",
            "Duration of admission reviews by webhook and verdict",
            reviews.clone(),
        );
        let policy_taken = Gauge::default();
        registry.register(
            "policy_taken",
            "1 if the ConfigMap's policy is in effect, 0 if it is invalid or not loaded",
            policy_taken.clone(),
        );
        more(&mut registry);
        Self { registry: Arc::new(registry), reviews, policy_taken }
    }

    /// The recorder of the reviews of one webhook.
    pub fn count(&self, webhook: &'static str) -> Observer {
        let reviews = self.reviews.clone();
        Arc::new(move |outcome, duration| {
            let verdict = match outcome {
                Outcome::Allowed => "allowed",
                Outcome::Changed => "changed",
                Outcome::Refused => "refused",
                Outcome::Failed => "failed",
                Outcome::Malformed => "nonsense",
            };
            reviews.get_or_create(&Review { webhook, verdict }).observe(duration.as_secs_f64());
        })
    }

    /// Encodes the metrics for a scrape.
    pub fn scrape(&self, is_policy_current: bool) -> Result<String, fmt::Error> {
        self.policy_taken.set(is_policy_current.into());
        let mut body = String::new();
        text::encode(&mut body, &self.registry)?;
        Ok(body)
    }
}
