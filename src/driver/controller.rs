//! The CSI Controller service: volumes. The RPCs of snapshots are in `controller_snapshots` and
//! `snapshot_deltas`.

use tonic::{Request, Response, Status};

use super::controller_snapshots as snapshots;
use super::request::{self, Refusal};
use super::topology::NodeTopology;
use super::{Plugin, health, response, snapshot_deltas, status};
use crate::status::Answer;
use csi::controller_server::Controller;
use csi::controller_service_capability::{Rpc, Type, rpc};
use csi::validate_volume_capabilities_response::Confirmed;
use csi::volume_content_source::Type as ContentSource;
use grpc::proto::csi::v1 as csi;
use storage::{Condition, CreateVolume, Error, Result as Checked, Source, Volume, VolumeRequest};

const CAPABILITIES: [rpc::Type; 14] = [
    rpc::Type::CreateDeleteVolume,
    rpc::Type::ListVolumes,
    rpc::Type::GetCapacity,
    rpc::Type::CreateDeleteSnapshot,
    rpc::Type::ListSnapshots,
    rpc::Type::GetSnapshot,
    rpc::Type::CloneVolume,
    rpc::Type::ExpandVolume,
    rpc::Type::GetVolume,
    // The predecessor of health in CSI v1.12.
    rpc::Type::VolumeCondition,
    rpc::Type::GetVolumeHealth,
    rpc::Type::ListVolumeHealth,
    rpc::Type::SingleNodeMultiWriter,
    rpc::Type::ModifyVolume,
];

#[tonic::async_trait]
impl Controller for Plugin {
    async fn create_volume(
        &self,
        request: Request<csi::CreateVolumeRequest>,
    ) -> Result<Response<csi::CreateVolumeResponse>, Status> {
        self.call("CreateVolume", request, create_volume).await
    }

    async fn delete_volume(
        &self,
        request: Request<csi::DeleteVolumeRequest>,
    ) -> Result<Response<csi::DeleteVolumeResponse>, Status> {
        self.call("DeleteVolume", request, delete_volume).await
    }

    async fn controller_publish_volume(
        &self,
        request: Request<csi::ControllerPublishVolumeRequest>,
    ) -> Result<Response<csi::ControllerPublishVolumeResponse>, Status> {
        const METHOD: &str = "ControllerPublishVolume";
        self.call(METHOD, request, |_, _| Err(status::not_attachable(METHOD))).await
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<csi::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<csi::ControllerUnpublishVolumeResponse>, Status> {
        const METHOD: &str = "ControllerUnpublishVolume";
        self.call(METHOD, request, |_, _| Err(status::not_attachable(METHOD))).await
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<csi::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<csi::ValidateVolumeCapabilitiesResponse>, Status> {
        self.call("ValidateVolumeCapabilities", request, validate_volume_capabilities).await
    }

    async fn list_volumes(
        &self,
        request: Request<csi::ListVolumesRequest>,
    ) -> Result<Response<csi::ListVolumesResponse>, Status> {
        self.call("ListVolumes", request, list_volumes).await
    }

    async fn controller_list_volume_health(
        &self,
        request: Request<csi::ControllerListVolumeHealthRequest>,
    ) -> Result<Response<csi::ControllerListVolumeHealthResponse>, Status> {
        self.call("ControllerListVolumeHealth", request, health::list).await
    }

    async fn controller_get_volume_health(
        &self,
        request: Request<csi::ControllerGetVolumeHealthRequest>,
    ) -> Result<Response<csi::ControllerGetVolumeHealthResponse>, Status> {
        self.call("ControllerGetVolumeHealth", request, health::get_volume).await
    }

    async fn get_capacity(
        &self,
        request: Request<csi::GetCapacityRequest>,
    ) -> Result<Response<csi::GetCapacityResponse>, Status> {
        self.call("GetCapacity", request, get_capacity).await
    }

    async fn controller_get_capabilities(
        &self,
        request: Request<csi::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<csi::ControllerGetCapabilitiesResponse>, Status> {
        self.call("ControllerGetCapabilities", request, capabilities).await
    }

    async fn create_snapshot(
        &self,
        request: Request<csi::CreateSnapshotRequest>,
    ) -> Result<Response<csi::CreateSnapshotResponse>, Status> {
        self.call("CreateSnapshot", request, snapshots::create).await
    }

    async fn delete_snapshot(
        &self,
        request: Request<csi::DeleteSnapshotRequest>,
    ) -> Result<Response<csi::DeleteSnapshotResponse>, Status> {
        self.call("DeleteSnapshot", request, snapshots::delete).await
    }

    async fn list_snapshots(
        &self,
        request: Request<csi::ListSnapshotsRequest>,
    ) -> Result<Response<csi::ListSnapshotsResponse>, Status> {
        self.call("ListSnapshots", request, snapshots::list).await
    }

    async fn get_snapshot(
        &self,
        request: Request<csi::GetSnapshotRequest>,
    ) -> Result<Response<csi::GetSnapshotResponse>, Status> {
        self.call("GetSnapshot", request, snapshots::get).await
    }

    async fn controller_expand_volume(
        &self,
        request: Request<csi::ControllerExpandVolumeRequest>,
    ) -> Result<Response<csi::ControllerExpandVolumeResponse>, Status> {
        self.call("ControllerExpandVolume", request, expand_volume).await
    }

    async fn controller_get_volume(
        &self,
        request: Request<csi::ControllerGetVolumeRequest>,
    ) -> Result<Response<csi::ControllerGetVolumeResponse>, Status> {
        self.call("ControllerGetVolume", request, get_volume).await
    }

    async fn controller_modify_volume(
        &self,
        request: Request<csi::ControllerModifyVolumeRequest>,
    ) -> Result<Response<csi::ControllerModifyVolumeResponse>, Status> {
        self.call("ControllerModifyVolume", request, modify_volume).await
    }

    async fn list_snapshot_deltas(
        &self,
        request: Request<csi::ListSnapshotDeltasRequest>,
    ) -> Result<Response<csi::ListSnapshotDeltasResponse>, Status> {
        let plugin = self.clone();
        // `snapshot_deltas` injects faults itself, as the streams do.
        let list = move |req| snapshot_deltas::list(&plugin, &req).map_err(status::of);
        self.calls.unary(snapshot_deltas::METHOD, request, list).await
    }
}

/// CSI's capabilities, and the extension if enabled: a strict client may reject a number that CSI
/// does not define.
fn capabilities(
    plugin: &Plugin,
    _: csi::ControllerGetCapabilitiesRequest,
) -> Answer<csi::ControllerGetCapabilitiesResponse> {
    let deltas = plugin.snapshot_deltas.then_some(rpc::Type::ListBlockSnapshotDeltas);
    let capability = |rpc: rpc::Type| csi::ControllerServiceCapability {
        r#type: Some(Type::Rpc(Rpc { r#type: rpc.into() })),
    };
    // csi-resizer, the only client of both, does not know which node has the volume.
    let is_served = |rpc: &rpc::Type| {
        !(plugin.node_local && [rpc::Type::ExpandVolume, rpc::Type::ModifyVolume].contains(rpc))
    };
    let served = CAPABILITIES.into_iter().filter(is_served).chain(deltas);
    let capabilities = served.map(capability).collect();
    Ok(csi::ControllerGetCapabilitiesResponse { capabilities })
}

fn create_volume(
    plugin: &Plugin,
    req: csi::CreateVolumeRequest,
) -> Answer<csi::CreateVolumeResponse> {
    let args = create_volume_args(&plugin.topology, &req)?;
    if let Some(source) = &args.request.source {
        check_pool(plugin, source)?;
    }
    if let Some(Source::Snapshot(id)) = &args.request.source {
        plugin.faults.check_ready(&plugin.backend, [id.as_str()])?;
    }
    let created = plugin.backend.create_volume(&args)?;
    Ok(csi::CreateVolumeResponse { volume: Some(response::volume(&created, &plugin.topology)) })
}

/// A source in another node's pool: with this code csi-provisioner has another node selected.
fn check_pool(plugin: &Plugin, source: &Source) -> storage::Result<()> {
    let (Source::Snapshot(id) | Source::Volume(id)) = source;
    if plugin.node_local && plugin.backend.is_of_another_pool(id)? {
        return Err(Error::Exhausted(format!(
            "volume_content_source: {id} is in the pool of another node than {}; select the node that has it",
            plugin.topology.node_id()
        )));
    }
    Ok(())
}

pub fn create_volume_args(
    topology: &NodeTopology,
    req: &csi::CreateVolumeRequest,
) -> Checked<CreateVolume> {
    let name = request::name(&req.name)?.to_owned();
    let capabilities = request::capabilities(&req.volume_capabilities)?;
    let fs_type = request::common_filesystem(&capabilities)?;
    let range = request::capacity_range(req.capacity_range.as_ref())?;
    let (fixed, sector_size) = request::parameters(&req.parameters)?;
    let mutable = request::mutable_parameters(&req.mutable_parameters)?;
    let source = req.volume_content_source.as_ref().map(content_source).transpose()?;
    topology.check_requirement(req.accessibility_requirements.as_ref())?;

    let request = VolumeRequest {
        required_bytes: range.required,
        limit_bytes: range.limit,
        fs_type,
        change_tracking: mutable.change_tracking.or(fixed.change_tracking).unwrap_or(true),
        change_precision: mutable.change_precision.or(fixed.change_precision).unwrap_or_default(),
        sector_size,
        source,
    };
    Ok(CreateVolume { name, request })
}

fn content_source(source: &csi::VolumeContentSource) -> Checked<Source> {
    match &source.r#type {
        Some(ContentSource::Snapshot(source)) => {
            let id =
                request::id("volume_content_source.snapshot.snapshot_id", &source.snapshot_id)?;
            Ok(Source::Snapshot(id.to_owned()))
        }
        Some(ContentSource::Volume(source)) => {
            let id = request::id("volume_content_source.volume.volume_id", &source.volume_id)?;
            Ok(Source::Volume(id.to_owned()))
        }
        None => {
            Err(Error::invalid("volume_content_source", "names neither a snapshot nor a volume"))
        }
    }
}

fn delete_volume(
    plugin: &Plugin,
    req: csi::DeleteVolumeRequest,
) -> Answer<csi::DeleteVolumeResponse> {
    plugin.backend.delete_volume(request::id("volume_id", &req.volume_id)?)?;
    Ok(csi::DeleteVolumeResponse {})
}

/// CSI ValidateVolumeCapabilities: an unsupported capability is a response, not an error.
fn validate_volume_capabilities(
    plugin: &Plugin,
    req: csi::ValidateVolumeCapabilitiesRequest,
) -> Answer<csi::ValidateVolumeCapabilitiesResponse> {
    let id = request::id("volume_id", &req.volume_id)?;
    if req.volume_capabilities.is_empty() {
        return Err(Error::invalid("volume_capabilities", "is required").into());
    }
    let volume = plugin.backend.volume(id)?;
    Ok(match objection(&volume, &req)? {
        Some(message) => csi::ValidateVolumeCapabilitiesResponse { confirmed: None, message },
        None => csi::ValidateVolumeCapabilitiesResponse {
            confirmed: Some(Confirmed {
                volume_context: req.volume_context,
                volume_capabilities: req.volume_capabilities,
                parameters: req.parameters,
                mutable_parameters: req.mutable_parameters,
            }),
            message: String::new(),
        },
    })
}

/// Why the volume does not support the request, if it does not. An error means a malformed request.
fn objection(
    volume: &Volume,
    req: &csi::ValidateVolumeCapabilitiesRequest,
) -> Checked<Option<String>> {
    let capabilities = match request::capabilities(&req.volume_capabilities) {
        Err(refusal @ Refusal::Unsupported { .. }) => {
            return Ok(Some(Error::from(refusal).to_string()));
        }
        other => other?,
    };
    if let Err(refusal) = request::common_filesystem(&capabilities) {
        return Ok(Some(Error::from(refusal).to_string()));
    }
    let mut named = capabilities.iter().filter_map(request::named_filesystem);
    if let Some(found) = volume.format.map(|format| format.fs_type).or(volume.request.fs_type)
        && let Some(other) = named.find(|fs_type| *fs_type != found)
    {
        return Ok(Some(format!(
            "volume_capabilities: the volume has the filesystem {found}, not {other}"
        )));
    }
    let checks = [
        request::volume_context(&req.volume_context),
        request::parameters(&req.parameters).map(drop),
        request::mutable_parameters(&req.mutable_parameters).map(drop),
    ];
    Ok(checks.into_iter().find_map(Result::err).map(|error| error.to_string()))
}

fn list_volumes(plugin: &Plugin, req: csi::ListVolumesRequest) -> Answer<csi::ListVolumesResponse> {
    let max = request::page(request::max_entries(req.max_entries)?);
    let token = request::token(&req.starting_token);
    let page = plugin.backend.volumes_with_conditions(token, max)?;
    let entry = |(volume, condition): (Volume, Condition)| csi::list_volumes_response::Entry {
        volume: Some(response::volume(&volume, &plugin.topology)),
        status: Some(csi::list_volumes_response::VolumeStatus {
            published_node_ids: Vec::new(),
            volume_condition: Some(response::condition(condition)),
        }),
    };
    let entries = page.items.into_iter().map(entry).collect();
    Ok(csi::ListVolumesResponse { entries, next_token: page.next.unwrap_or_default() })
}

fn get_capacity(plugin: &Plugin, req: csi::GetCapacityRequest) -> Answer<csi::GetCapacityResponse> {
    request::parameters(&req.parameters)?;
    let here = req.accessible_topology.as_ref().is_none_or(|one| plugin.topology.is_in(one));
    if !here || !is_supported(&req.volume_capabilities)? {
        return Ok(csi::GetCapacityResponse {
            available_capacity: 0,
            maximum_volume_size: Some(0),
            minimum_volume_size: None,
        });
    }
    let capacity = plugin.backend.capacity()?;
    Ok(csi::GetCapacityResponse {
        available_capacity: response::bytes(capacity.available),
        maximum_volume_size: Some(response::bytes(capacity.maximum_volume)),
        minimum_volume_size: Some(response::bytes(capacity.minimum_volume)),
    })
}

/// Whether a volume with these capabilities can be created. An error means a malformed request.
fn is_supported(capabilities: &[csi::VolumeCapability]) -> Checked<bool> {
    if capabilities.is_empty() {
        return Ok(true);
    }
    match request::capabilities(capabilities) {
        Ok(checked) => Ok(request::common_filesystem(&checked).is_ok()),
        Err(Refusal::Unsupported { .. }) => Ok(false),
        Err(refusal) => Err(refusal.into()),
    }
}

/// Grows the backing file and the device. The filesystem is grown later, on the node.
fn expand_volume(
    plugin: &Plugin,
    req: csi::ControllerExpandVolumeRequest,
) -> Answer<csi::ControllerExpandVolumeResponse> {
    let id = request::id("volume_id", &req.volume_id)?;
    if req.capacity_range.is_none() {
        return Err(Error::invalid("capacity_range", "is required").into());
    }
    let range = request::capacity_range(req.capacity_range.as_ref())?;
    if let Some(capability) = &req.volume_capability {
        request::capability("volume_capability", Some(capability)).map_err(Error::from)?;
    }
    let volume = plugin.backend.expand_volume(id, range.required, range.limit)?;
    Ok(csi::ControllerExpandVolumeResponse {
        capacity_bytes: response::bytes(volume.capacity_bytes),
        node_expansion_required: true,
    })
}

fn get_volume(
    plugin: &Plugin,
    req: csi::ControllerGetVolumeRequest,
) -> Answer<csi::ControllerGetVolumeResponse> {
    let id = request::id("volume_id", &req.volume_id)?;
    let volume = plugin.backend.volume(id)?;
    let condition = plugin.backend.volume_condition(id)?;
    Ok(csi::ControllerGetVolumeResponse {
        volume: Some(response::volume(&volume, &plugin.topology)),
        status: Some(csi::controller_get_volume_response::VolumeStatus {
            published_node_ids: Vec::new(),
            volume_condition: Some(response::condition(condition)),
        }),
    })
}

/// An empty map changes nothing and is accepted for an existing volume: on the wire it is equal to
/// a map whose keys were all removed.
fn modify_volume(
    plugin: &Plugin,
    req: csi::ControllerModifyVolumeRequest,
) -> Answer<csi::ControllerModifyVolumeResponse> {
    let id = request::id("volume_id", &req.volume_id)?;
    plugin.backend.modify_volume(id, request::mutable_parameters(&req.mutable_parameters)?)?;
    Ok(csi::ControllerModifyVolumeResponse {})
}
