//! The snapshot RPCs of the CSI Controller service.

use super::request::{page, token};
use super::{Plugin, request, response};
use crate::status::Answer;
use grpc::proto::csi::v1 as csi;
use storage::SnapshotFilter;

pub fn create(
    plugin: &Plugin,
    req: csi::CreateSnapshotRequest,
) -> Answer<csi::CreateSnapshotResponse> {
    let name = request::name(&req.name)?;
    let volume_id = request::id("source_volume_id", &req.source_volume_id)?;
    request::keys("parameters", &req.parameters, &[])?;
    plugin.topology.check_requirement(req.accessibility_requirements.as_ref())?;
    let created = plugin.backend.create_snapshot(name, volume_id)?;
    Ok(csi::CreateSnapshotResponse { snapshot: Some(response::snapshot(&created, plugin)) })
}

pub fn delete(
    plugin: &Plugin,
    req: csi::DeleteSnapshotRequest,
) -> Answer<csi::DeleteSnapshotResponse> {
    plugin.backend.delete_snapshot(request::id("snapshot_id", &req.snapshot_id)?)?;
    Ok(csi::DeleteSnapshotResponse {})
}

pub fn list(plugin: &Plugin, req: csi::ListSnapshotsRequest) -> Answer<csi::ListSnapshotsResponse> {
    let some = |id: &str| (!id.is_empty()).then(|| id.to_owned());
    let filter = SnapshotFilter {
        snapshot_id: some(request::optional_id("snapshot_id", &req.snapshot_id)?),
        volume_id: some(request::optional_id("source_volume_id", &req.source_volume_id)?),
    };
    let max = page(request::max_entries(req.max_entries)?);
    let page = plugin.backend.snapshots(&filter, token(&req.starting_token), max)?;
    let entry = |snapshot| csi::list_snapshots_response::Entry {
        snapshot: Some(response::snapshot(snapshot, plugin)),
    };
    Ok(csi::ListSnapshotsResponse {
        entries: page.items.iter().map(entry).collect(),
        next_token: page.next.unwrap_or_default(),
    })
}

pub fn get(plugin: &Plugin, req: csi::GetSnapshotRequest) -> Answer<csi::GetSnapshotResponse> {
    let found = plugin.backend.snapshot(request::id("snapshot_id", &req.snapshot_id)?)?;
    Ok(csi::GetSnapshotResponse { snapshot: Some(response::snapshot(&found, plugin)) })
}
