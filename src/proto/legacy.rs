//! The NodePublishVolume request with the legacy number of `defer_fs_ops`. Before CSI v1.13
//! assigned number 7 to GET_VOLUME_HEALTH, this project used it for DEFER_FS_OPS, and
//! `defer_fs_ops` had number 9. A node proxy from then mistakes every driver of CSI v1.13 for one
//! that defers mounts, and sends the field with its legacy number. As an unknown field it would be
//! ignored, and the volume mounted on the host.

use prost::bytes::{Buf, BufMut};
use prost::encoding::{DecodeContext, WireType, decode_varint};
use prost::{DecodeError, Message};

use super::csi::v1 as csi;

/// The legacy number of `NodePublishVolumeRequest.defer_fs_ops`.
const LEGACY_NUMBER: u32 = 9;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct PublishRequest {
    pub request: csi::NodePublishVolumeRequest,
    /// Whether `defer_fs_ops` is set at its legacy number.
    pub has_legacy_field: bool,
}

impl Message for PublishRequest {
    fn encode_raw(&self, buf: &mut impl BufMut) {
        self.request.encode_raw(buf);
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        // With another type, it is a field of a later CSI version.
        if (tag, wire_type) != (LEGACY_NUMBER, WireType::Varint) {
            return self.request.merge_field(tag, wire_type, buf, context);
        }
        self.has_legacy_field = decode_varint(buf)? != 0;
        Ok(())
    }

    fn encoded_len(&self) -> usize {
        self.request.encoded_len()
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes a request followed by these bytes.
    fn read(suffix: &[u8]) -> PublishRequest {
        let request = csi::NodePublishVolumeRequest {
            volume_id: "v".into(),
            target_path: "/t".into(),
            defer_fs_ops: true,
            ..Default::default()
        };
        let read = PublishRequest::decode(
            [request.encode_to_vec().as_slice(), suffix].concat().as_slice(),
        );
        let read = read.unwrap();
        assert_eq!(read.request, request);
        read
    }

    #[test]
    fn only_the_legacy_defer_fs_ops_field_is_detected() {
        assert!(read(&[0x48, 1]).has_legacy_field);
        for other in [&[][..], &[0x48, 0], &[0x4a, 1, b'x'], &[0x50, 1], &[0xa2, 0x06, 1, b'n']] {
            assert!(!read(other).has_legacy_field, "{other:?}");
        }
        assert!(PublishRequest::decode([0x48_u8].as_slice()).is_err());
    }
}
