//! CSI calls of the benchmarks, and decoded metadata streams.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use csi::snapshot_metadata_client::SnapshotMetadataClient;
use csi::volume_capability::access_mode::Mode;
use csi_loopback::proto::csi::v1 as csi;
use support::requests::{Rpc, allocated, block, delta, mounted_as, unpublishing, unstaging};
use tonic::transport::Channel;

use crate::harness::{Driver, text};

/// The capability of a mounted volume.
pub fn ext4() -> csi::VolumeCapability {
    mounted_as("ext4", Mode::SingleNodeWriter)
}

/// A published volume, which is unpublished at the end.
#[derive(Debug, Clone)]
pub struct InUse {
    volume_id: String,
    staging: PathBuf,
    target: PathBuf,
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
            max_results: max,
            ..delta(base, target)
        })),
        None => read!(client.get_metadata_allocated(csi::GetMetadataAllocatedRequest {
            max_results: max,
            ..allocated(target)
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

    /// Stages and publishes a raw block volume. Returns its device node.
    pub fn publish(&self, volume_id: &str) -> Result<PathBuf> {
        self.publish_as(volume_id, block())
    }

    /// Stages and publishes a volume. Returns the target path: a device node, or a directory.
    pub fn publish_as(
        &self,
        volume_id: &str,
        capability: csi::VolumeCapability,
    ) -> Result<PathBuf> {
        let staging = self.pool.directory().join(format!("staging-{volume_id}"));
        let target = self.pool.directory().join(format!("target-{volume_id}"));
        let used = InUse { volume_id: volume_id.to_owned(), staging, target };
        self.in_use.borrow_mut().push(used.clone());
        self.call(csi::NodeStageVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: text(&used.staging).to_owned(),
            volume_capability: Some(capability.clone()),
            ..Default::default()
        })?;
        self.call(csi::NodePublishVolumeRequest {
            volume_id: volume_id.to_owned(),
            staging_target_path: text(&used.staging).to_owned(),
            target_path: text(&used.target).to_owned(),
            volume_capability: Some(capability),
            ..Default::default()
        })?;
        Ok(used.target)
    }

    /// Unpublishes and unstages all volumes.
    pub fn release(&self) {
        for InUse { volume_id, staging, target } in self.in_use.borrow_mut().drain(..) {
            let unpublished = self.call(unpublishing(&volume_id, text(&target)));
            let unstaged = self.call(unstaging(&volume_id, text(&staging)));
            for error in [unpublished.err(), unstaged.err()].into_iter().flatten() {
                eprintln!("releasing a volume: {error:#}");
            }
        }
    }
}
