//! The released Kubernetes SnapshotMetadata API. Each call is checked in this order: arguments,
//! token, permission, driver, names, secrets (docs/design/architecture.md, "A request through the
//! sidecar").

use tonic::{Code, Request, Response, Status};

use super::access::User;
use super::call::Call;
use super::directory::Directory;
use super::metrics::Operation;
use super::refusal::{Reason, Refusal};
use super::relay::{Opened, Relay};
use super::request::MetadataRequest;
use super::service::{Context, MetadataApi, Prepared, Sidecar};
use api::snapshot_metadata_server::SnapshotMetadata;
use grpc::proto::snapshotmetadata as api;
use telemetry::peer::Peer;

/// The server of the API. Clones share all state.
#[derive(Clone)]
pub struct SnapshotMetadataApi<D> {
    pub sidecar: Sidecar,
    pub directory: D,
}

impl<D: Directory> MetadataApi for SnapshotMetadataApi<D> {
    type Request = MetadataRequest;

    fn sidecar(&self) -> &Sidecar {
        &self.sidecar
    }

    async fn open(
        &self,
        call: &mut Call,
        request: MetadataRequest,
        context: Context,
    ) -> Result<Opened, Refusal> {
        call.set_namespace(&request.namespace);
        call.set_snapshots(&request.target, request.base.as_deref());
        let prepared = self.prepare(call, &request, context.peer).await?;
        let opened = self.sidecar.open_stream(prepared, None, context.deadline).await;
        match opened {
            Err(refusal) => Err(self.explained(refusal, &request).await),
            opened => opened,
        }
    }
}

impl<D: Directory> SnapshotMetadataApi<D> {
    /// A driver's refusal of a base, with the next step if the base is a name instead of a handle.
    async fn explained(&self, refusal: Refusal, request: &MetadataRequest) -> Refusal {
        // Drivers use several codes for an unknown id.
        let is_of_base = matches!(
            refusal.reason,
            Reason::Driver(
                Code::NotFound | Code::InvalidArgument | Code::FailedPrecondition | Code::Internal
            )
        );
        let Some(base) = request.base.as_deref().filter(|_| is_of_base) else { return refusal };
        if !self.directory.is_name(&request.namespace, base).await {
            return refusal;
        }
        let message = format!(
            "{}; base_snapshot_id: {base:?} is the name of a VolumeSnapshot; send its CSI handle \
             (status.snapshotHandle of its content), or start the sidecar with --base-reference either",
            refusal.message()
        );
        Refusal::new(refusal.reason, message)
    }

    /// All checks between a request and the driver's response.
    async fn prepare(
        &self,
        call: &mut Call,
        request: &MetadataRequest,
        peer: Peer,
    ) -> Result<Prepared, Refusal> {
        let caller = self.directory.authenticate(request, peer).await?;
        call.set_user(caller.username());
        caller.authorize(&request.namespace).await?;
        let driver = self.sidecar.driver.capable()?;
        let user = caller.username().unwrap_or_default();
        let stream = self.sidecar.streams.acquire(user, &request.namespace)?;
        let handles = self.directory.handles(&driver, request, &caller).await?;
        Ok(Prepared::new(handles, (request.starting_offset, request.max_results), stream))
    }
}

#[tonic::async_trait]
impl<D: Directory> SnapshotMetadata for SnapshotMetadataApi<D> {
    type GetMetadataAllocatedStream = Relay;
    type GetMetadataDeltaStream = Relay;

    async fn get_metadata_allocated(
        &self,
        request: Request<api::GetMetadataAllocatedRequest>,
    ) -> Result<Response<Relay>, Status> {
        self.serve(Operation::Allocated, request, MetadataRequest::allocated).await
    }

    async fn get_metadata_delta(
        &self,
        request: Request<api::GetMetadataDeltaRequest>,
    ) -> Result<Response<Relay>, Status> {
        self.serve(Operation::Delta, request, MetadataRequest::delta).await
    }
}
