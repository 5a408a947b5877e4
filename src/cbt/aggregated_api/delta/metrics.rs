//! Metrics of responses. Labels come from fixed sets, never from a request.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::aggregated_api::failure::Failure;
use kubernetes::snapshot_delta::{VolumeSnapshotDelta, VolumeSnapshotDeltaState};

/// Upper bounds of the histogram's buckets, in seconds: a page is one call of a driver.
const BUCKETS: [f64; 10] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

/// Clones share the metrics.
#[derive(Clone)]
pub struct Metrics {
    answers: Family<Outcome, Counter>,
    endpoint: Histogram,
}

impl Metrics {
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self { answers: Family::default(), endpoint: Histogram::new(BUCKETS) };
        registry.register(
            "delta_answers",
            "VolumeSnapshotDeltas, by state or cause of failure",
            Family::clone(&metrics.answers),
        );
        registry.register(
            "delta_endpoint_seconds",
            "Duration of page requests to drivers' endpoints",
            metrics.endpoint.clone(),
        );
        metrics
    }

    pub(super) fn answered(&self, answer: &Result<VolumeSnapshotDelta, Failure>) {
        let outcome = match answer {
            Ok(delta) => match delta.status.as_ref().map(|status| status.state) {
                Some(VolumeSnapshotDeltaState::Continue) => "continue",
                Some(VolumeSnapshotDeltaState::Failed) => "failed",
                Some(VolumeSnapshotDeltaState::Completed) | None => "completed",
            },
            Err(failure) => failure.cause.label(),
        };
        self.answers.get_or_create(&Outcome { outcome }).inc();
    }

    pub(super) fn called(&self, duration: Duration) {
        self.endpoint.observe(duration.as_secs_f64());
    }
}
