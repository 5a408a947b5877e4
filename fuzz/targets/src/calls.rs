//! Kubelet's calls as the node proxy looks at them: what it adds joins what is there, and what it cannot read stays as it is.

use std::collections::HashMap;

use csi::volume_capability::{AccessType, MountVolume};
use csi_loopback::fuzzing::{
    Asked, Call, Describe, Group, Publishing, Subject, deferred, gathered, unframed,
};
use csi_loopback::proto::csi::v1 as csi;

pub fn calls(input: &[u8]) {
    let Some((kind, bytes)) = input.split_first() else { return };
    let call = Call::ALL[usize::from(kind & 3)];
    let group = (kind & 4 != 0).then(|| Group {
        id: "4059".to_owned(),
        policy: (kind & 8 != 0).then(|| "OnRootMismatch".to_owned()),
    });
    // In pieces, as a connection may bring it; whole where it is read and where it is not.
    let piece = 1 + usize::from(kind >> 5) * 7;
    let held = gathered(bytes.chunks(piece).map(<[u8]>::to_vec).collect()).unwrap();
    assert_eq!(held, bytes);
    if let Some(message) = unframed(bytes) {
        add(call, message, group.as_ref());
    }
    // Most of what is tried has no frame.
    add(call, bytes, group.as_ref());
}

fn add(call: Call, message: &[u8], group: Option<&Group>) {
    let Some(asked) = Asked::read(call, message) else { return };
    asked.describe(&mut Subject::default());
    let framed = deferred(call, message, group);
    let added = unframed(&framed).unwrap();
    assert!(added.starts_with(message));
    assert_eq!(Asked::read(call, added), Some(wanted(asked, group)));
}

/// The same request with the fields.
fn wanted(asked: Asked, group: Option<&Group>) -> Asked {
    match asked {
        Asked::Publish(mut asked) => {
            let place = Publishing::of(&asked.target_path, &asked.volume_context);
            assert!(place.is_none_or(|place| !place.pod_uid().is_empty()));
            assert_eq!(Publishing::of("", &HashMap::new()), None);
            asked.defer_fs_ops = true;
            if let Some(group) = group {
                let capability = asked.volume_capability.get_or_insert_default();
                let mut mount = match capability.access_type.take() {
                    Some(AccessType::Mount(mount)) => mount,
                    // The proxy adds to none of a raw block volume.
                    Some(AccessType::Block(_)) | None => MountVolume::default(),
                };
                mount.volume_supplemental_group.clone_from(&group.id);
                if let Some(policy) = &group.policy {
                    mount.volume_supplemental_group_change_policy.clone_from(policy);
                }
                capability.access_type = Some(AccessType::Mount(mount));
            }
            Asked::Publish(asked)
        }
        Asked::Unpublish(asked) => {
            Asked::Unpublish(csi::NodeUnpublishVolumeRequest { defer_fs_ops: true, ..asked })
        }
        Asked::Stats(asked) => {
            Asked::Stats(csi::NodeGetVolumeStatsRequest { defer_fs_ops: true, ..asked })
        }
        Asked::Expand(mut asked) => {
            asked.defer_fs_ops = true;
            Asked::Expand(asked)
        }
    }
}
