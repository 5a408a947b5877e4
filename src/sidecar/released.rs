//! The released Kubernetes SnapshotMetadata API. Each call is checked in this order: arguments,
//! token, permission, driver, names, secrets (docs/design/architecture.md, "A request through the
//! sidecar").

use tokio::sync::watch;
use tonic::{Code, Request, Response, Status};

use super::access::Authenticator;
use super::call::Call;
use super::metrics::Operation;
use super::refusal::{Reason, Refusal};
use super::relay::{Opened, Relay, exiting};
use super::request::MetadataRequest;
use super::service::{Context, MetadataApi, Prepared, Sidecar};
use crate::kubernetes::cache::Key;
use crate::proto::snapshotmetadata as api;
use crate::telemetry::peer::Peer;
use api::snapshot_metadata_server::SnapshotMetadata;

/// The server of the API. Clones share all state.
#[derive(Clone)]
pub struct Released {
    pub sidecar: Sidecar,
    /// Set once the driver's name is known.
    pub authenticator: watch::Receiver<Option<Authenticator>>,
}

impl MetadataApi for Released {
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
        opened.map_err(|refusal| self.explained(refusal, &request))
    }
}

impl Released {
    /// A driver's refusal of a base, with the next step if the base is a name instead of a handle.
    fn explained(&self, refusal: Refusal, request: &MetadataRequest) -> Refusal {
        let is_of_base =
            matches!(refusal.reason, Reason::Driver(Code::NotFound | Code::InvalidArgument));
        let Some(base) = request.base.as_deref().filter(|_| is_of_base) else { return refusal };
        let named =
            self.sidecar.resolver.bound.snapshots.cached(&Key::new(&request.namespace, base));
        if !matches!(named, Some(Some(_))) {
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
        let Sidecar { driver, resolver, .. } = &self.sidecar;
        let Some(authenticator) = self.authenticator.borrow().clone() else {
            // Without the driver's name the audience is unknown.
            return Err(driver.name().err().unwrap_or_else(exiting));
        };
        let caller = authenticator.authenticate(request, peer).await?;
        call.set_user(caller.username());
        caller.authorize(&request.namespace).await?;
        let driver = driver.capable()?;
        let user = caller.username().unwrap_or_default();
        let stream = self.sidecar.streams.acquire(user, &request.namespace)?;
        let target = resolver.target(&driver, &request.namespace, &request.target).await?;
        let base = match &request.base {
            Some(base) => Some(resolver.base(&driver, base, &target, &caller).await?),
            None => None,
        };
        let window = (request.starting_offset, request.max_results);
        self.sidecar.prepare(&target, base, window, stream).await
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
        self.serve(Operation::Allocated, request, MetadataRequest::allocated).await
    }

    async fn get_metadata_delta(
        &self,
        request: Request<api::GetMetadataDeltaRequest>,
    ) -> Result<Response<Relay>, Status> {
        self.serve(Operation::Delta, request, MetadataRequest::delta).await
    }
}
