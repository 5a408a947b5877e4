//! Messages off the wire: what protobuf takes is checked before it reaches the backend, and what passes
//! is what the backend may rely on.

use csi_loopback::backend::{Access, AccessMode, Capability, Deferral, Error};
use csi_loopback::fuzzing::{self, Describe, Subject};
use csi_loopback::proto::csi::v1 as csi;
use prost::Message;

pub fn requests(input: &[u8]) {
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
            if fuzzing::is_inline(&asked.volume_context)? {
                return inline_volume(asked);
            }
            fuzzing::volume_context(&asked.volume_context)?;
            let capability = fuzzing::capability(asked.volume_capability.as_ref())?;
            check(&capability);
            check_deferral(asked, &capability, fuzzing::deferral(asked, &capability)?);
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
            fuzzing::mutable_parameters(&asked.mutable_parameters).map(drop)
        }),
    };
    match result {
        Ok(()) | Err(Error::Invalid { .. } | Error::OutOfRange(_) | Error::Exhausted(_)) => {}
        Err(other) => panic!("{other:?}"),
    }
}

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

/// A pod's own volume: attributes and secrets are whoever's who may make pods.
fn inline_volume(asked: &csi::NodePublishVolumeRequest) -> Result<(), Error> {
    let (request, content) = fuzzing::wanted_inline(asked).inspect_err(|error| {
        let message = error.to_string();
        assert!(message.len() < 2000, "{message}");
        assert!(!repeats_a_value(asked, &message), "{message}");
    })?;
    check(&request.capability);
    assert!(matches!(request.capability.access, Access::Mount { .. }));
    assert!(request.size_bytes != Some(0));
    // The driver writes into no volume that the pod could have prepared, and none that it cannot write to.
    assert!(!request.read_only_content || asked.readonly);
    assert!(content.is_empty() || !request.is_read_only());
    // No file of the driver is ever in the pool, nor left to a runtime.
    assert!(content.is_empty() || request.in_memory);
    assert!(asked.secrets.is_empty() || request.in_memory);
    // What a runtime mounts nobody else has written to, and no secret comes near it.
    assert!(request.deferred.is_none() || (content.is_empty() && !request.read_only_content));
    assert_eq!(request.deferred.is_some(), asked.defer_fs_ops);
    Ok(())
}

/// Whoever asks for a mount by a runtime gets that or an error, and nobody else gets it.
fn check_deferral(
    asked: &csi::NodePublishVolumeRequest,
    capability: &Capability,
    wanted: Option<Deferral>,
) {
    let Access::Mount { group, .. } = &capability.access else {
        return assert!(wanted.is_none() && !asked.defer_fs_ops);
    };
    assert_eq!(wanted.is_some(), asked.defer_fs_ops);
    let Some(deferral) = wanted else { return };
    assert!(asked.secrets.is_empty());
    assert!(group.is_none() || deferral.group == *group);
    assert!(deferral.policy.is_none() || deferral.group.is_some());
    let one_writer = capability.mode == AccessMode::SingleNodeSingleWriter;
    assert!(one_writer || asked.readonly || capability.is_read_only());
}

/// Whether a message has a value in it that comes from nowhere else. Keys and sizes may be told, short values are in our
/// own words, and so may longer ones be: of those that are, another value in its place tells.
fn repeats_a_value(asked: &csi::NodePublishVolumeRequest, message: &str) -> bool {
    let known: Vec<&str> = asked
        .volume_context
        .keys()
        .chain(asked.secrets.keys())
        .chain(asked.volume_context.get("size"))
        .map(String::as_str)
        .collect();
    let is_told = |message: &str, value: &str| {
        value.len() >= 16
            && message.contains(value)
            && !known.iter().any(|text| text.contains(value))
    };
    let attributes = asked.volume_context.iter().filter(|(key, _)| *key != "size");
    attributes.chain(&asked.secrets).filter(|(_, value)| is_told(message, value)).any(
        |(key, value)| {
            let other = "x".repeat(value.len());
            let mut changed = asked.clone();
            for values in [&mut changed.volume_context, &mut changed.secrets] {
                if values.get(key) == Some(value) {
                    values.insert(key.clone(), other.clone());
                }
            }
            let message = fuzzing::wanted_inline(&changed).err().map(|error| error.to_string());
            message.is_some_and(|message| is_told(&message, &other))
        },
    )
}

fn check(capability: &Capability) {
    if let Access::Mount { flags, group, .. } = &capability.access {
        assert!(flags.iter().all(|flag| !flag.is_empty() && !flag.contains('\0')));
        assert!(*group != Some(u32::MAX));
    }
}
