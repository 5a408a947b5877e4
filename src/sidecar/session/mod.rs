//! The SnapshotMetadata API of snapshot sessions (KEP-3314, session design, "The External Snapshot Session Sidecar"): the token
//! alone says who asks and for what. Each call is checked, translated and relayed, in this order: arguments, token, driver,
//! snapshots of the session, volume, secrets, driver's answer.
//!
//! The driver's own session API is relayed as it is. Where it lacks that, or needs secrets, for which that API has no
//! field, CSI's is asked and the one field rewritten in which the two differ.

mod request;
mod rewrite;
mod tokens;

use tokio::time::Instant;
use tonic::{Request, Response, Status};

use self::request::Asked;
pub use self::tokens::Tokens;
use super::call::Call;
use super::metrics::Operation;
use super::refusal::{Reason, Refusal};
use super::relay::{Opened, Relay, of_driver};
use super::resolve::fits;
use super::service::{Cleared, Front, Sidecar};
use crate::grpc::fingerprint;
use crate::kubernetes::bound_snapshot::{Part, Snapshot};
use crate::kubernetes::session::{SessionSnapshot, SnapshotSessionData};
use crate::proto::snapshotsession as api;
use api::snapshot_metadata_server::SnapshotMetadata;

/// Cheap to clone.
#[derive(Clone)]
pub struct Sessions {
    pub sidecar: Sidecar,
    pub tokens: Tokens,
}

impl Front for Sessions {
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
        let session = fingerprint(asked.token.reveal());
        call.of(session.clone());
        call.about(&asked.target, asked.base.as_deref());
        let (cleared, volume) = self.clear(call, &asked).await?;
        if cleared.secrets.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let question = cleared.question.clone();
            let check = self.sidecar.check(&question);
            let own = self.sidecar.driver.ask_session(question, session, volume, left).await;
            if let Some(answer) = own.map_err(|status| of_driver(&status, &cleared.secrets))? {
                let Cleared { secrets, stream, .. } = cleared;
                return Ok(Opened { answer, check, rewrite: None, secrets, stream });
            }
        }
        self.sidecar.ask(cleared, Some(rewrite::of_csi), deadline).await
    }
}

impl Sessions {
    /// All that stands between a request and its answer. Returns also the volume's handle, or nothing where Kubernetes
    /// does not know it.
    async fn clear(&self, call: &mut Call, asked: &Asked) -> Result<(Cleared, String), Refusal> {
        let Sidecar { driver, resolver, .. } = &self.sidecar;
        let session = self.tokens.session(&asked.token).await?;
        let driver = driver.capable()?;
        if session.spec.driver != driver {
            return Err(tokens::invalid());
        }
        let stream = self.sidecar.stream()?;
        let (field, base_field) = match asked.base {
            None => ("snapshot", ""),
            Some(_) => ("target_snapshot", "base_snapshot"),
        };
        let target = member(&session, field, &asked.target)?;
        call.within(&target.namespace);
        let base =
            asked.base.as_deref().map(|base| member(&session, base_field, base)).transpose()?;
        let target = resolver.member(&driver, target, Part::Target).await?;
        let base = match base {
            Some(base) => {
                let base = resolver.member(&driver, base, Part::Base).await?;
                fits(base_field, &base.content, &target.content)?;
                Some(base.handle)
            }
            None => None,
        };
        check_volume(&asked.volume_id, &target)?;
        let volume = target.content.spec.source.volume_handle.clone().unwrap_or_default();
        let window = (asked.starting_offset, asked.max_results);
        Ok((self.sidecar.cleared(&target, base, window, stream).await?, volume))
    }
}

/// The snapshot of this name, if it is one of the session's.
fn member<'a>(
    session: &'a SnapshotSessionData,
    field: &str,
    name: &str,
) -> Result<&'a SessionSnapshot, Refusal> {
    session.spec.snapshots.iter().find(|member| member.name == name).ok_or_else(|| {
        let message = format!(
            "{field}: the session was not made for a VolumeSnapshot {name}; make another one that names it"
        );
        Refusal::new(Reason::NotInSession, message)
    })
}

/// Where a volume is named it has to be the snapshot's.
fn check_volume(volume_id: &str, snapshot: &Snapshot) -> Result<(), Refusal> {
    let shown = snapshot.shown();
    let message = match snapshot.content.spec.source.volume_handle.as_deref() {
        _ if volume_id.is_empty() => return Ok(()),
        Some(own) if own == volume_id => return Ok(()),
        Some(_) => format!(
            "volume_id: is not the handle of the volume that VolumeSnapshot {shown} is of; correct it, or leave it empty"
        ),
        None => format!(
            "volume_id: the VolumeSnapshotContent of VolumeSnapshot {shown} does not tell its volume; leave it empty"
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
        let (metadata, _, request) = request.into_parts();
        self.answer(Operation::SessionAllocated, &metadata, Asked::allocated(request)).await
    }

    async fn get_delta(
        &self,
        request: Request<api::GetDeltaRequest>,
    ) -> Result<Response<Relay>, Status> {
        let (metadata, _, request) = request.into_parts();
        self.answer(Operation::SessionDelta, &metadata, Asked::delta(request)).await
    }
}
