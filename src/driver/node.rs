//! CSI Node: volumes on this machine, from backing file to the path that a pod sees.

use tonic::{Request, Response, Status};

use super::{Plugin, inline, request, response};
use crate::backend::{Capability, Condition, Error, Publication, Result as Checked, Usage};
use crate::proto::csi::v1 as csi;
use csi::node_server::Node;
use csi::node_service_capability::{Rpc, Type, rpc};

const CAPABILITIES: [rpc::Type; 6] = [
    rpc::Type::StageUnstageVolume,
    rpc::Type::GetVolumeStats,
    rpc::Type::ExpandVolume,
    rpc::Type::VolumeCondition,
    rpc::Type::SingleNodeMultiWriter,
    rpc::Type::VolumeMountGroup,
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
        self.call("NodeGetCapabilities", request, |_, _| Ok(capabilities())).await
    }

    async fn node_get_info(
        &self,
        request: Request<csi::NodeGetInfoRequest>,
    ) -> Result<Response<csi::NodeGetInfoResponse>, Status> {
        self.call("NodeGetInfo", request, info).await
    }
}

fn capabilities() -> csi::NodeGetCapabilitiesResponse {
    let capability = |rpc: rpc::Type| csi::NodeServiceCapability {
        r#type: Some(Type::Rpc(Rpc { r#type: rpc.into() })),
    };
    csi::NodeGetCapabilitiesResponse { capabilities: CAPABILITIES.map(capability).to_vec() }
}

fn info(plugin: &Plugin, _: csi::NodeGetInfoRequest) -> Result<csi::NodeGetInfoResponse, Status> {
    Ok(csi::NodeGetInfoResponse {
        node_id: plugin.place.node_id().to_owned(),
        max_volumes_per_node: 0,
        accessible_topology: Some(plugin.place.topology()),
    })
}

fn stage(
    plugin: &Plugin,
    asked: csi::NodeStageVolumeRequest,
) -> Result<csi::NodeStageVolumeResponse, Status> {
    let id = request::id("volume_id", &asked.volume_id)?;
    let staging = request::path("staging_target_path", &asked.staging_target_path)?;
    let capability = capability(asked.volume_capability.as_ref())?;
    request::volume_context(&asked.volume_context)?;
    request::keys("publish_context", &asked.publish_context, &[])?;
    plugin.backend.stage(id, &staging, &capability)?;
    Ok(csi::NodeStageVolumeResponse {})
}

fn capability(capability: Option<&csi::VolumeCapability>) -> Checked<Capability> {
    request::capability("volume_capability", capability).map_err(Error::from)
}

fn unstage(
    plugin: &Plugin,
    asked: csi::NodeUnstageVolumeRequest,
) -> Result<csi::NodeUnstageVolumeResponse, Status> {
    let id = request::id("volume_id", &asked.volume_id)?;
    let staging = request::path("staging_target_path", &asked.staging_target_path)?;
    plugin.backend.unstage(id, &staging)?;
    Ok(csi::NodeUnstageVolumeResponse {})
}

fn publish(
    plugin: &Plugin,
    asked: csi::NodePublishVolumeRequest,
) -> Result<csi::NodePublishVolumeResponse, Status> {
    if request::is_inline(&asked.volume_context)? {
        return inline::publish(plugin, asked);
    }
    let id = request::id("volume_id", &asked.volume_id)?;
    let target = request::path("target_path", &asked.target_path)?;
    let capability = capability(asked.volume_capability.as_ref())?;
    request::volume_context(&asked.volume_context)?;
    request::keys("publish_context", &asked.publish_context, &[])?;
    // CSI NodePublishVolume: with STAGE_UNSTAGE_VOLUME a missing path is a missing stage.
    if asked.staging_target_path.is_empty() {
        let missing = "staging_target_path: is required; stage the volume first".to_owned();
        return Err(Error::Precondition(missing).into());
    }
    let staging = request::path("staging_target_path", &asked.staging_target_path)?;
    let wanted = Publication::on_host(capability, asked.readonly);
    plugin.backend.publish(id, &staging, &target, &wanted)?;
    Ok(csi::NodePublishVolumeResponse {})
}

fn unpublish(
    plugin: &Plugin,
    asked: csi::NodeUnpublishVolumeRequest,
) -> Result<csi::NodeUnpublishVolumeResponse, Status> {
    let id = request::id("volume_id", &asked.volume_id)?;
    let target = request::path("target_path", &asked.target_path)?;
    plugin.backend.unpublish(id, &target)?;
    Ok(csi::NodeUnpublishVolumeResponse {})
}

fn stats(
    plugin: &Plugin,
    asked: csi::NodeGetVolumeStatsRequest,
) -> Result<csi::NodeGetVolumeStatsResponse, Status> {
    let id = request::id("volume_id", &asked.volume_id)?;
    let path = request::place("volume_path", &asked.volume_path)?;
    let condition = plugin.backend.volume_condition(id)?;
    let usage = readable(plugin.backend.usage(id, &path), &condition)?;
    Ok(csi::NodeGetVolumeStatsResponse {
        usage: usage.map(response::usage).unwrap_or_default(),
        volume_condition: Some(response::condition(condition)),
    })
}

/// A volume whose numbers cannot be read because it is broken still tells its condition, which is
/// what the client needs to know then.
fn readable(usage: Checked<Usage>, condition: &Condition) -> Checked<Option<Usage>> {
    match usage {
        Err(Error::Io { .. } | Error::Damaged(_) | Error::Failed(_)) if condition.abnormal => {
            Ok(None)
        }
        other => other.map(Some),
    }
}

fn expand(
    plugin: &Plugin,
    asked: csi::NodeExpandVolumeRequest,
) -> Result<csi::NodeExpandVolumeResponse, Status> {
    let id = request::id("volume_id", &asked.volume_id)?;
    let path = request::place("volume_path", &asked.volume_path)?;
    let range = request::capacity_range(asked.capacity_range.as_ref())?;
    if asked.volume_capability.is_some() {
        capability(asked.volume_capability.as_ref())?;
    }
    inline::refuse_to_grow(plugin, id)?;
    let capacity = plugin.backend.volume(id)?.capacity_bytes;
    if range.required > capacity {
        return Err(Error::OutOfRange(format!(
            "capacity_range.required_bytes: the volume has {capacity} bytes; expand it with \
             ControllerExpandVolume first"
        ))
        .into());
    }
    let capacity = plugin.backend.expand_on_node(id, &path)?;
    Ok(csi::NodeExpandVolumeResponse { capacity_bytes: response::bytes(capacity) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_volume_still_tells_its_condition() {
        let condition = |abnormal| Condition { abnormal, message: String::new() };
        let failed = || Err(Error::Failed("statfs".into()));
        assert!(matches!(readable(failed(), &condition(true)), Ok(None)));
        assert!(readable(failed(), &condition(false)).is_err());
        let unknown = Err(Error::Missing("not mounted there".into()));
        assert!(readable(unknown, &condition(true)).is_err());
    }
}
