//! Messages off the wire: what protobuf takes is checked before it reaches the backend, and what passes
//! is what the backend may rely on.
#![no_main]

use csi_loopback::backend::{Access, Capability, Error};
use csi_loopback::fuzzing::{self, Describe, Subject};
use csi_loopback::proto::csi::v1 as csi;
use libfuzzer_sys::fuzz_target;
use prost::Message;

fuzz_target!(|input: &[u8]| {
    let Some((kind, bytes)) = input.split_first() else { return };
    let result = match kind % 8 {
        0 => decoded(bytes, create_volume),
        1 => decoded(bytes, |asked: &csi::NodeStageVolumeRequest| {
            fuzzing::id("volume_id", &asked.volume_id)?;
            fuzzing::path("staging_target_path", &asked.staging_target_path)?;
            fuzzing::volume_context(&asked.volume_context)?;
            check(&fuzzing::capability(asked.volume_capability.as_ref())?);
            Ok(())
        }),
        2 => decoded(bytes, |asked: &csi::NodePublishVolumeRequest| {
            fuzzing::path("target_path", &asked.target_path)?;
            fuzzing::keys("publish_context", &asked.publish_context, &[])?;
            check(&fuzzing::capability(asked.volume_capability.as_ref())?);
            Ok(())
        }),
        3 => decoded(bytes, |asked: &csi::CreateVolumeGroupSnapshotRequest| {
            let ids = fuzzing::group_members(&asked.source_volume_ids)?;
            let unique: std::collections::HashSet<_> = ids.iter().collect();
            assert!(!ids.is_empty() && unique.len() == ids.len());
            Ok(())
        }),
        4 => decoded(bytes, |asked: &csi::GetMetadataDeltaRequest| {
            fuzzing::window(asked.starting_offset, asked.max_results).map(drop)
        }),
        5 => decoded(bytes, |asked: &csi::ControllerExpandVolumeRequest| {
            fuzzing::capacity_range(asked.capacity_range.as_ref()).map(drop)
        }),
        6 => decoded(bytes, |asked: &csi::ListSnapshotsRequest| {
            let max = fuzzing::max_entries(asked.max_entries)?;
            assert!((1..=4096).contains(&fuzzing::page_size(max)));
            Ok(())
        }),
        _ => decoded(bytes, |asked: &csi::ControllerModifyVolumeRequest| {
            fuzzing::change_tracking("mutable_parameters", &asked.mutable_parameters).map(drop)
        }),
    };
    match result {
        Ok(()) | Err(Error::Invalid { .. } | Error::OutOfRange(_) | Error::Exhausted(_)) => {}
        Err(other) => panic!("{other:?}"),
    }
});

/// What does not decode, tonic refuses. The log sees a message before it was checked.
fn decoded<M: Message + Default + Describe>(
    bytes: &[u8],
    check: impl FnOnce(&M) -> Result<(), Error>,
) -> Result<(), Error> {
    let Ok(message) = M::decode(bytes) else { return Ok(()) };
    message.describe(&mut Subject::default());
    check(&message)
}

fn create_volume(asked: &csi::CreateVolumeRequest) -> Result<(), Error> {
    let wanted = fuzzing::wanted_volume(asked)?;
    let request = &wanted.request;
    assert!((1..=128).contains(&wanted.name.len()));
    assert!(request.limit_bytes == 0 || request.limit_bytes >= request.required_bytes);
    // Neither is more than the wire can say of a volume that exists.
    assert!(i64::try_from(request.required_bytes.max(request.limit_bytes)).is_ok());
    Ok(())
}

fn check(capability: &Capability) {
    if let Access::Mount { flags, group, .. } = &capability.access {
        assert!(flags.iter().all(|flag| !flag.is_empty() && !flag.contains('\0')));
        assert!(*group != Some(u32::MAX));
    }
}
