//! The Kubernetes SnapshotMetadata API as released: each call is checked, translated and relayed, in this order:
//! arguments, token, permission, driver, names, secrets, driver's answer (DESIGN section 4).

use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::access::Gate;
use super::call::Call;
use super::metrics::Operation;
use super::refusal::Refusal;
use super::relay::{Opened, Relay, exiting};
use super::request::Asked;
use super::service::{Cleared, Front, Sidecar};
use crate::proto::snapshotmetadata as api;
use api::snapshot_metadata_server::SnapshotMetadata;

/// Cheap to clone.
#[derive(Clone)]
pub struct Released {
    pub sidecar: Sidecar,
    /// Set once the driver's name is known.
    pub gate: watch::Receiver<Option<Gate>>,
}

impl Front for Released {
    type Asked = Asked;

    fn sidecar(&self) -> &Sidecar {
        &self.sidecar
    }

    async fn open(
        &self,
        call: &mut Call,
        asked: Asked,
        deadline: Instant,
    ) -> Result<Opened, Refusal> {
        call.within(&asked.namespace);
        call.about(&asked.target, asked.base.as_deref());
        let cleared = self.clear(call, &asked).await?;
        self.sidecar.ask(cleared, None, deadline).await
    }
}

impl Released {
    /// All that stands between a request and its answer.
    async fn clear(&self, call: &mut Call, asked: &Asked) -> Result<Cleared, Refusal> {
        let Sidecar { driver, resolver, .. } = &self.sidecar;
        let Some(gate) = self.gate.borrow().clone() else {
            // Without the driver's name nobody knows the audience.
            return Err(driver.name().err().unwrap_or_else(exiting));
        };
        let caller = gate.authenticate(asked).await?;
        call.by(caller.username());
        caller.authorize(&asked.namespace).await?;
        let driver = driver.capable()?;
        let stream = self.sidecar.stream()?;
        let target = resolver.target(&driver, &asked.namespace, &asked.target).await?;
        let base = match &asked.base {
            Some(base) => Some(resolver.base(&driver, base, &target, &caller).await?),
            None => None,
        };
        let window = (asked.starting_offset, asked.max_results);
        self.sidecar.cleared(&target, base, window, stream).await
    }
}

#[tonic::async_trait]
impl SnapshotMetadata for Released {
    type GetMetadataAllocatedStream = Relay;
    type GetMetadataDeltaStream = Relay;

    async fn get_metadata_allocated(
        &self,
        request: Request<api::GetMetadataAllocatedRequest>,
    ) -> Result<Response<Relay>, Status> {
        let (metadata, _, request) = request.into_parts();
        self.answer(Operation::Allocated, &metadata, Asked::allocated(request)).await
    }

    async fn get_metadata_delta(
        &self,
        request: Request<api::GetMetadataDeltaRequest>,
    ) -> Result<Response<Relay>, Status> {
        let (metadata, _, request) = request.into_parts();
        self.answer(Operation::Delta, &metadata, Asked::delta(request)).await
    }
}
