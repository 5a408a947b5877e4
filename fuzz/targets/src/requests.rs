//! Messages from the wire: a decodable message is validated before it reaches the backend, and a
//! valid message satisfies what the backend relies on.

use csi_loopback::backend::{Access, AccessMode, Capability, Deferral, Error};
use csi_loopback::fuzzing::{self, Describe, Subject};
use csi_loopback::proto::csi::v1 as csi;
use prost::Message;

pub fn requests(input: &[u8]) {
    let Some((kind, bytes)) = input.split_first() else { return };
    let result = match kind % 8 {
        0 => decoded(bytes, create_volume),
        1 => decoded(bytes, |req: &csi::NodeStageVolumeRequest| {
            fuzzing::id("volume_id", &req.volume_id)?;
            fuzzing::path("staging_target_path", &req.staging_target_path)?;
            fuzzing::volume_context(&req.volume_context)?;
            check(&fuzzing::capability(req.volume_capability.as_ref())?);
            Ok(())
        }),
        2 => decoded(bytes, |req: &csi::NodePublishVolumeRequest| {
            fuzzing::path("target_path", &req.target_path)?;
            fuzzing::keys("publish_context", &req.publish_context, &[])?;
            if fuzzing::is_inline(&req.volume_context)? {
                return inline_volume(req);
            }
            fuzzing::volume_context(&req.volume_context)?;
            let capability = fuzzing::capability(req.volume_capability.as_ref())?;
            check(&capability);
            check_deferral(req, &capability, fuzzing::deferral(req, &capability)?);
            Ok(())
        }),
        3 => decoded(bytes, |req: &csi::CreateVolumeGroupSnapshotRequest| {
            let ids = fuzzing::group_members(&req.source_volume_ids)?;
            let unique: std::collections::HashSet<_> = ids.iter().collect();
            assert!(!ids.is_empty() && unique.len() == ids.len());
            Ok(())
        }),
        4 => decoded(bytes, |req: &csi::GetMetadataDeltaRequest| {
            fuzzing::part(req.starting_offset, req.max_results).map(drop)
        }),
        5 => decoded(bytes, |req: &csi::ControllerExpandVolumeRequest| {
            fuzzing::capacity_range(req.capacity_range.as_ref()).map(drop)
        }),
        6 => decoded(bytes, |req: &csi::ListSnapshotsRequest| {
            let max = fuzzing::max_entries(req.max_entries)?;
            assert!((1..=4096).contains(&fuzzing::page_size(max)));
            Ok(())
        }),
        _ => decoded(bytes, |req: &csi::ControllerModifyVolumeRequest| {
            fuzzing::mutable_parameters(&req.mutable_parameters).map(drop)
        }),
    };
    match result {
        Ok(()) | Err(Error::Invalid { .. } | Error::OutOfRange(_) | Error::Exhausted(_)) => {}
        Err(other) => panic!("{other:?}"),
    }
}

/// tonic refuses undecodable messages. The log receives a message before validation.
fn decoded<M: Message + Default + Describe>(
    bytes: &[u8],
    check: impl FnOnce(&M) -> Result<(), Error>,
) -> Result<(), Error> {
    let Ok(message) = M::decode(bytes) else { return Ok(()) };
    message.describe(&mut Subject::default());
    check(&message)
}

fn create_volume(req: &csi::CreateVolumeRequest) -> Result<(), Error> {
    let args = fuzzing::create_volume_args(req)?;
    let request = &args.request;
    assert!((1..=128).contains(&args.name.len()));
    assert!(request.limit_bytes == 0 || request.limit_bytes >= request.required_bytes);
    // Both fit the wire's type for the capacity of an existing volume.
    assert!(i64::try_from(request.required_bytes.max(request.limit_bytes)).is_ok());
    Ok(())
}

/// An inline volume: anyone who may create pods controls attributes and secrets.
fn inline_volume(req: &csi::NodePublishVolumeRequest) -> Result<(), Error> {
    let (request, content) = fuzzing::inline_request(req).inspect_err(|error| {
        let message = error.to_string();
        assert!(message.len() < 2000, "{message}");
        assert!(!repeats_a_value(req, &message), "{message}");
    })?;
    check(&request.capability);
    assert!(matches!(request.capability.access, Access::Mount { .. }));
    assert!(request.size_bytes != Some(0));
    // The driver writes neither to a volume that the pod may have prepared nor to one that is
    // read-only.
    assert!(!request.read_only_content || req.readonly);
    assert!(content.is_empty() || !request.is_read_only());
    // Content is never stored in the pool or passed to a runtime.
    assert!(content.is_empty() || request.in_memory);
    assert!(req.secrets.is_empty() || request.in_memory);
    // Only the runtime writes to a deferred volume, and it gets no secret.
    assert!(request.deferred.is_none() || (content.is_empty() && !request.read_only_content));
    assert_eq!(request.deferred.is_some(), req.defer_fs_ops);
    Ok(())
}

/// A request for deferral gets that or an error, and no other request is deferred.
fn check_deferral(
    req: &csi::NodePublishVolumeRequest,
    capability: &Capability,
    deferral_result: Option<Deferral>,
) {
    let Access::Mount { group, .. } = &capability.access else {
        return assert!(deferral_result.is_none() && !req.defer_fs_ops);
    };
    assert_eq!(deferral_result.is_some(), req.defer_fs_ops);
    let Some(deferral) = deferral_result else { return };
    assert!(req.secrets.is_empty());
    assert!(group.is_none() || deferral.group == *group);
    assert!(deferral.policy.is_none() || deferral.group.is_some());
    let one_writer = capability.mode == AccessMode::SingleNodeSingleWriter;
    assert!(one_writer || req.readonly || capability.is_read_only());
}

/// Whether a message repeats a value that it cannot have from elsewhere. Keys and sizes may be
/// repeated. Short values, and some longer ones, may occur in the message's own text: for those,
/// the message is compared with that for another value.
fn repeats_a_value(req: &csi::NodePublishVolumeRequest, message: &str) -> bool {
    let known: Vec<&str> = req
        .volume_context
        .keys()
        .chain(req.secrets.keys())
        .chain(req.volume_context.get("size"))
        .map(String::as_str)
        .collect();
    let is_repeated = |message: &str, value: &str| {
        value.len() >= 16
            && message.contains(value)
            && !known.iter().any(|text| text.contains(value))
    };
    let attributes = req.volume_context.iter().filter(|(key, _)| *key != "size");
    attributes.chain(&req.secrets).filter(|(_, value)| is_repeated(message, value)).any(
        |(key, value)| {
            let other = "x".repeat(value.len());
            let mut changed = req.clone();
            for values in [&mut changed.volume_context, &mut changed.secrets] {
                if values.get(key) == Some(value) {
                    values.insert(key.clone(), other.clone());
                }
            }
            let message = fuzzing::inline_request(&changed).err().map(|error| error.to_string());
            message.is_some_and(|message| is_repeated(&message, &other))
        },
    )
}

fn check(capability: &Capability) {
    if let Access::Mount { flags, group, .. } = &capability.access {
        assert!(flags.iter().all(|flag| !flag.is_empty() && !flag.contains('\0')));
        assert!(*group != Some(u32::MAX));
    }
}
