//! CSI requests for tests, their calls, and decoded responses.

use admin::base_admin_client::BaseAdminClient;
use admin::pool_admin_client::PoolAdminClient;
use admin::volume_admin_client::VolumeAdminClient;
use bytes::Bytes;
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
use hyper_util::rt::TokioIo;
use session::snapshot_metadata_client::SnapshotMetadataClient as SessionClient;
use std::any::Any;
use std::path::{Path, PathBuf};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use super::driver::{Driver, PATIENCE};
use super::owned;

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

/// The numbers of the capabilities of the Controller service.
pub fn controller_capabilities(driver: &Driver) -> Vec<i32> {
    let answer = driver.ok(csi::ControllerGetCapabilitiesRequest {});
    let of = |one: csi::ControllerServiceCapability| {
        let csi::controller_service_capability::Type::Rpc(rpc) = one.r#type.unwrap();
        rpc.r#type
    };
    answer.capabilities.into_iter().map(of).collect()
}

/// The numbers of the capabilities of the Node service.
pub fn node_capabilities(driver: &Driver) -> Vec<i32> {
    let answer = driver.ok(csi::NodeGetCapabilitiesRequest {});
    let of = |one: csi::NodeServiceCapability| {
        let csi::node_service_capability::Type::Rpc(rpc) = one.r#type.unwrap();
        rpc.r#type
    };
    answer.capabilities.into_iter().map(of).collect()
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
        mount_flags: owned(flags),
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
        source_volume_ids: owned(volume_ids),
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

/// A channel to a socket. Must be called in a tokio runtime.
pub fn channel_of(endpoint: Endpoint, socket: PathBuf) -> Channel {
    endpoint.connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
    }))
}

/// The response to a call, or an error after the time limit of a test.
pub async fn call_through<R: Rpc>(channel: Channel, request: R) -> Result<R::Response, Status> {
    let late = |_| Err(Status::unknown("the call exceeded the time limit of the test"));
    tokio::time::timeout(PATIENCE, request.send(channel)).await.unwrap_or_else(late)
}

/// A message with gRPC's prefix of five bytes.
pub fn framed(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).unwrap();
    [&[0], &length.to_be_bytes()[..], message].concat().into()
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

macro_rules! admin_rpcs {
    ($($client:ident $method:ident($request:ident) -> $answer:ident $(: $field:ident)?;)*) => {$(
        impl Rpc for admin::$request {
            type Response = admin::$answer;

            async fn send(self, channel: Channel) -> Result<admin::$answer, Status> {
                let answer = $client::new(channel).$method(self).await?.into_inner();
                Ok(answer$(.$field.unwrap())?)
            }
        }
    )*};
}

admin_rpcs! {
    PoolAdminClient get_pool(GetPoolRequest) -> Pool: pool;
    PoolAdminClient grow_pool(GrowPoolRequest) -> Pool: pool;
    VolumeAdminClient get_volume(GetVolumeRequest) -> Volume: volume;
    VolumeAdminClient list_inline_volumes(ListInlineVolumesRequest) -> ListInlineVolumesResponse;
    BaseAdminClient list_bases(ListBasesRequest) -> ListBasesResponse;
    BaseAdminClient set_base_retention(SetBaseRetentionRequest) -> Base: base;
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
