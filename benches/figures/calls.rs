//! The calls that the bench makes, and what a metadata stream answers.

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
    fn from(wanted: Capability) -> Self {
        let access_type = match wanted {
            Capability::Block => AccessType::Block(BlockVolume {}),
            Capability::Ext4 => {
                AccessType::Mount(MountVolume { fs_type: "ext4".to_owned(), ..Default::default() })
            }
        };
        let access_mode = AccessMode { mode: Mode::SingleNodeWriter.into() };
        Self { access_type: Some(access_type), access_mode: Some(access_mode) }
    }
}

/// A volume that is published, to be released at the end.
#[derive(Debug, Clone)]
pub struct InUse {
    volume_id: String,
    staging: PathBuf,
    target: PathBuf,
}

/// A request with one answer.
pub trait Rpc {
    type Answer;

    fn send(self, channel: Channel) -> impl Future<Output = Result<Self::Answer, Status>>;
}

macro_rules! rpcs {
    ($($client:ident $method:ident($request:ident) -> $answer:ident;)*) => {$(
        impl Rpc for csi::$request {
            type Answer = csi::$answer;

            async fn send(self, channel: Channel) -> Result<csi::$answer, Status> {
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

/// A decoded answer to `allocated` or `delta`.
#[derive(Debug, Default)]
pub struct Answer {
    /// From the request to the first message, and to the end.
    pub first: Duration,
    pub whole: Duration,
    /// Offset and length in bytes.
    pub extents: Vec<(u64, u64)>,
}

impl Answer {
    /// The 4 KiB blocks that it names.
    pub fn blocks(&self) -> Vec<u64> {
        self.extents
            .iter()
            .flat_map(|(offset, length)| offset / 4096..(offset + length) / 4096)
            .collect()
    }
}

/// `base` to `target`, or with no base what `target` holds.
pub async fn ask(channel: Channel, base: Option<&str>, target: &str, max: i32) -> Result<Answer> {
    let mut client = SnapshotMetadataClient::new(channel).max_decoding_message_size(16 << 20);
    let mut answer = Answer::default();
    let begun = Instant::now();
    macro_rules! take {
        ($stream:expr) => {{
            let mut stream = $stream.await?.into_inner();
            while let Some(message) = stream.message().await? {
                if answer.first.is_zero() {
                    answer.first = begun.elapsed();
                }
                let extents = message.block_metadata.iter();
                answer.extents.extend(
                    extents.map(|extent| (extent.byte_offset as u64, extent.size_bytes as u64)),
                );
            }
        }};
    }
    match base {
        Some(base) => take!(client.get_metadata_delta(csi::GetMetadataDeltaRequest {
            base_snapshot_id: base.to_owned(),
            target_snapshot_id: target.to_owned(),
            max_results: max,
            ..Default::default()
        })),
        None => take!(client.get_metadata_allocated(csi::GetMetadataAllocatedRequest {
            snapshot_id: target.to_owned(),
            max_results: max,
            ..Default::default()
        })),
    }
    answer.whole = begun.elapsed();
    ensure!(!answer.first.is_zero(), "an answer without a message");
    Ok(answer)
}

impl Driver {
    pub fn call<R: Rpc>(&self, request: R) -> Result<R::Answer> {
        Ok(self.runtime.block_on(request.send(self.channel()?))?)
    }

    pub fn ask(&self, base: Option<&str>, target: &str) -> Result<Answer> {
        self.runtime.block_on(ask(self.channel()?, base, target, 0))
    }

    /// Stages and publishes a volume and returns where: a device node, or a directory.
    pub fn publish(&self, volume_id: &str, wanted: Capability) -> Result<PathBuf> {
        let staging = self.pool.directory().join(format!("staging-{volume_id}"));
        let target = self.pool.directory().join(format!("target-{volume_id}"));
        let used = InUse { volume_id: volume_id.to_owned(), staging, target };
        self.in_use.borrow_mut().push(used.clone());
        self.call(csi::NodeStageVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: text(&used.staging).to_owned(),
            volume_capability: Some(wanted.into()),
            ..Default::default()
        })?;
        self.call(csi::NodePublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: text(&used.staging).to_owned(),
            target_path: text(&used.target).to_owned(),
            volume_capability: Some(wanted.into()),
            ..Default::default()
        })?;
        Ok(used.target)
    }

    /// Unpublishes and unstages what is published.
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
