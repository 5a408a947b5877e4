//! What the APIs have in common: a call is counted, opened within its limits and relayed. How it is opened is the
//! API's own: [`released`](super::released) and [`session`](super::session).

use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tonic::metadata::MetadataMap;
use tonic::{Code, Response, Status};

use super::call::{Call, Calls, Running};
use super::check::StreamCheck;
use super::driver_link::{DriverLink, Question};
use super::metrics::{Metrics, Operation};
use super::refusal::{Reason, Refusal};
use super::relay::{Limits, Opened, Relay, Rewrite, exiting, of_driver, too_long};
use super::resolve::Resolver;
use super::secrets::SecretFinder;
use crate::grpc::deadline;
use crate::kubernetes::bound_snapshot::Snapshot;
use crate::kubernetes::secret::Secrets;
use crate::telemetry::shutdown::Shutdown;

/// What the calls share. Cheap to clone.
#[derive(Clone)]
pub struct Sidecar {
    pub driver: DriverLink,
    pub resolver: Resolver,
    pub secrets: SecretFinder,
    pub metrics: Metrics,
    /// Calls in all, and those whose answers are being relayed.
    pub calls: Calls,
    pub streams: Calls,
    pub longest: Duration,
    /// Whether answers are held to the contract of their stream.
    pub check_streams: bool,
    /// The code for a user who may not.
    pub denied_as: Code,
    pub shutdown: Shutdown,
}

impl Sidecar {
    fn begin(&self, operation: Operation) -> Result<Call, Status> {
        match self.calls.begin() {
            Some(running) => {
                Ok(Call::begin(operation, self.metrics.clone(), self.denied_as, running))
            }
            None => {
                let refusal = too_many("calls");
                self.metrics.refused(refusal.reason.label());
                Err(refusal.status())
            }
        }
    }

    /// Room for one more answer.
    pub fn stream(&self) -> Result<Running, Refusal> {
        self.streams.begin().ok_or_else(|| too_many("streams"))
    }

    /// The last step before the driver is asked: its secrets.
    pub async fn cleared(
        &self,
        target: &Snapshot,
        base: Option<String>,
        (starting_offset, max_results): (i64, i32),
        stream: Running,
    ) -> Result<Cleared, Refusal> {
        let secrets = self.secrets.secrets(target).await?;
        let target = target.handle.clone();
        tracing::debug!(
            snapshot_id = target,
            base_snapshot_id = base,
            ?secrets,
            "asking the driver"
        );
        let question = Question { target, base, starting_offset, max_results };
        Ok(Cleared { question, secrets, stream })
    }

    /// What the answer to this is held to.
    pub fn check(&self, question: &Question) -> Option<StreamCheck> {
        self.check_streams.then(|| StreamCheck::new(question.starting_offset))
    }

    /// The answer of the driver's CSI service, whose messages are rewritten if that is said.
    pub async fn ask(
        &self,
        cleared: Cleared,
        rewrite: Option<Rewrite>,
        deadline: Instant,
    ) -> Result<Opened, Refusal> {
        let Cleared { question, secrets, stream } = cleared;
        let left = deadline.saturating_duration_since(Instant::now());
        let check = self.check(&question);
        match self.driver.ask(question, secrets.reveal(), left).await {
            Ok(answer) => Ok(Opened { answer, check, rewrite, secrets, stream }),
            Err(status) => Err(of_driver(&status, &secrets)),
        }
    }
}

/// A request that may be answered.
pub struct Cleared {
    pub question: Question,
    pub secrets: Secrets,
    pub stream: Running,
}

/// One of the APIs that the sidecar serves.
pub trait Front: Sync {
    /// A request of it, checked.
    type Asked: Send;

    fn sidecar(&self) -> &Sidecar;

    /// All that stands between a request and the driver's answer, and the start of that.
    fn open(
        &self,
        call: &mut Call,
        asked: Self::Asked,
        deadline: Instant,
    ) -> impl Future<Output = Result<Opened, Refusal>> + Send;

    /// Answers a call, of which `metadata` tells the client's deadline.
    fn answer(
        &self,
        operation: Operation,
        metadata: &MetadataMap,
        asked: Result<Self::Asked, Refusal>,
    ) -> impl Future<Output = Result<Response<Relay>, Status>> + Send {
        let sidecar = self.sidecar();
        let latest = Instant::now() + sidecar.longest;
        let deadline = deadline(metadata).map_or(latest, |deadline| deadline.min(latest));
        async move {
            let mut call = sidecar.begin(operation)?;
            let opening = async { self.open(&mut call, asked?, deadline).await };
            let opened = tokio::select! {
                opened = timeout_at(deadline, opening) => opened.unwrap_or_else(|_| Err(too_long())),
                () = sidecar.shutdown.ending() => Err(exiting()),
            };
            match opened {
                Ok(opened) => {
                    let limits = Limits { deadline, shutdown: sidecar.shutdown.clone() };
                    Ok(Response::new(Relay::new(opened, limits, call)))
                }
                Err(refusal) => Err(call.refused(&refusal)),
            }
        }
    }
}

pub fn too_many(what: &str) -> Refusal {
    let message = format!("too many {what} at once; try again later, or raise --max-streams");
    Refusal::new(Reason::TooMany, message)
}
