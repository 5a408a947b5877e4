//! The message of a unary call: gathered, taken out of its frame, added to, and framed again. Protobuf merges what is written twice: a
//! scalar that comes later counts, and messages become one. So to add a field is to write it behind the rest, and nothing of that is
//! decoded and encoded again: what this version does not know stays.

use std::sync::Arc;

use http_body_util::{BodyExt as _, Full};
use prost::Message;
use prost::bytes::{Bytes, BytesMut};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::body::Body;
use tonic::codegen::http::HeaderMap;

use super::call::Call;
use super::wish::Group;
use crate::proto::csi::v1 as csi;
use csi::volume_capability::{AccessType, MountVolume};

/// Bytes of a message that is looked at, at most: what gRPC servers take by default.
pub const MAX_MESSAGE: usize = 4 << 20;
/// A larger one needs room.
const SMALL: usize = 64 << 10;
/// So many larger ones are held at once.
const LARGE_AT_ONCE: usize = 16;
/// A message's prefix: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// Room for large messages. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Room(Arc<Semaphore>);

impl Default for Room {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(LARGE_AT_ONCE)))
    }
}

/// A body, whole.
#[derive(Debug)]
pub struct Held {
    pub bytes: Bytes,
    pub trailers: Option<HeaderMap>,
    /// Kept for as long as the message is.
    _room: Option<OwnedSemaphorePermit>,
}

/// Why a body cannot be had whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unheld {
    TooLarge,
    BrokeOff,
}

impl Room {
    /// Gathers a body. A large one waits until there is room.
    pub async fn gather(&self, mut body: Body) -> Result<Held, Unheld> {
        let (mut bytes, mut trailers, mut room) = (BytesMut::new(), None, None);
        while let Some(frame) = body.frame().await {
            match frame.map_err(|_| Unheld::BrokeOff)?.into_data() {
                Ok(data) => {
                    let length = bytes.len() + data.len();
                    if length > MAX_MESSAGE + PREFIX {
                        return Err(Unheld::TooLarge);
                    }
                    if length > SMALL && room.is_none() {
                        room = self.0.clone().acquire_owned().await.ok();
                    }
                    bytes.extend_from_slice(&data);
                }
                Err(frame) => trailers = frame.into_trailers().ok(),
            }
        }
        Ok(Held { bytes: bytes.freeze(), trailers, _room: room })
    }
}

/// A body of these bytes.
pub fn body(bytes: impl Into<Bytes>, trailers: Option<HeaderMap>) -> Body {
    let trailers = async move { trailers.map(Ok) };
    Body::new(Full::new(bytes.into()).with_trailers(trailers))
}

/// The one message of a unary call, if it is not compressed.
pub fn unframed(bytes: &[u8]) -> Option<&[u8]> {
    let (prefix, message) = bytes.split_at_checked(PREFIX)?;
    let (compressed, length) = prefix.split_first()?;
    let length = u32::from_be_bytes(length.try_into().ok()?) as usize;
    (*compressed == 0 && length == message.len()).then_some(message)
}

/// A message in a frame, with `defer_fs_ops`, and, for a publish, the group where there is one.
pub fn deferred(call: Call, message: &[u8], group: Option<&Group>) -> Vec<u8> {
    let added = match call {
        Call::Publish => added_to_publish(group),
        Call::Unpublish => {
            csi::NodeUnpublishVolumeRequest { defer_fs_ops: true, ..Default::default() }
                .encode_to_vec()
        }
        Call::Stats => csi::NodeGetVolumeStatsRequest { defer_fs_ops: true, ..Default::default() }
            .encode_to_vec(),
        Call::Expand => csi::NodeExpandVolumeRequest { defer_fs_ops: true, ..Default::default() }
            .encode_to_vec(),
    };
    // What is added to a message that fits is some hundred bytes.
    let length = u32::try_from(message.len() + added.len()).unwrap_or(u32::MAX);
    [&[0], length.to_be_bytes().as_slice(), message, &added].concat()
}

fn added_to_publish(group: Option<&Group>) -> Vec<u8> {
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
    fn what_is_added_joins_what_is_there_and_nothing_is_lost() {
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
        // A field of a later CSI: number 100, a string.
        let unknown = [0xa2, 0x06, 0x03, b'n', b'e', b'w'];
        bytes.extend_from_slice(&unknown);
        let group = Group { id: "7".into(), policy: Some("OnRootMismatch".into()) };
        let framed = deferred(Call::Publish, &bytes, Some(&group));
        let message = unframed(&framed).unwrap();
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
    fn each_call_has_the_field() {
        fn of<M: Message + Default>(call: Call) -> M {
            M::decode(unframed(&deferred(call, &[], None)).unwrap()).unwrap()
        }
        assert!(of::<csi::NodePublishVolumeRequest>(Call::Publish).defer_fs_ops);
        assert!(of::<csi::NodeUnpublishVolumeRequest>(Call::Unpublish).defer_fs_ops);
        assert!(of::<csi::NodeGetVolumeStatsRequest>(Call::Stats).defer_fs_ops);
        assert!(of::<csi::NodeExpandVolumeRequest>(Call::Expand).defer_fs_ops);
    }

    #[test]
    fn only_one_whole_message_that_is_not_compressed_is_read() {
        assert_eq!(unframed(&[0, 0, 0, 0, 2, 7, 8]), Some([7, 8].as_slice()));
        for other in [
            &[][..],
            &[0, 0, 0, 0],
            &[1, 0, 0, 0, 2, 7, 8],
            &[0, 0, 0, 0, 3, 7, 8],
            &[0, 0, 0, 0, 1, 7, 8],
            &[0, 0, 0, 0, 1, 7, 0, 0, 0, 0, 1, 8],
        ] {
            assert_eq!(unframed(other), None, "{other:?}");
        }
    }

    #[tokio::test]
    async fn a_message_is_held_up_to_its_bound() {
        let room = Room::default();
        let held = room.gather(body(vec![7; MAX_MESSAGE + PREFIX], None)).await.unwrap();
        assert_eq!(held.bytes.len(), MAX_MESSAGE + PREFIX);
        let refused = room.gather(body(vec![7; MAX_MESSAGE + PREFIX + 1], None)).await;
        assert_eq!(refused.unwrap_err(), Unheld::TooLarge);
    }

    #[tokio::test]
    async fn large_messages_wait_for_room_and_small_ones_do_not() {
        let room = Room::default();
        let large = || room.gather(body(vec![7; SMALL + 1], None));
        let mut held = Vec::new();
        for _ in 0..LARGE_AT_ONCE {
            held.push(large().await.unwrap());
        }
        room.gather(body(vec![7; SMALL], None)).await.unwrap();
        let mut waits = Box::pin(large());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(waits.as_mut().poll(&mut context).is_pending());
        held.pop();
        assert_eq!(waits.await.unwrap().bytes.len(), SMALL + 1);
    }
}
