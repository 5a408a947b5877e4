//! The common part of both APIs: a call is counted, opened within its limits, and relayed.
//! [`snapshot_metadata`](super::snapshot_metadata) and [`session`](super::session) implement how it
//! is opened.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tonic::{Code, Request, Response, Status};

use super::call::{Call, ConcurrencyLimit};
use super::check::StreamCheck;
use super::directory::Handles;
use super::driver_link::{DriverLink, DriverRequest};
use super::metrics::{Metrics, Operation};
use super::nodes::Nodes;
use super::refusal::{Reason, Refusal};
use super::relay::{Limits, Opened, Relay, Rewrite, exiting, of_driver, too_long};
use super::stream_limit::{StreamLimit, StreamPermit};
use grpc::deadline;
use kubernetes::secret::Secrets;
use telemetry::log_budget::LogBudget;
use telemetry::peer::Peer;
use telemetry::shutdown::Shutdown;

/// State shared by all calls.
#[derive(Clone)]
pub struct Sidecar {
    pub driver: DriverLink,
    /// The drivers of all nodes, instead of `driver`.
    pub nodes: Option<Nodes>,
    pub metrics: Metrics,
    /// Limits of all calls, and of response streams.
    pub calls: ConcurrencyLimit,
    pub streams: StreamLimit,
    pub max_duration: Duration,
    /// Time after which a response that the client does not read ends.
    pub stall_timeout: Option<Duration>,
    /// Whether response streams are checked against their contract.
    pub check_streams: bool,
    /// The code for a user without permission.
    pub denied_as: Code,
    /// Limits the log lines of invalid tokens.
    pub invalid_tokens: Arc<LogBudget>,
    pub shutdown: Shutdown,
}

impl Sidecar {
    fn begin(&self, operation: Operation) -> Result<Call, Status> {
        match self.calls.try_acquire() {
            Some(running) => {
                let tokens = self.invalid_tokens.clone();
                Ok(Call::begin(operation, self.metrics.clone(), self.denied_as, tokens, running))
            }
            None => {
                let refusal = too_many("calls");
                self.metrics.refused(refusal.reason.label());
                Err(refusal.status())
            }
        }
    }

    /// The check of the response stream, if enabled.
    pub fn check(&self, driver_request: &DriverRequest) -> Option<StreamCheck> {
        self.check_streams.then(|| StreamCheck::new(driver_request.starting_offset))
    }

    /// Calls the driver's CSI service. `rewrite` converts its messages.
    pub async fn open_stream(
        &self,
        prepared: Prepared,
        rewrite: Option<Rewrite>,
        deadline: Instant,
    ) -> Result<Opened, Refusal> {
        let Prepared { driver_request, secrets, stream, node } = prepared;
        let check = self.check(&driver_request);
        let (answer, node) = match &self.nodes {
            Some(nodes) => {
                let called =
                    nodes.get_metadata(node.as_deref(), driver_request, &secrets, deadline);
                (called.await?, node)
            }
            None => {
                let timeout = remaining(deadline);
                let called = self.driver.get_metadata(driver_request, secrets.reveal(), timeout);
                (called.await.map_err(|status| of_driver(&status, &secrets))?, None)
            }
        };
        Ok(Opened { answer, check, rewrite, secrets, stream, node })
    }
}

/// A request that passed all checks.
pub struct Prepared {
    pub driver_request: DriverRequest,
    pub secrets: Secrets,
    pub stream: StreamPermit,
    /// The node that holds the target, if it is known.
    pub node: Option<String>,
}

impl Prepared {
    pub fn new(
        handles: Handles,
        (starting_offset, max_results): (i64, i32),
        stream: StreamPermit,
    ) -> Self {
        let Handles { target, base, secrets, node } = handles;
        tracing::debug!(
            snapshot_id = target,
            base_snapshot_id = base,
            ?secrets,
            "calling the driver"
        );
        let driver_request = DriverRequest { target, base, starting_offset, max_results };
        Self { driver_request, secrets, stream, node }
    }
}

/// What a call's connection and headers determine.
#[derive(Debug)]
pub struct Context {
    pub deadline: Instant,
    pub peer: Peer,
}

/// One of the APIs that the sidecar serves.
pub trait MetadataApi: Sync {
    /// A valid request of the API.
    type Request: Send;

    fn sidecar(&self) -> &Sidecar;

    /// Runs all checks and starts the driver's response stream.
    fn open(
        &self,
        call: &mut Call,
        request: Self::Request,
        context: Context,
    ) -> impl Future<Output = Result<Opened, Refusal>> + Send;

    /// Serves a call of the API.
    fn serve<R>(
        &self,
        operation: Operation,
        request: Request<R>,
        parse: impl FnOnce(R) -> Result<Self::Request, Refusal>,
    ) -> impl Future<Output = Result<Response<Relay>, Status>> + Send {
        let sidecar = self.sidecar();
        let latest = Instant::now() + sidecar.max_duration;
        let deadline = deadline(request.metadata()).map_or(latest, |deadline| deadline.min(latest));
        let peer = request.extensions().get().copied().unwrap_or_else(Peer::unknown);
        let request = parse(request.into_inner());
        async move {
            let mut call = sidecar.begin(operation)?;
            let context = Context { deadline, peer };
            let opening = async { self.open(&mut call, request?, context).await };
            let opened = tokio::select! {
                opened = timeout_at(deadline, opening) => opened.unwrap_or_else(|_| Err(too_long())),
                () = sidecar.shutdown.ending() => Err(exiting()),
            };
            match opened {
                Ok(opened) => {
                    let limits = Limits {
                        deadline,
                        stall_timeout: sidecar.stall_timeout,
                        shutdown: sidecar.shutdown.clone(),
                    };
                    Ok(Response::new(Relay::new(opened, limits, call)))
                }
                Err(refusal) => Err(call.refused(&refusal)),
            }
        }
    }
}

/// What remains of a call's time.
pub fn remaining(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

pub fn too_many(what: &str) -> Refusal {
    let message = format!("too many concurrent {what}; retry later, or increase --max-streams");
    Refusal::new(Reason::TooMany, message)
}
