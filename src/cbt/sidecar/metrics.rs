//! The sidecar's metrics. Labels come from fixed sets and the driver's name, never from a client.
//! The histogram has the released sidecar's name, labels and values, with two exceptions: snapshots
//! are not labels, and deltas are counted as deltas.

use std::fmt;
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tonic::Code;

/// Upper bounds of the buckets in seconds: the released sidecar's, and smaller ones.
const BUCKETS: [f64; 17] = [
    0.002, 0.005, 0.01, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0,
    600.0,
];

/// The RPCs of both APIs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    Allocated,
    Delta,
    SessionAllocated,
    SessionDelta,
}

impl Operation {
    /// Name of the RPC.
    pub const fn method(self) -> &'static str {
        match self {
            Self::Allocated => "GetMetadataAllocated",
            Self::Delta => "GetMetadataDelta",
            Self::SessionAllocated => "GetAllocated",
            Self::SessionDelta => "GetDelta",
        }
    }

    /// Value of the label `method_name`. The released sidecar has the first two.
    const fn label(self) -> &'static str {
        match self {
            Self::Allocated => "MetadataAllocated",
            Self::Delta => "MetadataDelta",
            Self::SessionAllocated => "SessionAllocated",
            Self::SessionDelta => "SessionDelta",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Call {
    driver_name: String,
    method_name: &'static str,
    grpc_status_code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

type Histograms = Family<Call, Histogram, fn() -> Histogram>;

/// Clones share the metrics.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    driver_name: Arc<OnceLock<String>>,
    calls: Histograms,
    refused: Family<ReasonLabel, Counter>,
    certificates: Family<ResultLabel, Counter>,
    open: Gauge<i64, AtomicI64>,
    extents: Counter,
    bytes: Counter,
    messages: Counter,
    driver_ready: Gauge,
    driver_capable: Gauge,
}

impl Metrics {
    /// `more` registers metrics of other parts.
    pub fn new(more: impl FnOnce(&mut Registry)) -> Self {
        let mut registry = Registry::default();
        let calls: Histograms = Family::new_with_constructor(|| Histogram::new(BUCKETS));
        registry.register(
            "snapshot_metadata_controller_operations_seconds",
            "Duration of calls, including the whole stream",
            calls.clone(),
        );
        let own = registry.sub_registry_with_prefix("csi_loopback_sidecar");
        let refused: Family<ReasonLabel, Counter> = Family::default();
        own.register("requests_refused", "Failed calls, by reason", refused.clone());
        let certificates: Family<ResultLabel, Counter> = Family::default();
        own.register(
            "node_certificates",
            "Requests for a node's certificate, by result: issued or denied",
            certificates.clone(),
        );
        let open = Gauge::default();
        own.register("streams_open", "Response streams in progress", open.clone());
        let (extents, bytes, messages) =
            (Counter::default(), Counter::default(), Counter::default());
        own.register("relayed_extents", "Extents relayed", extents.clone());
        own.register("relayed_message_bytes", "Bytes of messages relayed", bytes.clone());
        own.register("relayed_messages", "Messages relayed", messages.clone());
        let (driver_ready, driver_capable) = (Gauge::default(), Gauge::default());
        own.register(
            "driver_ready",
            "1 if the driver reports ready in Probe",
            driver_ready.clone(),
        );
        own.register(
            "driver_capable",
            "1 if the driver has the SnapshotMetadata service",
            driver_capable.clone(),
        );
        more(own);
        Self {
            registry: Arc::new(registry),
            driver_name: Arc::default(),
            calls,
            refused,
            certificates,
            open,
            extents,
            bytes,
            messages,
            driver_ready,
            driver_capable,
        }
    }

    pub fn driver(&self, name: &str, capable: bool) {
        let _ = self.driver_name.set(name.to_owned());
        self.driver_ready.set(1);
        self.driver_capable.set(capable.into());
    }

    pub fn node_certificate(&self, result: &'static str) {
        self.certificates.get_or_create(&ResultLabel { result }).inc();
    }

    pub fn driver_not_ready(&self) {
        self.driver_ready.set(0);
    }

    pub fn called(&self, operation: Operation, code: Code, duration: Duration) {
        let call = Call {
            driver_name: self.driver_name.get().cloned().unwrap_or_default(),
            method_name: operation.label(),
            grpc_status_code: go_name(code),
        };
        self.calls.get_or_create(&call).observe(duration.as_secs_f64());
    }

    pub fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&ReasonLabel { reason }).inc();
    }

    pub fn opened(&self) {
        self.open.inc();
    }

    pub fn closed(&self) {
        self.open.dec();
    }

    pub fn relayed(&self, messages: u64, extents: u64, bytes: u64) {
        self.messages.inc_by(messages);
        self.extents.inc_by(extents);
        self.bytes.inc_by(bytes);
    }

    /// The metrics in the text format.
    pub fn scrape(&self) -> Result<String, fmt::Error> {
        let mut body = String::new();
        text::encode(&mut body, &self.registry)?;
        Ok(body)
    }
}

/// Name of a code in Go, which the released sidecar uses as the label's value.
const fn go_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_operation_and_code() {
        let metrics = Metrics::new(|_| {});
        metrics.driver("loopback.csi.local", true);
        metrics.called(Operation::Delta, Code::Ok, Duration::from_millis(3));
        metrics.called(Operation::Delta, Code::NotFound, Duration::from_millis(3));
        metrics.refused("snapshot_missing");
        metrics.relayed(2, 512, 4096);
        let text = metrics.scrape().unwrap();
        for line in [
            r#"snapshot_metadata_controller_operations_seconds_count{driver_name="loopback.csi.local",method_name="MetadataDelta",grpc_status_code="OK"} 1"#,
            r#"grpc_status_code="NotFound"} 1"#,
            r#"csi_loopback_sidecar_requests_refused_total{reason="snapshot_missing"} 1"#,
            "csi_loopback_sidecar_relayed_extents_total 512",
            "csi_loopback_sidecar_streams_open 0",
        ] {
            assert!(text.contains(line), "{line} not in\n{text}");
        }
    }
}
