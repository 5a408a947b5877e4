//! The SnapshotMetadata service of snapshot sessions (KEP-3314, "The SP Snapshot Session Service"),
//! for a sidecar that forwards responses unchanged. It mirrors CSI's service with other names and
//! field numbers. Snapshots and volumes are named by CSI id. The session token concerns only the
//! sidecar and is ignored here.

use tonic::{Request, Response, Status};

use super::snapshot_metadata::{MapRequest, Part};
use super::stream::{Messages, extents_per_message};
use super::{Plugin, request};
use grpc::proto::snapshotsession as session;
use session::snapshot_metadata_server::SnapshotMetadata;
use storage::{Backend, Error, Result as Checked, Style};

#[tonic::async_trait]
impl SnapshotMetadata for Plugin {
    type GetAllocatedStream = Messages;
    type GetDeltaStream = Messages;

    async fn get_allocated(
        &self,
        request: Request<session::GetAllocatedRequest>,
    ) -> Result<Response<Messages>, Status> {
        self.metadata("GetAllocated", request, allocated, number).await
    }

    async fn get_delta(
        &self,
        request: Request<session::GetDeltaRequest>,
    ) -> Result<Response<Messages>, Status> {
        self.metadata("GetDelta", request, delta, number).await
    }
}

fn number(style: Style) -> i32 {
    match style {
        Style::Variable => session::BlockMetadataType::VariableLength.into(),
        Style::Fixed(_) => session::BlockMetadataType::FixedLength.into(),
    }
}

fn allocated(backend: &Backend, req: &session::GetAllocatedRequest) -> Checked<MapRequest> {
    let id = request::id("snapshot", &req.snapshot)?;
    let volume = request::optional_id("volume_id", &req.volume_id)?;
    let part = part("starting_offset", req.starting_offset, req.max_results)?;
    let map = backend.allocated(id)?;
    check_volume(backend, volume, id)?;
    Ok(MapRequest { map, part })
}

fn delta(backend: &Backend, req: &session::GetDeltaRequest) -> Checked<MapRequest> {
    let base = request::id("base_snapshot", &req.base_snapshot)?;
    let target = request::id("target_snapshot", &req.target_snapshot)?;
    let volume = request::optional_id("volume_id", &req.volume_id)?;
    let part = part("starting_byte_offset", req.starting_byte_offset, req.max_results)?;
    // First check that both are snapshots of one volume, whatever volume the request names.
    let map = backend.delta(base, target)?;
    check_volume(backend, volume, target)?;
    Ok(MapRequest { map, part })
}

/// Checks that the snapshot belongs to the volume, if the request names one.
fn check_volume(backend: &Backend, volume_id: &str, snapshot_id: &str) -> Checked<()> {
    if volume_id.is_empty() || backend.snapshot(snapshot_id)?.volume_id == volume_id {
        return Ok(());
    }
    Err(Error::Missing(format!(
        "volume_id: snapshot {snapshot_id:?} does not belong to volume {volume_id:?}; pass the volume of the snapshot, or leave the field empty"
    )))
}

/// Backend and CSI use int64 offsets, and no volume is larger.
fn part(field: &'static str, starting_offset: u64, max_results: u32) -> Checked<Part> {
    if i64::try_from(starting_offset).is_err() {
        let problem = format!("{field}: {starting_offset} is beyond the end of any volume");
        return Err(Error::OutOfRange(problem));
    }
    let max_results = usize::try_from(max_results).unwrap_or(usize::MAX);
    Ok(Part { starting_offset, extents_per_message: extents_per_message(max_results), field })
}
