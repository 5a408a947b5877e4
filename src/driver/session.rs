//! The SnapshotMetadata service of snapshot sessions (KEP-3314, "The SP Snapshot Session Service"), for a sidecar that
//! passes answers on as they are. It is CSI's under other names and numbers: snapshots and volumes go by their CSI
//! ids, and the token, which is the sidecar's business, is ignored.

use tonic::{Request, Response, Status};

use super::snapshot_metadata::{Asked, Window};
use super::stream::{Messages, extents_per_message};
use super::{Plugin, request};
use crate::backend::{Backend, Error, Result as Checked, Style};
use crate::proto::snapshotsession as session;
use session::snapshot_metadata_server::SnapshotMetadata;

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

fn allocated(backend: &Backend, asked: &session::GetAllocatedRequest) -> Checked<Asked> {
    let id = request::id("snapshot", &asked.snapshot)?;
    let volume = request::optional_id("volume_id", &asked.volume_id)?;
    let window = window("starting_offset", asked.starting_offset, asked.max_results)?;
    let map = backend.allocated(id)?;
    check_volume(backend, volume, id)?;
    Ok(Asked { map, window })
}

fn delta(backend: &Backend, asked: &session::GetDeltaRequest) -> Checked<Asked> {
    let base = request::id("base_snapshot", &asked.base_snapshot)?;
    let target = request::id("target_snapshot", &asked.target_snapshot)?;
    let volume = request::optional_id("volume_id", &asked.volume_id)?;
    let window = window("starting_byte_offset", asked.starting_byte_offset, asked.max_results)?;
    // First whether they are of one volume: that holds whatever the request says of it.
    let map = backend.delta(base, target)?;
    check_volume(backend, volume, target)?;
    Ok(Asked { map, window })
}

/// The snapshot has to be of the volume, where one is named.
fn check_volume(backend: &Backend, volume_id: &str, snapshot_id: &str) -> Checked<()> {
    if volume_id.is_empty() || backend.snapshot(snapshot_id)?.volume_id == volume_id {
        return Ok(());
    }
    Err(Error::Missing(format!(
        "volume_id: snapshot {snapshot_id:?} is not of the volume {volume_id:?}; name its own, or leave it empty"
    )))
}

/// Backend and CSI count to the end of an int64: no volume is longer.
fn window(field: &'static str, starting_offset: u64, max_results: u32) -> Checked<Window> {
    if i64::try_from(starting_offset).is_err() {
        let problem = format!("{field}: {starting_offset} is past the end of any volume");
        return Err(Error::OutOfRange(problem));
    }
    let max_results = usize::try_from(max_results).unwrap_or(usize::MAX);
    Ok(Window { starting_offset, extents_per_message: extents_per_message(max_results), field })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_that_is_no_int64_is_out_of_range_and_any_number_of_results_will_do() {
        assert!(window("f", i64::MAX as u64, u32::MAX).is_ok());
        let refused = window("starting_byte_offset", i64::MAX as u64 + 1, 0).unwrap_err();
        assert!(
            matches!(&refused, Error::OutOfRange(said) if said.starts_with("starting_byte_offset: "))
        );
    }
}
