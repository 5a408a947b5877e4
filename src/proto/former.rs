//! NodePublishVolume as the driver reads it. Before CSI v1.13 gave the number 7 to GET_VOLUME_HEALTH, it was that of DEFER_FS_OPS here, and
//! `defer_fs_ops` had the number 9. A node proxy from then takes every driver of CSI v1.13 for one that leaves mounts to container runtimes,
//! and sends the field at its former number. As an unknown field it would be passed over, and the volume mounted on the host.

use prost::bytes::{Buf, BufMut};
use prost::encoding::{DecodeContext, WireType, decode_varint};
use prost::{DecodeError, Message};

use super::csi::v1 as csi;

/// The former number of `NodePublishVolumeRequest.defer_fs_ops`.
const FORMER: u32 = 9;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct PublishRequest {
    pub request: csi::NodePublishVolumeRequest,
    /// Whether `defer_fs_ops` is set at its former number.
    pub is_former: bool,
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
        // Of any other type it is a field of a later CSI.
        if (tag, wire_type) != (FORMER, WireType::Varint) {
            return self.request.merge_field(tag, wire_type, buf, context);
        }
        self.is_former = decode_varint(buf)? != 0;
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

    /// A request with these bytes behind it.
    fn read(behind: &[u8]) -> PublishRequest {
        let request = csi::NodePublishVolumeRequest {
            volume_id: "v".into(),
            target_path: "/t".into(),
            defer_fs_ops: true,
            ..Default::default()
        };
        let read = PublishRequest::decode(
            [request.encode_to_vec().as_slice(), behind].concat().as_slice(),
        );
        let read = read.unwrap();
        assert_eq!(read.request, request);
        read
    }

    #[test]
    fn the_former_number_of_defer_fs_ops_is_noticed_and_no_field_of_a_later_csi_taken_for_it() {
        assert!(read(&[0x48, 1]).is_former);
        for other in [&[][..], &[0x48, 0], &[0x4a, 1, b'x'], &[0x50, 1], &[0xa2, 0x06, 1, b'n']] {
            assert!(!read(other).is_former, "{other:?}");
        }
        assert!(PublishRequest::decode([0x48_u8].as_slice()).is_err());
    }
}
