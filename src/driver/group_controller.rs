//! The CSI GroupController service: snapshots of several volumes at one point in time.

use tonic::{Request, Response, Status};

use super::{Plugin, request, response};
use crate::status::Answer;
use csi::group_controller_server::GroupController;
use csi::group_controller_service_capability::{Rpc, Type, rpc};
use grpc::proto::csi::v1 as csi;
use storage::{Error, Result as Checked};

#[tonic::async_trait]
impl GroupController for Plugin {
    async fn group_controller_get_capabilities(
        &self,
        request: Request<csi::GroupControllerGetCapabilitiesRequest>,
    ) -> Result<Response<csi::GroupControllerGetCapabilitiesResponse>, Status> {
        self.call("GroupControllerGetCapabilities", request, |_, _| Ok(capabilities())).await
    }

    async fn create_volume_group_snapshot(
        &self,
        request: Request<csi::CreateVolumeGroupSnapshotRequest>,
    ) -> Result<Response<csi::CreateVolumeGroupSnapshotResponse>, Status> {
        self.call("CreateVolumeGroupSnapshot", request, create).await
    }

    async fn delete_volume_group_snapshot(
        &self,
        request: Request<csi::DeleteVolumeGroupSnapshotRequest>,
    ) -> Result<Response<csi::DeleteVolumeGroupSnapshotResponse>, Status> {
        self.call("DeleteVolumeGroupSnapshot", request, delete).await
    }

    async fn get_volume_group_snapshot(
        &self,
        request: Request<csi::GetVolumeGroupSnapshotRequest>,
    ) -> Result<Response<csi::GetVolumeGroupSnapshotResponse>, Status> {
        self.call("GetVolumeGroupSnapshot", request, get).await
    }
}

fn capabilities() -> csi::GroupControllerGetCapabilitiesResponse {
    let rpc = Rpc { r#type: rpc::Type::CreateDeleteGetVolumeGroupSnapshot.into() };
    let capability = csi::GroupControllerServiceCapability { r#type: Some(Type::Rpc(rpc)) };
    csi::GroupControllerGetCapabilitiesResponse { capabilities: vec![capability] }
}

fn create(
    plugin: &Plugin,
    req: csi::CreateVolumeGroupSnapshotRequest,
) -> Answer<csi::CreateVolumeGroupSnapshotResponse> {
    let name = request::name(&req.name)?;
    let volume_ids = members(&req.source_volume_ids)?;
    request::keys("parameters", &req.parameters, &[])?;
    let created = plugin.backend.create_group(name, volume_ids)?;
    Ok(csi::CreateVolumeGroupSnapshotResponse {
        group_snapshot: Some(response::group(&created, plugin)),
    })
}

/// Checks the volumes of a new group: at least one, each named once.
pub fn members(volume_ids: &[String]) -> Checked<&[String]> {
    const FIELD: &str = "source_volume_ids";
    if volume_ids.is_empty() {
        return Err(Error::invalid(FIELD, "is required"));
    }
    ids(FIELD, volume_ids)?;
    let mut seen = std::collections::HashSet::new();
    match volume_ids.iter().find(|id| !seen.insert(id.as_str())) {
        Some(repeated) => Err(Error::invalid(FIELD, format!("names {repeated:?} more than once"))),
        None => Ok(volume_ids),
    }
}

fn ids<'a>(field: &'static str, ids: &'a [String]) -> Checked<&'a [String]> {
    ids.iter().try_for_each(|id| request::id(field, id).map(drop))?;
    Ok(ids)
}

fn delete(
    plugin: &Plugin,
    req: csi::DeleteVolumeGroupSnapshotRequest,
) -> Answer<csi::DeleteVolumeGroupSnapshotResponse> {
    let id = request::id("group_snapshot_id", &req.group_snapshot_id)?;
    plugin.backend.delete_group(id, ids("snapshot_ids", &req.snapshot_ids)?)?;
    Ok(csi::DeleteVolumeGroupSnapshotResponse {})
}

fn get(
    plugin: &Plugin,
    req: csi::GetVolumeGroupSnapshotRequest,
) -> Answer<csi::GetVolumeGroupSnapshotResponse> {
    let id = request::id("group_snapshot_id", &req.group_snapshot_id)?;
    let found = plugin.backend.group(id, ids("snapshot_ids", &req.snapshot_ids)?)?;
    Ok(csi::GetVolumeGroupSnapshotResponse {
        group_snapshot: Some(response::group(&found, plugin)),
    })
}
