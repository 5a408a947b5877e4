//! The server's metrics. Labels come from fixed sets, never from a request.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::failure::Cause;

/// Upper bounds of the buckets, in seconds.
const BUCKETS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verb {
    /// Creates a VolumeSnapshotDelta.
    Create,
    /// Reads discovery, OpenAPI or version.
    Read,
    /// Anything that the server does not have.
    Other,
}

impl Verb {
    const fn label(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Read => "read",
            Self::Other => "other",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    verb: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    verb: &'static str,
}

type Histograms = Family<Of, Histogram, fn() -> Histogram>;

/// Clones share the metrics.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    requests: Family<Request, Counter>,
    seconds: Histograms,
    limited: Counter,
}

impl Metrics {
    /// `more` registers metrics of other parts.
    pub fn new<T>(more: impl FnOnce(&mut Registry) -> T) -> (Self, T) {
        let mut registry = Registry::with_prefix("csi_loopback_aggregated_api");
        let requests = Family::<Request, Counter>::default();
        let seconds: Histograms = Family::new_with_constructor(|| Histogram::new(BUCKETS));
        let limited = Counter::default();
        registry.register(
            "requests",
            "Requests by verb and outcome: ok, or the cause of the refusal",
            requests.clone(),
        );
        registry.register("request_seconds", "Duration of requests", seconds.clone());
        registry.register(
            "requests_rate_limited",
            "Requests refused by a rate limit",
            limited.clone(),
        );
        let more = more(&mut registry);
        (Self { registry: Arc::new(registry), requests, seconds, limited }, more)
    }

    /// Counts a request; `refused` is the cause if it was refused.
    pub fn answered(&self, verb: Verb, refused: Option<Cause>, took: Duration) {
        let verb = verb.label();
        let outcome = refused.map_or("ok", Cause::label);
        self.requests.get_or_create(&Request { verb, outcome }).inc();
        self.seconds.get_or_create(&Of { verb }).observe(took.as_secs_f64());
        if refused == Some(Cause::TooMany) {
            self.limited.inc();
        }
    }

    pub fn scrape(&self) -> Result<String, fmt::Error> {
        let mut body = String::new();
        text::encode(&mut body, &self.registry)?;
        Ok(body)
    }
}
