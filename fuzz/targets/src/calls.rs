//! Kubelet's calls in the node proxy: added fields are merged with existing ones, and an unreadable
//! message remains unchanged.

use std::collections::HashMap;

use csi::volume_capability::{AccessType, MountVolume};
use csi_loopback::fuzzing::{
    Call, DecodedRequest, Describe, Group, PublishTarget, Subject, gather, unframe,
    with_defer_fs_ops,
};
use csi_loopback::proto::csi::v1 as csi;

pub fn calls(input: &[u8]) {
    let Some((kind, bytes)) = input.split_first() else { return };
    let call = Call::ALL[usize::from(kind & 3)];
    let group = (kind & 4 != 0).then(|| Group {
        id: "4059".to_owned(),
        policy: (kind & 8 != 0).then(|| "OnRootMismatch".to_owned()),
    });
    // In pieces, like from a connection; complete, whether it is decoded or not.
    let piece = 1 + usize::from(kind >> 5) * 7;
    let body = gather(bytes.chunks(piece).map(<[u8]>::to_vec).collect()).unwrap();
    assert_eq!(body, bytes);
    if let Some(message) = unframe(bytes) {
        add(call, message, group.as_ref());
    }
    // Most inputs have no frame.
    add(call, bytes, group.as_ref());
}

fn add(call: Call, message: &[u8], group: Option<&Group>) {
    let Some(req) = DecodedRequest::decode(call, message) else { return };
    req.describe(&mut Subject::default());
    let framed = with_defer_fs_ops(call, message, group);
    let added = unframe(&framed).unwrap();
    assert!(added.starts_with(message));
    assert_eq!(DecodedRequest::decode(call, added), Some(wanted(req, group)));
}

/// The same request with the added fields.
fn wanted(req: DecodedRequest, group: Option<&Group>) -> DecodedRequest {
    match req {
        DecodedRequest::Publish(mut req) => {
            let place = PublishTarget::of(&req.target_path, &req.volume_context);
            assert!(place.is_none_or(|place| !place.pod_uid().is_empty()));
            assert_eq!(PublishTarget::of("", &HashMap::new()), None);
            req.defer_fs_ops = true;
            if let Some(group) = group {
                let capability = req.volume_capability.get_or_insert_default();
                let mut mount = match capability.access_type.take() {
                    Some(AccessType::Mount(mount)) => mount,
                    // The proxy adds no group to a raw block volume.
                    Some(AccessType::Block(_)) | None => MountVolume::default(),
                };
                mount.volume_supplemental_group.clone_from(&group.id);
                if let Some(policy) = &group.policy {
                    mount.volume_supplemental_group_change_policy.clone_from(policy);
                }
                capability.access_type = Some(AccessType::Mount(mount));
            }
            DecodedRequest::Publish(req)
        }
        DecodedRequest::Unpublish(req) => {
            DecodedRequest::Unpublish(csi::NodeUnpublishVolumeRequest { defer_fs_ops: true, ..req })
        }
        DecodedRequest::Stats(req) => {
            DecodedRequest::Stats(csi::NodeGetVolumeStatsRequest { defer_fs_ops: true, ..req })
        }
        DecodedRequest::Expand(mut req) => {
            req.defer_fs_ops = true;
            DecodedRequest::Expand(req)
        }
    }
}
