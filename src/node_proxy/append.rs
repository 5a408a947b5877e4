//! Fields that are added to an encoded request. Protobuf merges what is written twice: a scalar that comes later counts, and
//! messages become one. So to add a field is to write it behind the rest, and nothing of that is decoded and encoded again: what this
//! version does not know stays.

use prost::Message;

use super::opt_in::Group;
use crate::proto::csi::v1 as csi;
use csi::volume_capability::{AccessType, MountVolume};

/// NodePublishVolume with `defer_fs_ops`, and the group where there is one.
pub fn to_publish(request: &mut Vec<u8>, group: Option<&Group>) {
    let capability = group.map(|group| csi::VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume {
            volume_supplemental_group: group.id.clone(),
            volume_supplemental_group_change_policy: group.policy.clone().unwrap_or_default(),
            ..MountVolume::default()
        })),
        ..csi::VolumeCapability::default()
    });
    add(
        request,
        &csi::NodePublishVolumeRequest {
            defer_fs_ops: true,
            volume_capability: capability,
            ..Default::default()
        },
    );
}

pub fn to_unpublish(request: &mut Vec<u8>) {
    add(request, &csi::NodeUnpublishVolumeRequest { defer_fs_ops: true, ..Default::default() });
}

pub fn to_stats(request: &mut Vec<u8>) {
    add(request, &csi::NodeGetVolumeStatsRequest { defer_fs_ops: true, ..Default::default() });
}

pub fn to_expand(request: &mut Vec<u8>) {
    add(request, &csi::NodeExpandVolumeRequest { defer_fs_ops: true, ..Default::default() });
}

fn add(request: &mut Vec<u8>, fields: &impl Message) {
    request.extend_from_slice(&fields.encode_to_vec());
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
        to_publish(&mut bytes, Some(&group));
        let after = csi::NodePublishVolumeRequest::decode(bytes.as_slice()).unwrap();
        let mut wanted = before;
        wanted.defer_fs_ops = true;
        if let Some(AccessType::Mount(mount)) =
            wanted.volume_capability.as_mut().and_then(|capability| capability.access_type.as_mut())
        {
            mount.volume_supplemental_group = "7".into();
            mount.volume_supplemental_group_change_policy = "OnRootMismatch".into();
        }
        assert_eq!(after, wanted);
        assert!(bytes.windows(unknown.len()).any(|window| window == unknown));
    }

    #[test]
    fn each_call_has_the_field() {
        let mut unpublish = Vec::new();
        to_unpublish(&mut unpublish);
        assert!(
            csi::NodeUnpublishVolumeRequest::decode(unpublish.as_slice()).unwrap().defer_fs_ops
        );
        let mut stats = Vec::new();
        to_stats(&mut stats);
        assert!(csi::NodeGetVolumeStatsRequest::decode(stats.as_slice()).unwrap().defer_fs_ops);
        let mut expand = Vec::new();
        to_expand(&mut expand);
        assert!(csi::NodeExpandVolumeRequest::decode(expand.as_slice()).unwrap().defer_fs_ops);
    }
}
