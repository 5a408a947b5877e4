//! Buffers the message of a unary call, removes its gRPC frame, appends fields, and frames it
//! again. Protobuf merges repeated occurrences of a field: the last scalar wins, and messages are
//! merged. So a field is added by appending its encoding. The original bytes are not decoded and
//! encoded again, and unknown fields survive.

use std::sync::Arc;

use http_body_util::{BodyExt as _, Full};
use prost::Message;
use prost::bytes::{Bytes, BytesMut};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::body::Body;
use tonic::codegen::http::HeaderMap;

use super::call::Call;
use super::deferral_request::Group;
use csi::volume_capability::{AccessType, MountVolume};
use grpc::proto::csi::v1 as csi;

/// Maximum bytes of a decoded message: the default of gRPC servers.
pub const MAX_MESSAGE: usize = 4 << 20;
/// A larger message needs a permit.
const SMALL: usize = 64 << 10;
/// Maximum number of larger messages in memory.
const MAX_LARGE: usize = 16;
/// Bytes of the gRPC frame prefix: the compression flag and the length.
const PREFIX: usize = 5;

/// Limits the large messages in memory; clones share the limit.
#[derive(Debug, Clone)]
pub struct BufferLimit(Arc<Semaphore>);

impl Default for BufferLimit {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_LARGE)))
    }
}

/// A complete body.
#[derive(Debug)]
pub struct BufferedBody {
    pub bytes: Bytes,
    pub trailers: Option<HeaderMap>,
    /// Held while the message is in memory.
    _permit: Option<OwnedSemaphorePermit>,
}

/// Why a body could not be buffered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BufferError {
    TooLarge,
    Incomplete,
}

impl BufferLimit {
    /// Reads a complete body. A large one waits for a permit.
    pub async fn buffer(&self, mut body: Body) -> Result<BufferedBody, BufferError> {
        let (mut bytes, mut trailers, mut permit) = (BytesMut::new(), None, None);
        while let Some(frame) = body.frame().await {
            match frame.map_err(|_| BufferError::Incomplete)?.into_data() {
                Ok(data) => {
                    let length = bytes.len() + data.len();
                    if length > MAX_MESSAGE + PREFIX {
                        return Err(BufferError::TooLarge);
                    }
                    if length > SMALL && permit.is_none() {
                        permit = self.0.clone().acquire_owned().await.ok();
                    }
                    bytes.extend_from_slice(&data);
                }
                Err(frame) => trailers = frame.into_trailers().ok(),
            }
        }
        Ok(BufferedBody { bytes: bytes.freeze(), trailers, _permit: permit })
    }
}

/// Creates a body.
pub fn body(bytes: impl Into<Bytes>, trailers: Option<HeaderMap>) -> Body {
    let trailers = async move { trailers.map(Ok) };
    Body::new(Full::new(bytes.into()).with_trailers(trailers))
}

/// The single message of a unary call, if it is not compressed.
pub fn unframe(bytes: &[u8]) -> Option<&[u8]> {
    let (prefix, message) = bytes.split_at_checked(PREFIX)?;
    let (compressed, length) = prefix.split_first()?;
    let length = u32::from_be_bytes(length.try_into().ok()?) as usize;
    (*compressed == 0 && length == message.len()).then_some(message)
}

/// Appends `defer_fs_ops` to a message, and the group to a publish, and adds the frame.
pub fn with_defer_fs_ops(call: Call, message: &[u8], group: Option<&Group>) -> Vec<u8> {
    let added = match call {
        Call::Publish => publish_fields(group),
        Call::Unpublish => {
            csi::NodeUnpublishVolumeRequest { defer_fs_ops: true, ..Default::default() }
                .encode_to_vec()
        }
        Call::Stats => csi::NodeGetVolumeStatsRequest { defer_fs_ops: true, ..Default::default() }
            .encode_to_vec(),
        Call::Expand => csi::NodeExpandVolumeRequest { defer_fs_ops: true, ..Default::default() }
            .encode_to_vec(),
    };
    // The appended fields have at most some hundred bytes.
    let length = u32::try_from(message.len() + added.len()).unwrap_or(u32::MAX);
    [&[0], length.to_be_bytes().as_slice(), message, &added].concat()
}

fn publish_fields(group: Option<&Group>) -> Vec<u8> {
    let capability = group.map(|group| csi::VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume {
            volume_supplemental_group: group.id.clone(),
            volume_supplemental_group_change_policy: group.policy.clone().unwrap_or_default(),
            ..MountVolume::default()
        })),
        ..csi::VolumeCapability::default()
    });
    let added = csi::NodePublishVolumeRequest {
        defer_fs_ops: true,
        volume_capability: capability,
        ..Default::default()
    };
    added.encode_to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn added_fields_merge_and_unknown_fields_survive() {
        let mount = MountVolume {
            fs_type: "xfs".into(),
            mount_flags: vec!["noatime".into()],
            volume_mount_group: "7".into(),
            ..MountVolume::default()
        };
        let before = csi::NodePublishVolumeRequest {
            volume_id: "v".into(),
            volume_capability: Some(csi::VolumeCapability {
                access_mode: Some(csi::volume_capability::AccessMode { mode: 6 }),
                access_type: Some(AccessType::Mount(mount)),
            }),
            ..Default::default()
        };
        let mut bytes = before.encode_to_vec();
        // A field of a later CSI version: number 100, a string.
        let unknown = [0xa2, 0x06, 0x03, b'n', b'e', b'w'];
        bytes.extend_from_slice(&unknown);
        let group = Group { id: "7".into(), policy: Some("OnRootMismatch".into()) };
        let framed = with_defer_fs_ops(Call::Publish, &bytes, Some(&group));
        let message = unframe(&framed).unwrap();
        let mut wanted = before;
        wanted.defer_fs_ops = true;
        if let Some(AccessType::Mount(mount)) =
            wanted.volume_capability.as_mut().and_then(|capability| capability.access_type.as_mut())
        {
            mount.volume_supplemental_group = "7".into();
            mount.volume_supplemental_group_change_policy = "OnRootMismatch".into();
        }
        assert_eq!(csi::NodePublishVolumeRequest::decode(message).unwrap(), wanted);
        assert_eq!(message[..bytes.len()], bytes);
    }

    #[test]
    fn each_call_gets_defer_fs_ops() {
        fn of<M: Message + Default>(call: Call) -> M {
            M::decode(unframe(&with_defer_fs_ops(call, &[], None)).unwrap()).unwrap()
        }
        assert!(of::<csi::NodePublishVolumeRequest>(Call::Publish).defer_fs_ops);
        assert!(of::<csi::NodeUnpublishVolumeRequest>(Call::Unpublish).defer_fs_ops);
        assert!(of::<csi::NodeGetVolumeStatsRequest>(Call::Stats).defer_fs_ops);
        assert!(of::<csi::NodeExpandVolumeRequest>(Call::Expand).defer_fs_ops);
    }

    #[test]
    fn only_one_complete_uncompressed_message_is_accepted() {
        assert_eq!(unframe(&[0, 0, 0, 0, 2, 7, 8]), Some([7, 8].as_slice()));
        for other in [
            &[][..],
            &[0, 0, 0, 0],
            &[1, 0, 0, 0, 2, 7, 8],
            &[0, 0, 0, 0, 3, 7, 8],
            &[0, 0, 0, 0, 1, 7, 8],
            &[0, 0, 0, 0, 1, 7, 0, 0, 0, 0, 1, 8],
        ] {
            assert_eq!(unframe(other), None, "{other:?}");
        }
    }

    #[tokio::test]
    async fn messages_are_buffered_up_to_the_limit() {
        let limit = BufferLimit::default();
        let held = limit.buffer(body(vec![7; MAX_MESSAGE + PREFIX], None)).await.unwrap();
        assert_eq!(held.bytes.len(), MAX_MESSAGE + PREFIX);
        let refused = limit.buffer(body(vec![7; MAX_MESSAGE + PREFIX + 1], None)).await;
        assert_eq!(refused.unwrap_err(), BufferError::TooLarge);
    }

    #[tokio::test]
    async fn only_large_messages_wait_for_a_permit() {
        let limit = BufferLimit::default();
        let large = || limit.buffer(body(vec![7; SMALL + 1], None));
        let mut held = Vec::new();
        for _ in 0..MAX_LARGE {
            held.push(large().await.unwrap());
        }
        limit.buffer(body(vec![7; SMALL], None)).await.unwrap();
        let mut waits = Box::pin(large());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(waits.as_mut().poll(&mut context).is_pending());
        held.pop();
        assert_eq!(waits.await.unwrap().bytes.len(), SMALL + 1);
    }
}
