//! CSI requests for tests, their calls, and decoded responses.

use admin::base_admin_client::BaseAdminClient;
use admin::pool_admin_client::PoolAdminClient;
use admin::volume_admin_client::VolumeAdminClient;
use csi::controller_client::ControllerClient;
use csi::group_controller_client::GroupControllerClient;
use csi::identity_client::IdentityClient;
use csi::node_client::NodeClient;
use csi::snapshot_metadata_client::SnapshotMetadataClient;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use csi_loopback::proto::admin::v1 as admin;
use csi_loopback::proto::csi::v1 as csi;
use csi_loopback::proto::snapshotsession as session;
use session::snapshot_metadata_client::SnapshotMetadataClient as SessionClient;
use std::any::Any;
use std::path::Path;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::driver::Driver;

pub const NO_VOLUME: &str = "vol-none-0123456789abcdef";
pub const NO_SNAPSHOT: &str = "snap-none-0123456789abcdef";

pub fn from_source(name: &str, source: Source<'_>, bytes: u64) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        volume_content_source: Some(source.into()),
        ..create(name, bytes, block())
    }
}

pub fn volume_ids(driver: &Driver) -> Vec<String> {
    let entries = driver.ok(csi::ListVolumesRequest::default()).entries;
    entries.into_iter().map(|entry| entry.volume.unwrap().volume_id).collect()
}

pub fn snapshots_where(driver: &Driver, request: csi::ListSnapshotsRequest) -> Vec<csi::Snapshot> {
    let entries = driver.ok(request).entries;
    entries.into_iter().map(|entry| entry.snapshot.unwrap()).collect()
}

pub fn all_snapshots(driver: &Driver) -> Vec<csi::Snapshot> {
    snapshots_where(driver, csi::ListSnapshotsRequest::default())
}

/// The source of a volume's content.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    Snapshot(&'a str),
    Volume(&'a str),
}

impl From<Source<'_>> for csi::VolumeContentSource {
    fn from(source: Source<'_>) -> Self {
        use csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
        let kind = match source {
            Source::Snapshot(id) => Type::Snapshot(SnapshotSource { snapshot_id: id.to_owned() }),
            Source::Volume(id) => Type::Volume(VolumeSource { volume_id: id.to_owned() }),
        };
        Self { r#type: Some(kind) }
    }
}

/// The capability of a raw block volume for one node.
pub fn block() -> csi::VolumeCapability {
    block_as(Mode::SingleNodeWriter)
}

pub fn block_as(mode: Mode) -> csi::VolumeCapability {
    capability(AccessType::Block(BlockVolume {}), mode)
}

/// The capability of a mounted volume for multiple pods of a node. An empty type is the default
/// filesystem.
pub fn mounted(fs_type: &str) -> csi::VolumeCapability {
    mounted_as(fs_type, Mode::SingleNodeMultiWriter)
}

pub fn mounted_as(fs_type: &str, mode: Mode) -> csi::VolumeCapability {
    with_flags(fs_type, mode, &[])
}

pub fn with_flags(fs_type: &str, mode: Mode, flags: &[&str]) -> csi::VolumeCapability {
    let mount = MountVolume {
        fs_type: fs_type.to_owned(),
        mount_flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
        volume_mount_group: String::new(),
        ..MountVolume::default()
    };
    capability(AccessType::Mount(mount), mode)
}

pub fn in_group(group: &str) -> csi::VolumeCapability {
    let mount = MountVolume { volume_mount_group: group.to_owned(), ..Default::default() };
    capability(AccessType::Mount(mount), Mode::SingleNodeMultiWriter)
}

fn capability(access: AccessType, mode: Mode) -> csi::VolumeCapability {
    csi::VolumeCapability {
        access_type: Some(access),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}

/// A CreateVolume request. `bytes` of 0 means no size.
pub fn create(
    name: &str,
    bytes: u64,
    capability: csi::VolumeCapability,
) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: (bytes > 0).then(|| range(bytes as i64, 0)),
        volume_capabilities: vec![capability],
        ..Default::default()
    }
}

pub fn range(required_bytes: i64, limit_bytes: i64) -> csi::CapacityRange {
    csi::CapacityRange { required_bytes, limit_bytes }
}

pub fn map(pairs: &[(&str, &str)]) -> std::collections::HashMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

pub fn create_snapshot(name: &str, volume_id: &str) -> csi::CreateSnapshotRequest {
    csi::CreateSnapshotRequest {
        name: name.to_owned(),
        source_volume_id: volume_id.to_owned(),
        ..Default::default()
    }
}

pub fn create_group_snapshot(
    name: &str,
    volume_ids: &[&str],
) -> csi::CreateVolumeGroupSnapshotRequest {
    csi::CreateVolumeGroupSnapshotRequest {
        name: name.to_owned(),
        source_volume_ids: volume_ids.iter().map(|id| (*id).to_owned()).collect(),
        ..Default::default()
    }
}

pub fn get_volume(id: &str) -> csi::ControllerGetVolumeRequest {
    csi::ControllerGetVolumeRequest { volume_id: id.to_owned() }
}

pub fn delete_volume(id: &str) -> csi::DeleteVolumeRequest {
    csi::DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() }
}

pub fn delete_snapshot(id: &str) -> csi::DeleteSnapshotRequest {
    csi::DeleteSnapshotRequest { snapshot_id: id.to_owned(), ..Default::default() }
}

pub fn modify(id: &str, parameters: &[(&str, &str)]) -> csi::ControllerModifyVolumeRequest {
    csi::ControllerModifyVolumeRequest {
        volume_id: id.to_owned(),
        mutable_parameters: map(parameters),
        ..Default::default()
    }
}

pub fn expand(id: &str, bytes: u64) -> csi::ControllerExpandVolumeRequest {
    csi::ControllerExpandVolumeRequest {
        volume_id: id.to_owned(),
        capacity_range: Some(range(bytes as i64, 0)),
        ..Default::default()
    }
}

pub fn health_on_node(
    driver: &Driver,
    id: &str,
    at: &Path,
) -> Vec<csi::volume_health::VolumeHealthEntry> {
    let request = csi::NodeGetVolumeHealthRequest {
        volume_id: id.to_owned(),
        volume_publish_path: at.display().to_string(),
        ..Default::default()
    };
    let health = driver.ok(request).volume_health.unwrap();
    assert_eq!(health.volume_id, id);
    health.health_statuses
}

pub fn expand_on_node(id: &str, at: &Path) -> csi::NodeExpandVolumeRequest {
    csi::NodeExpandVolumeRequest {
        volume_id: id.to_owned(),
        volume_path: at.display().to_string(),
        ..Default::default()
    }
}

pub fn stats(id: &str, at: &str) -> csi::NodeGetVolumeStatsRequest {
    csi::NodeGetVolumeStatsRequest {
        volume_id: id.to_owned(),
        volume_path: at.to_owned(),
        ..Default::default()
    }
}

pub fn unpublishing(id: &str, target: &str) -> csi::NodeUnpublishVolumeRequest {
    csi::NodeUnpublishVolumeRequest {
        volume_id: id.to_owned(),
        target_path: target.to_owned(),
        ..Default::default()
    }
}

pub fn unstaging(id: &str, staging: &str) -> csi::NodeUnstageVolumeRequest {
    csi::NodeUnstageVolumeRequest {
        volume_id: id.to_owned(),
        staging_target_path: staging.to_owned(),
    }
}

pub fn allocated(snapshot_id: &str) -> csi::GetMetadataAllocatedRequest {
    csi::GetMetadataAllocatedRequest { snapshot_id: snapshot_id.to_owned(), ..Default::default() }
}

pub fn delta(base: &str, target: &str) -> csi::GetMetadataDeltaRequest {
    csi::GetMetadataDeltaRequest {
        base_snapshot_id: base.to_owned(),
        target_snapshot_id: target.to_owned(),
        ..Default::default()
    }
}

pub fn session_allocated(snapshot: &str) -> session::GetAllocatedRequest {
    session::GetAllocatedRequest { snapshot: snapshot.to_owned(), ..Default::default() }
}

pub fn session_delta(base: &str, target: &str) -> session::GetDeltaRequest {
    session::GetDeltaRequest {
        base_snapshot: base.to_owned(),
        target_snapshot: target.to_owned(),
        ..Default::default()
    }
}

/// The whole stream of a metadata RPC of either API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metadata {
    pub kind: csi::BlockMetadataType,
    pub capacity: u64,
    /// Offset and length in bytes, message by message.
    pub messages: Vec<Vec<(u64, u64)>>,
    /// Bytes of the largest message.
    pub largest: usize,
}

impl Metadata {
    pub fn extents(&self) -> Vec<(u64, u64)> {
        self.messages.concat()
    }
}

macro_rules! metadata {
    ($($api:ident $client:ident $capacity:ident: $($method:ident($request:ident))*;)*) => {$($(
        impl Rpc for $api::$request {
            type Response = Metadata;

            async fn send(self, channel: Channel) -> Result<Metadata, Status> {
                let mut stream = $client::new(channel).$method(self).await?.into_inner();
                let (mut messages, mut largest, mut heads) = (Vec::new(), 0, Vec::new());
                while let Some(message) = stream.message().await? {
                    largest = largest.max(prost::Message::encoded_len(&message));
                    // Fails for an unknown number, which the getter would map to the first value.
                    let kind = $api::BlockMetadataType::try_from(message.block_metadata_type);
                    let kind = kind.expect("a type of the API").as_str_name();
                    heads.push((kind, message.$capacity));
                    let extent = |one: &$api::BlockMetadata| {
                        (one.byte_offset as u64, one.size_bytes as u64)
                    };
                    messages.push(message.block_metadata.iter().map(extent).collect());
                }
                heads.dedup();
                assert_eq!(heads.len(), 1, "type and capacity are the same in every message");
                let (kind, capacity) = (heads[0].0, heads[0].1 as u64);
                let kind = csi::BlockMetadataType::from_str_name(kind).unwrap();
                Ok(Metadata { kind, capacity, messages, largest })
            }
        }
    )*)*};
}

metadata! {
    csi SnapshotMetadataClient volume_capacity_bytes:
        get_metadata_allocated(GetMetadataAllocatedRequest)
        get_metadata_delta(GetMetadataDeltaRequest);
    session SessionClient volume_size_bytes:
        get_allocated(GetAllocatedRequest)
        get_delta(GetDeltaRequest);
}

/// A request of an RPC.
pub trait Rpc: std::fmt::Debug + Any {
    type Response;

    fn send(self, channel: Channel) -> impl Future<Output = Result<Self::Response, Status>> + Send;
}

macro_rules! rpcs {
    ($($client:ident: $($method:ident($request:ident) -> $answer:ident),*;)*) => {$($(
        impl Rpc for csi::$request {
            type Response = csi::$answer;

            async fn send(self, channel: Channel) -> Result<csi::$answer, Status> {
                $client::new(channel).$method(self).await.map(tonic::Response::into_inner)
            }
        }
    )*)*};
}

rpcs! {
    IdentityClient:
        get_plugin_info(GetPluginInfoRequest) -> GetPluginInfoResponse,
        get_plugin_capabilities(GetPluginCapabilitiesRequest) -> GetPluginCapabilitiesResponse,
        probe(ProbeRequest) -> ProbeResponse;
    ControllerClient:
        create_volume(CreateVolumeRequest) -> CreateVolumeResponse,
        delete_volume(DeleteVolumeRequest) -> DeleteVolumeResponse,
        controller_publish_volume(ControllerPublishVolumeRequest) -> ControllerPublishVolumeResponse,
        controller_unpublish_volume(ControllerUnpublishVolumeRequest)
            -> ControllerUnpublishVolumeResponse,
        validate_volume_capabilities(ValidateVolumeCapabilitiesRequest)
            -> ValidateVolumeCapabilitiesResponse,
        list_volumes(ListVolumesRequest) -> ListVolumesResponse,
        controller_list_volume_health(ControllerListVolumeHealthRequest)
            -> ControllerListVolumeHealthResponse,
        controller_get_volume_health(ControllerGetVolumeHealthRequest)
            -> ControllerGetVolumeHealthResponse,
        get_capacity(GetCapacityRequest) -> GetCapacityResponse,
        controller_get_capabilities(ControllerGetCapabilitiesRequest)
            -> ControllerGetCapabilitiesResponse,
        create_snapshot(CreateSnapshotRequest) -> CreateSnapshotResponse,
        delete_snapshot(DeleteSnapshotRequest) -> DeleteSnapshotResponse,
        list_snapshots(ListSnapshotsRequest) -> ListSnapshotsResponse,
        get_snapshot(GetSnapshotRequest) -> GetSnapshotResponse,
        controller_expand_volume(ControllerExpandVolumeRequest) -> ControllerExpandVolumeResponse,
        controller_get_volume(ControllerGetVolumeRequest) -> ControllerGetVolumeResponse,
        controller_modify_volume(ControllerModifyVolumeRequest) -> ControllerModifyVolumeResponse,
        list_snapshot_deltas(ListSnapshotDeltasRequest) -> ListSnapshotDeltasResponse;
    GroupControllerClient:
        group_controller_get_capabilities(GroupControllerGetCapabilitiesRequest)
            -> GroupControllerGetCapabilitiesResponse,
        create_volume_group_snapshot(CreateVolumeGroupSnapshotRequest)
            -> CreateVolumeGroupSnapshotResponse,
        delete_volume_group_snapshot(DeleteVolumeGroupSnapshotRequest)
            -> DeleteVolumeGroupSnapshotResponse,
        get_volume_group_snapshot(GetVolumeGroupSnapshotRequest) -> GetVolumeGroupSnapshotResponse;
    NodeClient:
        node_stage_volume(NodeStageVolumeRequest) -> NodeStageVolumeResponse,
        node_unstage_volume(NodeUnstageVolumeRequest) -> NodeUnstageVolumeResponse,
        node_publish_volume(NodePublishVolumeRequest) -> NodePublishVolumeResponse,
        node_unpublish_volume(NodeUnpublishVolumeRequest) -> NodeUnpublishVolumeResponse,
        node_get_volume_stats(NodeGetVolumeStatsRequest) -> NodeGetVolumeStatsResponse,
        node_get_volume_health(NodeGetVolumeHealthRequest) -> NodeGetVolumeHealthResponse,
        node_get_storage_health(NodeGetStorageHealthRequest) -> NodeGetStorageHealthResponse,
        node_expand_volume(NodeExpandVolumeRequest) -> NodeExpandVolumeResponse,
        node_get_capabilities(NodeGetCapabilitiesRequest) -> NodeGetCapabilitiesResponse,
        node_get_info(NodeGetInfoRequest) -> NodeGetInfoResponse;
}

impl Rpc for admin::GetPoolRequest {
    type Response = admin::Pool;

    async fn send(self, channel: Channel) -> Result<admin::Pool, Status> {
        let answer = PoolAdminClient::new(channel).get_pool(self).await?;
        Ok(answer.into_inner().pool.unwrap())
    }
}

impl Rpc for admin::GrowPoolRequest {
    type Response = admin::Pool;

    async fn send(self, channel: Channel) -> Result<admin::Pool, Status> {
        let answer = PoolAdminClient::new(channel).grow_pool(self).await?;
        Ok(answer.into_inner().pool.unwrap())
    }
}

impl Rpc for admin::GetVolumeRequest {
    type Response = admin::Volume;

    async fn send(self, channel: Channel) -> Result<admin::Volume, Status> {
        let answer = VolumeAdminClient::new(channel).get_volume(self).await?;
        Ok(answer.into_inner().volume.unwrap())
    }
}

impl Rpc for admin::ListInlineVolumesRequest {
    type Response = admin::ListInlineVolumesResponse;

    async fn send(self, channel: Channel) -> Result<admin::ListInlineVolumesResponse, Status> {
        Ok(VolumeAdminClient::new(channel).list_inline_volumes(self).await?.into_inner())
    }
}

impl Rpc for admin::ListBasesRequest {
    type Response = admin::ListBasesResponse;

    async fn send(self, channel: Channel) -> Result<admin::ListBasesResponse, Status> {
        Ok(BaseAdminClient::new(channel).list_bases(self).await?.into_inner())
    }
}

impl Rpc for admin::SetBaseRetentionRequest {
    type Response = admin::Base;

    async fn send(self, channel: Channel) -> Result<admin::Base, Status> {
        let answer = BaseAdminClient::new(channel).set_base_retention(self).await?;
        Ok(answer.into_inner().base.unwrap())
    }
}

#[track_caller]
pub fn assert_refused<T>(result: Result<T, Status>, code: Code, words: &str, call: &str) {
    match result {
        Ok(_) => panic!("succeeded: {call}"),
        Err(status) => {
            assert_eq!(status.code(), code, "{status:?}: {call}");
            assert!(status.message().contains(words), "{words:?} is not in {status:?}: {call}");
        }
    }
}
