//! CSI calls of the benchmarks, and decoded metadata streams.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use csi::controller_client::ControllerClient;
use csi::identity_client::IdentityClient;
use csi::node_client::NodeClient;
use csi::snapshot_metadata_client::SnapshotMetadataClient;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use csi_loopback::proto::csi::v1 as csi;
use tonic::Status;
use tonic::transport::Channel;

use crate::harness::{Driver, text};

/// How a volume is used.
#[derive(Debug, Clone, Copy)]
pub enum Capability {
    Block,
    Ext4,
}

impl From<Capability> for csi::VolumeCapability {
    fn from(capability: Capability) -> Self {
        let access_type = match capability {
            Capability::Block => AccessType::Block(BlockVolume {}),
            Capability::Ext4 => {
                AccessType::Mount(MountVolume { fs_type: "ext4".to_owned(), ..Default::default() })
            }
        };
        let access_mode = AccessMode { mode: Mode::SingleNodeWriter.into() };
        Self { access_type: Some(access_type), access_mode: Some(access_mode) }
    }
}

/// A published volume, which is unpublished at the end.
#[derive(Debug, Clone)]
pub struct InUse {
    volume_id: String,
    staging: PathBuf,
    target: PathBuf,
}

/// A unary request.
pub trait Rpc {
    type Response;

    fn send(self, channel: Channel) -> impl Future<Output = Result<Self::Response, Status>>;
}

macro_rules! rpcs {
    ($($client:ident $method:ident($request:ident) -> $response:ident;)*) => {$(
        impl Rpc for csi::$request {
            type Response = csi::$response;

            async fn send(self, channel: Channel) -> Result<csi::$response, Status> {
                $client::new(channel).$method(self).await.map(tonic::Response::into_inner)
            }
        }
    )*};
}

rpcs! {
    IdentityClient get_plugin_info(GetPluginInfoRequest) -> GetPluginInfoResponse;
    ControllerClient create_volume(CreateVolumeRequest) -> CreateVolumeResponse;
    ControllerClient delete_volume(DeleteVolumeRequest) -> DeleteVolumeResponse;
    ControllerClient list_volumes(ListVolumesRequest) -> ListVolumesResponse;
    ControllerClient create_snapshot(CreateSnapshotRequest) -> CreateSnapshotResponse;
    ControllerClient delete_snapshot(DeleteSnapshotRequest) -> DeleteSnapshotResponse;
    ControllerClient list_snapshots(ListSnapshotsRequest) -> ListSnapshotsResponse;
    NodeClient node_get_capabilities(NodeGetCapabilitiesRequest) -> NodeGetCapabilitiesResponse;
    NodeClient node_get_volume_stats(NodeGetVolumeStatsRequest) -> NodeGetVolumeStatsResponse;
    NodeClient node_stage_volume(NodeStageVolumeRequest) -> NodeStageVolumeResponse;
    NodeClient node_unstage_volume(NodeUnstageVolumeRequest) -> NodeUnstageVolumeResponse;
    NodeClient node_publish_volume(NodePublishVolumeRequest) -> NodePublishVolumeResponse;
    NodeClient node_unpublish_volume(NodeUnpublishVolumeRequest) -> NodeUnpublishVolumeResponse;
}

/// A decoded metadata stream.
#[derive(Debug, Default)]
pub struct Metadata {
    /// From the request to the first message.
    pub first: Duration,
    /// From the request to the end.
    pub whole: Duration,
    /// Offset and length in bytes.
    pub extents: Vec<(u64, u64)>,
}

impl Metadata {
    /// The 4 KiB blocks in the extents.
    pub fn blocks(&self) -> Vec<u64> {
        self.extents
            .iter()
            .flat_map(|(offset, length)| offset / 4096..(offset + length) / 4096)
            .collect()
    }
}

/// Gets the changed blocks from `base` to `target`, or without a base the allocated blocks of
/// `target`. A message has at most `max` extents; 0 is the driver's default.
pub async fn get_metadata(
    channel: Channel,
    base: Option<&str>,
    target: &str,
    max: i32,
) -> Result<Metadata> {
    let mut client = SnapshotMetadataClient::new(channel).max_decoding_message_size(16 << 20);
    let mut metadata = Metadata::default();
    let begun = Instant::now();
    macro_rules! read {
        ($stream:expr) => {{
            let mut stream = $stream.await?.into_inner();
            while let Some(message) = stream.message().await? {
                if metadata.first.is_zero() {
                    metadata.first = begun.elapsed();
                }
                let extents = message.block_metadata.iter();
                metadata.extents.extend(
                    extents.map(|extent| (extent.byte_offset as u64, extent.size_bytes as u64)),
                );
            }
        }};
    }
    match base {
        Some(base) => read!(client.get_metadata_delta(csi::GetMetadataDeltaRequest {
            base_snapshot_id: base.to_owned(),
            target_snapshot_id: target.to_owned(),
            max_results: max,
            ..Default::default()
        })),
        None => read!(client.get_metadata_allocated(csi::GetMetadataAllocatedRequest {
            snapshot_id: target.to_owned(),
            max_results: max,
            ..Default::default()
        })),
    }
    metadata.whole = begun.elapsed();
    ensure!(!metadata.first.is_zero(), "a stream without a message");
    Ok(metadata)
}

impl Driver {
    pub fn call<R: Rpc>(&self, request: R) -> Result<R::Response> {
        Ok(self.runtime.block_on(request.send(self.channel()?))?)
    }

    pub fn get_metadata(&self, base: Option<&str>, target: &str) -> Result<Metadata> {
        self.runtime.block_on(get_metadata(self.channel()?, base, target, 0))
    }

    /// Stages and publishes a volume. Returns the target path: a device node, or a directory.
    pub fn publish(&self, volume_id: &str, capability: Capability) -> Result<PathBuf> {
        let staging = self.pool.directory().join(format!("staging-{volume_id}"));
        let target = self.pool.directory().join(format!("target-{volume_id}"));
        let used = InUse { volume_id: volume_id.to_owned(), staging, target };
        self.in_use.borrow_mut().push(used.clone());
        self.call(csi::NodeStageVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: text(&used.staging).to_owned(),
            volume_capability: Some(capability.into()),
            ..Default::default()
        })?;
        self.call(csi::NodePublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: text(&used.staging).to_owned(),
            target_path: text(&used.target).to_owned(),
            volume_capability: Some(capability.into()),
            ..Default::default()
        })?;
        Ok(used.target)
    }

    /// Unpublishes and unstages all volumes.
    pub fn release(&self) {
        for used in self.in_use.borrow_mut().drain(..) {
            let unpublished = self.call(csi::NodeUnpublishVolumeRequest {
                volume_id: used.volume_id.clone(),
                target_path: text(&used.target).to_owned(),
                ..Default::default()
            });
            let unstaged = self.call(csi::NodeUnstageVolumeRequest {
                volume_id: used.volume_id,
                staging_target_path: text(&used.staging).to_owned(),
            });
            for error in [unpublished.err(), unstaged.err()].into_iter().flatten() {
                eprintln!("releasing a volume: {error:#}");
            }
        }
    }
}
