//! The CSI Node service: volumes on this machine, from the backing file to the path in a pod.

use std::path::Path;

use tonic::{Request, Response, Status};

use super::target_root::TargetRoot;
use super::{Plugin, deferral, health, inline, request, response};
use crate::status::Answer;
use csi::node_server::Node;
use csi::node_service_capability::{Rpc, Type, rpc};
use grpc::proto::csi::v1 as csi;
use storage::{Capability, Error, Publication, Result as Checked, Stats};

const CAPABILITIES: [rpc::Type; 8] = [
    rpc::Type::StageUnstageVolume,
    rpc::Type::GetVolumeStats,
    rpc::Type::ExpandVolume,
    // The predecessor of health in CSI v1.12.
    rpc::Type::VolumeCondition,
    rpc::Type::GetVolumeHealth,
    rpc::Type::GetStorageHealth,
    rpc::Type::SingleNodeMultiWriter,
    rpc::Type::VolumeMountGroup,
];

/// KEP-2857 extensions.
const DEFERRAL: [rpc::Type; 3] = [
    rpc::Type::DeferFsOps,
    rpc::Type::DeferFsOpsWithSupplementalGroup,
    rpc::Type::DeferFsOpsWithSupplementalGroupChangePolicy,
];

#[tonic::async_trait]
impl Node for Plugin {
    async fn node_stage_volume(
        &self,
        request: Request<csi::NodeStageVolumeRequest>,
    ) -> Result<Response<csi::NodeStageVolumeResponse>, Status> {
        self.call("NodeStageVolume", request, stage).await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<csi::NodeUnstageVolumeRequest>,
    ) -> Result<Response<csi::NodeUnstageVolumeResponse>, Status> {
        self.call("NodeUnstageVolume", request, unstage).await
    }

    async fn node_publish_volume(
        &self,
        request: Request<csi::NodePublishVolumeRequest>,
    ) -> Result<Response<csi::NodePublishVolumeResponse>, Status> {
        self.call("NodePublishVolume", request, publish).await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<csi::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<csi::NodeUnpublishVolumeResponse>, Status> {
        self.call("NodeUnpublishVolume", request, unpublish).await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<csi::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<csi::NodeGetVolumeStatsResponse>, Status> {
        self.call("NodeGetVolumeStats", request, stats).await
    }

    async fn node_get_volume_health(
        &self,
        request: Request<csi::NodeGetVolumeHealthRequest>,
    ) -> Result<Response<csi::NodeGetVolumeHealthResponse>, Status> {
        self.call("NodeGetVolumeHealth", request, health::node_get_volume).await
    }

    async fn node_get_storage_health(
        &self,
        request: Request<csi::NodeGetStorageHealthRequest>,
    ) -> Result<Response<csi::NodeGetStorageHealthResponse>, Status> {
        self.call("NodeGetStorageHealth", request, health::node_get_storage).await
    }

    async fn node_expand_volume(
        &self,
        request: Request<csi::NodeExpandVolumeRequest>,
    ) -> Result<Response<csi::NodeExpandVolumeResponse>, Status> {
        self.call("NodeExpandVolume", request, expand).await
    }

    async fn node_get_capabilities(
        &self,
        request: Request<csi::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<csi::NodeGetCapabilitiesResponse>, Status> {
        self.call("NodeGetCapabilities", request, capabilities).await
    }

    async fn node_get_info(
        &self,
        request: Request<csi::NodeGetInfoRequest>,
    ) -> Result<Response<csi::NodeGetInfoResponse>, Status> {
        self.call("NodeGetInfo", request, info).await
    }
}

/// CSI's capabilities, and the extensions if enabled: a strict client may reject a number that CSI
/// does not define.
fn capabilities(
    plugin: &Plugin,
    _: csi::NodeGetCapabilitiesRequest,
) -> Answer<csi::NodeGetCapabilitiesResponse> {
    let deferral = DEFERRAL.iter().filter(|_| plugin.deferrals.is_enabled());
    let capability = |rpc: &rpc::Type| csi::NodeServiceCapability {
        r#type: Some(Type::Rpc(Rpc { r#type: (*rpc).into() })),
    };
    let capabilities = CAPABILITIES.iter().chain(deferral).map(capability).collect();
    Ok(csi::NodeGetCapabilitiesResponse { capabilities })
}

fn info(plugin: &Plugin, _: csi::NodeGetInfoRequest) -> Answer<csi::NodeGetInfoResponse> {
    Ok(csi::NodeGetInfoResponse {
        node_id: plugin.topology.node_id().to_owned(),
        max_volumes_per_node: 0,
        accessible_topology: Some(plugin.topology.to_csi()),
    })
}

fn stage(
    plugin: &Plugin,
    req: csi::NodeStageVolumeRequest,
) -> Answer<csi::NodeStageVolumeResponse> {
    let id = request::id("volume_id", &req.volume_id)?;
    let staging = plugin.node_path("staging_target_path", &req.staging_target_path)?;
    let capability = capability(req.volume_capability.as_ref())?;
    request::volume_context(&req.volume_context)?;
    request::keys("publish_context", &req.publish_context, &[])?;
    plugin.backend.stage(id, &staging, &capability)?;
    Ok(csi::NodeStageVolumeResponse {})
}

fn capability(capability: Option<&csi::VolumeCapability>) -> Checked<Capability> {
    request::capability("volume_capability", capability).map_err(Error::from)
}

fn unstage(
    plugin: &Plugin,
    req: csi::NodeUnstageVolumeRequest,
) -> Answer<csi::NodeUnstageVolumeResponse> {
    let id = request::id("volume_id", &req.volume_id)?;
    let staging = request::path("staging_target_path", &req.staging_target_path)?;
    plugin.backend.unstage(id, &staging)?;
    Ok(csi::NodeUnstageVolumeResponse {})
}

fn publish(
    plugin: &Plugin,
    req: csi::NodePublishVolumeRequest,
) -> Answer<csi::NodePublishVolumeResponse> {
    if request::is_inline(&req.volume_context)? {
        return inline::publish(plugin, req);
    }
    let id = request::id("volume_id", &req.volume_id)?;
    let target = plugin.node_path("target_path", &req.target_path)?;
    let capability = capability(req.volume_capability.as_ref())?;
    request::volume_context(&req.volume_context)?;
    request::keys("publish_context", &req.publish_context, &[])?;
    // CSI NodePublishVolume: with STAGE_UNSTAGE_VOLUME a missing path is a missing stage.
    if req.staging_target_path.is_empty() {
        let missing = "staging_target_path: is required; stage the volume first".to_owned();
        return Err(Error::Precondition(missing).into());
    }
    let staging = plugin.node_path("staging_target_path", &req.staging_target_path)?;
    // Report a missing volume before other errors.
    plugin.backend.volume(id)?;
    let deferred = deferral::from_publish(&req, &capability, deferral::Volume::Persistent)?;
    let publication = Publication { capability, readonly: req.readonly, deferred };
    plugin.deferrals.publish(&plugin.backend, &req, deferred, || {
        plugin.backend.publish(id, &staging, &target, &publication)
    })?;
    Ok(csi::NodePublishVolumeResponse {})
}

fn unpublish(
    plugin: &Plugin,
    req: csi::NodeUnpublishVolumeRequest,
) -> Answer<csi::NodeUnpublishVolumeResponse> {
    let id = request::id("volume_id", &req.volume_id)?;
    let target = request::path("target_path", &req.target_path)?;
    // A volume that was published before `--target-root` changed can be unpublished. At any other
    // path outside nothing can be ours, and success lets the caller forget it.
    let is_allowed = TargetRoot::allows(plugin.target_root.as_ref(), &target);
    if !is_allowed && !plugin.backend.is_published(id, &target)? {
        return Ok(csi::NodeUnpublishVolumeResponse {});
    }
    // The volume's row, not this call, determines whether the publication is deferred.
    plugin.backend.unpublish(id, &target)?;
    plugin.deferrals.discard_uncounted(id, &target);
    Ok(csi::NodeUnpublishVolumeResponse {})
}

fn stats(
    plugin: &Plugin,
    req: csi::NodeGetVolumeStatsRequest,
) -> Answer<csi::NodeGetVolumeStatsResponse> {
    let id = request::id("volume_id", &req.volume_id)?;
    let path = request::volume_path("volume_path", &req.volume_path)?;
    check_deferred(plugin, req.defer_fs_ops, id, &path)?;
    let Stats { usage, condition } = plugin.backend.stats(id, &path)?;
    Ok(csi::NodeGetVolumeStatsResponse {
        usage: usage.map(response::usage).unwrap_or_default(),
        volume_condition: Some(response::condition(condition)),
    })
}

/// Checks that the publication is deferred if the caller says so. Without the field, the volume's
/// row decides.
fn check_deferred(plugin: &Plugin, defer_fs_ops: bool, id: &str, path: &Path) -> Checked<()> {
    plugin.deferrals.check_field(defer_fs_ops)?;
    if !defer_fs_ops || plugin.backend.is_deferred(id, path)? {
        return Ok(());
    }
    // Report a missing volume before other errors.
    plugin.backend.volume_condition(id)?;
    Err(Error::Precondition(format!(
        "defer_fs_ops: volume {id:?} is not deferred to a container runtime at {}; omit the field",
        path.display()
    )))
}

fn expand(
    plugin: &Plugin,
    req: csi::NodeExpandVolumeRequest,
) -> Answer<csi::NodeExpandVolumeResponse> {
    let id = request::id("volume_id", &req.volume_id)?;
    let path = request::volume_path("volume_path", &req.volume_path)?;
    let range = request::capacity_range(req.capacity_range.as_ref())?;
    if req.volume_capability.is_some() {
        capability(req.volume_capability.as_ref())?;
    }
    inline::refuse_expansion(plugin, id)?;
    let capacity = plugin.backend.volume(id)?.capacity_bytes;
    check_deferred(plugin, req.defer_fs_ops, id, &path)?;
    if range.required > capacity && plugin.node_local {
        plugin.backend.expand_volume(id, range.required, range.limit)?;
    } else if range.required > capacity {
        return Err(Error::OutOfRange(format!(
            "capacity_range.required_bytes: the volume has {capacity} bytes; expand it with \
             ControllerExpandVolume first"
        ))
        .into());
    }
    let capacity = plugin.backend.expand_on_node(id, &path)?;
    Ok(csi::NodeExpandVolumeResponse { capacity_bytes: response::bytes(capacity) })
}
