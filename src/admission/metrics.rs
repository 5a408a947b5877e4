//! The webhooks' numbers. Labels come from fixed sets: nothing that a review says becomes one.

use std::fmt;
use std::sync::Arc;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::kubernetes::admission::{Count, Outcome};

/// Upper ends of the histogram's buckets, in seconds: from what is known to what the API server does not wait for.
const BUCKETS: [f64; 9] = [0.000_5, 0.001, 0.002_5, 0.01, 0.05, 0.25, 1.0, 2.5, 5.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Review {
    webhook: &'static str,
    verdict: &'static str,
}

/// Cheap to clone; all clones count into the same numbers.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    reviews: Family<Review, Histogram, fn() -> Histogram>,
    policy_taken: Gauge,
}

impl Metrics {
    /// `more` registers numbers that live elsewhere.
    pub fn new(more: impl FnOnce(&mut Registry)) -> Self {
        let mut registry = Registry::with_prefix("csi_loopback_admission");
        let reviews: Family<Review, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(BUCKETS));
        registry.register(
            "review_duration_seconds",
            "Reviews by webhook and verdict, and how long they took",
            reviews.clone(),
        );
        let policy_taken = Gauge::default();
        registry.register(
            "policy_taken",
            "1 while what the ConfigMap says is what holds, 0 while it is not known or nonsense",
            policy_taken.clone(),
        );
        more(&mut registry);
        Self { registry: Arc::new(registry), reviews, policy_taken }
    }

    /// Who counts the reviews of one webhook.
    pub fn count(&self, webhook: &'static str) -> Count {
        let reviews = self.reviews.clone();
        Arc::new(move |outcome, duration| {
            let verdict = match outcome {
                Outcome::Allowed => "allowed",
                Outcome::Changed => "changed",
                Outcome::Refused => "refused",
                Outcome::Failed => "failed",
                Outcome::Nonsense => "nonsense",
            };
            reviews.get_or_create(&Review { webhook, verdict }).observe(duration.as_secs_f64());
        })
    }

    /// The text of a scrape.
    pub fn scrape(&self, is_policy_taken: bool) -> Result<String, fmt::Error> {
        self.policy_taken.set(is_policy_taken.into());
        let mut body = String::new();
        text::encode(&mut body, &self.registry)?;
        Ok(body)
    }
}
