//! The sidecar of a node: CSI's SnapshotMetadata service over TLS, for one ServiceAccount. Handles
//! and secrets come from the caller, which has resolved and checked them.

use tokio::sync::watch;
use tonic::{Request, Response, Status};

use crate::sidecar::access::{Authenticator, User, authenticate};
use crate::sidecar::call::Call;
use crate::sidecar::driver_link::DriverRequest;
use crate::sidecar::metrics::Operation;
use crate::sidecar::refusal::{Reason, Refusal};
use crate::sidecar::relay::{Opened, Relay};
use crate::sidecar::request::{self, Token};
use crate::sidecar::service::{Context, MetadataApi, Prepared, Sidecar};
use csi::snapshot_metadata_server::SnapshotMetadata;
use grpc::proto::csi::v1 as csi;
use kubernetes::cache::Key;
use kubernetes::secret::Secrets;

/// The server of the API. Clones share all state.
#[derive(Clone)]
pub struct NodeApi {
    pub sidecar: Sidecar,
    /// Set once the driver's name is known, which is part of the audience.
    pub authenticator: watch::Receiver<Option<Authenticator>>,
    /// The only caller.
    pub front: Key,
}

/// A valid request.
pub struct NodeRequest {
    /// Of the header `authorization`.
    token: Option<Token>,
    driver_request: DriverRequest,
    secrets: Secrets,
}

impl MetadataApi for NodeApi {
    type Request = NodeRequest;

    fn sidecar(&self) -> &Sidecar {
        &self.sidecar
    }

    async fn open(
        &self,
        call: &mut Call,
        request: NodeRequest,
        context: Context,
    ) -> Result<Opened, Refusal> {
        let NodeRequest { token, driver_request, secrets } = request;
        call.set_snapshots(&driver_request.target, driver_request.base.as_deref());
        let token = token.ok_or_else(|| {
            Refusal::new(Reason::Unauthenticated, "authorization: is not a bearer token")
        })?;
        let driver = &self.sidecar.driver;
        let caller = authenticate(&self.authenticator, driver, &token, context.peer).await?;
        let user = caller.username().unwrap_or_default();
        call.set_user(Some(user));
        let Key { namespace, name } = &self.front;
        if user != format!("system:serviceaccount:{namespace}:{name}") {
            let message = format!("{user} is not the ServiceAccount {namespace}/{name}");
            return Err(Refusal::new(Reason::NotAllowed, message));
        }
        driver.capable()?;
        let stream = self.sidecar.streams.acquire(user, "")?;
        let prepared = Prepared { driver_request, secrets, stream, node: None };
        self.sidecar.open_stream(prepared, None, context.deadline).await
    }
}

/// Clients of the public APIs send their token in the message.
fn token<R>(request: &Request<R>) -> Option<Token> {
    request::bearer(request.metadata().as_ref()).map(|token| token.to_owned().into())
}

fn allocated(
    token: Option<Token>,
    request: csi::GetMetadataAllocatedRequest,
) -> Result<NodeRequest, Refusal> {
    let csi::GetMetadataAllocatedRequest { snapshot_id, starting_offset, max_results, secrets } =
        request;
    request::handle("snapshot_id", &snapshot_id)?;
    request::window(starting_offset, max_results)?;
    let driver_request =
        DriverRequest { target: snapshot_id, base: None, starting_offset, max_results };
    Ok(NodeRequest { token, driver_request, secrets: secrets.into_iter().collect() })
}

fn delta(
    token: Option<Token>,
    request: csi::GetMetadataDeltaRequest,
) -> Result<NodeRequest, Refusal> {
    let csi::GetMetadataDeltaRequest {
        base_snapshot_id,
        target_snapshot_id,
        starting_offset,
        max_results,
        secrets,
    } = request;
    request::handle("base_snapshot_id", &base_snapshot_id)?;
    request::handle("target_snapshot_id", &target_snapshot_id)?;
    request::window(starting_offset, max_results)?;
    let (target, base) = (target_snapshot_id, Some(base_snapshot_id));
    let driver_request = DriverRequest { target, base, starting_offset, max_results };
    Ok(NodeRequest { token, driver_request, secrets: secrets.into_iter().collect() })
}

#[tonic::async_trait]
impl SnapshotMetadata for NodeApi {
    type GetMetadataAllocatedStream = Relay;
    type GetMetadataDeltaStream = Relay;

    async fn get_metadata_allocated(
        &self,
        request: Request<csi::GetMetadataAllocatedRequest>,
    ) -> Result<Response<Relay>, Status> {
        let token = token(&request);
        self.serve(Operation::Allocated, request, |request| allocated(token, request)).await
    }

    async fn get_metadata_delta(
        &self,
        request: Request<csi::GetMetadataDeltaRequest>,
    ) -> Result<Response<Relay>, Status> {
        let token = token(&request);
        self.serve(Operation::Delta, request, |request| delta(token, request)).await
    }
}
