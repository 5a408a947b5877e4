//! The Kubernetes SnapshotMetadata API: each call is checked, translated and relayed, in this order: arguments, token,
//! permission, driver, names, secrets, driver's answer (DESIGN section 4).

use tokio::time::{Instant, timeout_at};
use tonic::{Code, Request, Response, Status};

use super::access::Gate;
use super::call::{Call, Calls, Running};
use super::driver_link::DriverLink;
use super::metrics::{Metrics, Operation};
use super::refusal::{Reason, Refusal};
use super::relay::{Limits, Relay, exiting, of_driver, too_long};
use super::request::Asked;
use super::resolve::{Resolver, Snapshot};
use super::secrets::{SecretFinder, Secrets};
use crate::grpc::deadline;
use crate::proto::csi::v1 as csi;
use crate::proto::snapshotmetadata as api;
use crate::telemetry::shutdown::Shutdown;
use api::snapshot_metadata_server::SnapshotMetadata;

/// What the calls share. Cheap to clone.
#[derive(Clone)]
pub struct Sidecar {
    pub driver: DriverLink,
    /// Set once the driver's name is known.
    pub gate: tokio::sync::watch::Receiver<Option<Gate>>,
    pub resolver: Resolver,
    pub secrets: SecretFinder,
    pub metrics: Metrics,
    /// Calls in all, and those whose answers are being relayed.
    pub calls: Calls,
    pub streams: Calls,
    pub longest: std::time::Duration,
    /// The code for a user who may not.
    pub denied_as: Code,
    pub shutdown: Shutdown,
}

/// A request that may be answered.
struct Cleared {
    target: Snapshot,
    /// Handle.
    base: Option<String>,
    secrets: Secrets,
    stream: Running,
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

    async fn answer(
        &self,
        mut call: Call,
        asked: Result<Asked, Refusal>,
        deadline: Option<Instant>,
    ) -> Result<Response<Relay>, Status> {
        let latest = Instant::now() + self.longest;
        let deadline = deadline.map_or(latest, |deadline| deadline.min(latest));
        let opened = tokio::select! {
            opened = timeout_at(deadline, self.open(&mut call, asked, deadline)) => {
                opened.unwrap_or_else(|_| Err(too_long()))
            }
            () = self.shutdown.ending() => Err(exiting()),
        };
        match opened {
            Ok((answer, secrets, stream)) => {
                let limits = Limits { deadline, shutdown: self.shutdown.clone() };
                Ok(Response::new(Relay::new(answer.into_inner(), secrets, limits, call, stream)))
            }
            Err(refusal) => Err(call.refused(&refusal)),
        }
    }

    async fn open(
        &self,
        call: &mut Call,
        asked: Result<Asked, Refusal>,
        deadline: Instant,
    ) -> Result<(Answer, Secrets, Running), Refusal> {
        let asked = asked?;
        call.about(&asked);
        let Cleared { target, base, secrets, stream } = self.clear(call, &asked).await?;
        let Asked { starting_offset, max_results, .. } = asked;
        let revealed = secrets.reveal();
        let left = deadline.saturating_duration_since(Instant::now());
        let answer = match base {
            None => {
                let mut request = Request::new(csi::GetMetadataAllocatedRequest {
                    snapshot_id: target.handle,
                    starting_offset,
                    max_results,
                    secrets: revealed,
                });
                request.set_timeout(left);
                self.driver.allocated(request).await
            }
            Some(base_snapshot_id) => {
                let mut request = Request::new(csi::GetMetadataDeltaRequest {
                    base_snapshot_id,
                    target_snapshot_id: target.handle,
                    starting_offset,
                    max_results,
                    secrets: revealed,
                });
                request.set_timeout(left);
                self.driver.delta(request).await
            }
        };
        match answer {
            Ok(answer) => Ok((answer, secrets, stream)),
            Err(status) => Err(of_driver(&status, &secrets)),
        }
    }

    /// All that stands between a request and its answer.
    async fn clear(&self, call: &mut Call, asked: &Asked) -> Result<Cleared, Refusal> {
        let Some(gate) = self.gate.borrow().clone() else {
            // Without the driver's name nobody knows the audience.
            return Err(self.driver.name().err().unwrap_or_else(exiting));
        };
        let user = gate.authenticate(asked).await?;
        call.by(user.username.as_deref());
        gate.authorize(&user, asked).await?;
        let driver = self.driver.capable()?;
        let stream = self.streams.begin().ok_or_else(|| too_many("streams"))?;
        let target = self.resolver.target(&driver, &asked.namespace, &asked.target).await?;
        let base = match &asked.base {
            Some(base) => Some(self.resolver.base(&driver, base, &target).await?),
            None => None,
        };
        let secrets = self.secrets.secrets(&target).await?;
        tracing::debug!(
            snapshot_id = target.handle,
            base_snapshot_id = base,
            ?secrets,
            "asking the driver"
        );
        Ok(Cleared { target, base, secrets, stream })
    }
}

type Answer = Response<tonic::codec::Streaming<crate::grpc::RawMessage>>;

fn too_many(what: &str) -> Refusal {
    let message = format!("too many {what} at once; try again later, or raise --max-streams");
    Refusal::new(Reason::TooMany, message)
}

#[tonic::async_trait]
impl SnapshotMetadata for Sidecar {
    type GetMetadataAllocatedStream = Relay;
    type GetMetadataDeltaStream = Relay;

    async fn get_metadata_allocated(
        &self,
        request: Request<api::GetMetadataAllocatedRequest>,
    ) -> Result<Response<Relay>, Status> {
        let call = self.begin(Operation::Allocated)?;
        let deadline = deadline(request.metadata());
        self.answer(call, Asked::allocated(request.into_inner()), deadline).await
    }

    async fn get_metadata_delta(
        &self,
        request: Request<api::GetMetadataDeltaRequest>,
    ) -> Result<Response<Relay>, Status> {
        let call = self.begin(Operation::Delta)?;
        let deadline = deadline(request.metadata());
        self.answer(call, Asked::delta(request.into_inner()), deadline).await
    }
}
