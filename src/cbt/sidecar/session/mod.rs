//! The SnapshotMetadata API of snapshot sessions (KEP-3314, session design, "The External Snapshot
//! Session Sidecar"): the token alone identifies the caller and the snapshots. Each call is checked
//! in this order: arguments, token, driver, snapshots of the session, volume, secrets.
//!
//! The driver's own session API is relayed unchanged. If the driver lacks it, or needs secrets, for
//! which that API has no field, the sidecar calls CSI's API and rewrites the one field that
//! differs.

mod request;
mod rewrite;
mod tokens;

use tonic::{Request, Response, Status};

use self::request::SessionRequest;
pub use self::tokens::Tokens;
use super::call::Call;
use super::directory::Handles;
use super::metrics::Operation;
use super::refusal::{Reason, Refusal};
use super::relay::{Opened, Relay, of_driver};
use super::resolve::{Resolver, fits};
use super::secrets::SecretFinder;
use super::service::{Context, MetadataApi, Prepared, Sidecar, remaining};
use api::snapshot_metadata_server::SnapshotMetadata;
use grpc::fingerprint;
use grpc::proto::snapshotsession as api;
use kubernetes::bound_snapshot::{Part, Snapshot};
use kubernetes::session::{SessionSnapshot, SnapshotSessionData};
use telemetry::peer::Peer;

/// The server of the API. Clones share all state.
#[derive(Clone)]
pub struct Sessions {
    pub sidecar: Sidecar,
    pub tokens: Tokens,
    pub resolver: Resolver,
    pub secrets: SecretFinder,
}

impl MetadataApi for Sessions {
    type Request = SessionRequest;

    fn sidecar(&self) -> &Sidecar {
        &self.sidecar
    }

    async fn open(
        &self,
        call: &mut Call,
        request: SessionRequest,
        context: Context,
    ) -> Result<Opened, Refusal> {
        let session = fingerprint(request.token.reveal());
        call.set_session(session.clone());
        call.set_snapshots(&request.target, request.base.as_deref());
        let (prepared, volume) = self.prepare(call, &request, context.peer).await?;
        if prepared.secrets.is_empty() && self.sidecar.nodes.is_none() {
            let timeout = remaining(context.deadline);
            let driver_request = prepared.driver_request.clone();
            let check = self.sidecar.check(&driver_request);
            let own = self
                .sidecar
                .driver
                .get_session_metadata(driver_request, session, volume, timeout)
                .await;
            if let Some(answer) = own.map_err(|status| of_driver(&status, &prepared.secrets))? {
                let Prepared { secrets, stream, .. } = prepared;
                return Ok(Opened { answer, check, rewrite: None, secrets, stream, node: None });
            }
        }
        self.sidecar.open_stream(prepared, Some(rewrite::of_csi), context.deadline).await
    }
}

impl Sessions {
    /// All checks between a request and the driver's response. Also returns the volume's handle,
    /// empty if Kubernetes does not know it.
    async fn prepare(
        &self,
        call: &mut Call,
        request: &SessionRequest,
        peer: Peer,
    ) -> Result<(Prepared, String), Refusal> {
        let Self { sidecar: Sidecar { driver, .. }, resolver, .. } = self;
        let session = self.tokens.session(&request.token, peer).await?;
        let driver = driver.capable()?;
        if session.spec.driver != driver {
            return Err(tokens::invalid());
        }
        let (session_token, owner) = (request.token.reveal(), &session.spec.request.namespace);
        let stream = self.sidecar.streams.acquire(&fingerprint(session_token), owner)?;
        let (field, base_field) = match request.base {
            None => ("snapshot", ""),
            Some(_) => ("target_snapshot", "base_snapshot"),
        };
        let target = member(&session, field, &request.target)?;
        call.set_namespace(&target.namespace);
        let base =
            request.base.as_deref().map(|base| member(&session, base_field, base)).transpose()?;
        let target = resolver.member(&driver, target, Part::Target).await?;
        let base = match base {
            Some(base) => {
                let base = resolver.member(&driver, base, Part::Base).await?;
                fits(base_field, &base.content, &target.content)?;
                Some(base.handle)
            }
            None => None,
        };
        check_volume(&request.volume_id, &target)?;
        let volume = target.content.spec.source.volume_handle.clone().unwrap_or_default();
        let secrets = self.secrets.secrets(&target).await?;
        let handles = Handles::of(target, base, secrets);
        let window = (request.starting_offset, request.max_results);
        Ok((Prepared::new(handles, window, stream), volume))
    }
}

/// The session's snapshot with this name.
fn member<'a>(
    session: &'a SnapshotSessionData,
    field: &str,
    name: &str,
) -> Result<&'a SessionSnapshot, Refusal> {
    session.spec.snapshots.iter().find(|member| member.name == name).ok_or_else(|| {
        let message = format!(
            "{field}: VolumeSnapshot {name} is not part of the session; create a SnapshotSessionRequest that names it"
        );
        Refusal::new(Reason::NotInSession, message)
    })
}

/// A volume that is named must be the snapshot's.
fn check_volume(volume_id: &str, snapshot: &Snapshot) -> Result<(), Refusal> {
    let shown = snapshot.shown();
    let message = match snapshot.content.spec.source.volume_handle.as_deref() {
        _ if volume_id.is_empty() => return Ok(()),
        Some(own) if own == volume_id => return Ok(()),
        Some(_) => format!(
            "volume_id: is not the handle of the volume of VolumeSnapshot {shown}; correct it, or leave it empty"
        ),
        None => format!(
            "volume_id: the VolumeSnapshotContent of VolumeSnapshot {shown} does not name its volume; leave it empty"
        ),
    };
    Err(Refusal::new(Reason::OtherVolumeId, message))
}

#[tonic::async_trait]
impl SnapshotMetadata for Sessions {
    type GetAllocatedStream = Relay;
    type GetDeltaStream = Relay;

    async fn get_allocated(
        &self,
        request: Request<api::GetAllocatedRequest>,
    ) -> Result<Response<Relay>, Status> {
        self.serve(Operation::SessionAllocated, request, SessionRequest::allocated).await
    }

    async fn get_delta(
        &self,
        request: Request<api::GetDeltaRequest>,
    ) -> Result<Response<Relay>, Status> {
        self.serve(Operation::SessionDelta, request, SessionRequest::delta).await
    }
}
