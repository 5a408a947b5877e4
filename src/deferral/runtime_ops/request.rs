//! Validates requests: no unvalidated value reaches a file or a program.

use super::refusal::{Refusal, Result};
use crate::crust::{GroupChangePolicy, MountInfo, Target, check, group_id};
use api::volume_group_change_policy::Policy;
use api::volume_type::Type;
use grpc::proto::crust as api;

const GROUP: &str = "volume_supplemental_group";
const POLICY: &str = "volume_supplemental_group_change_policy";

/// Validates the target path, which names the volume.
pub fn target(path: &str) -> Result<Target> {
    let target = Target::new("volume_target_path", path).map_err(Refusal::of_request)?;
    // The path is passed to programs and logged.
    if path.chars().any(char::is_control) {
        return Err(Refusal::invalid("volume_target_path", "contains a control character"));
    }
    Ok(target)
}

/// Validates a stage request.
pub fn mount_info(request: &api::RuntimeStageVolumeRequest) -> Result<MountInfo> {
    let kind = request.volume_type.unwrap_or_default();
    if Type::try_from(kind.r#type) != Ok(Type::Block) {
        let reason = "only BLOCK volumes can be deferred: other types are unknown or need a secret for the mount";
        return Err(Refusal::invalid("volume_type", reason));
    }
    let device = check::block_device("volume_backing_path", &request.volume_backing_path)
        .map_err(Refusal::of_request)?;
    let device = device.into_os_string().into_string();
    let device = device.map_err(|_| Refusal::invalid("volume_backing_path", "is not UTF-8"))?;
    check::fs_type("fs_type", &request.fs_type).map_err(Refusal::of_request)?;
    let options =
        check::options("mount_flags", &request.mount_flags).map_err(Refusal::of_request)?;
    let info = MountInfo::new(device, request.fs_type.clone(), options);
    let policy = policy(request.volume_supplemental_group_change_policy)?;
    match (request.volume_supplemental_group.as_str(), policy) {
        ("", None) => Ok(info),
        ("", Some(_)) => Err(Refusal::invalid(POLICY, format!("requires {GROUP}"))),
        (group, policy) => {
            Ok(info.with_group(group_id(GROUP, group).map_err(Refusal::of_request)?, policy))
        }
    }
}

fn policy(request: Option<api::VolumeGroupChangePolicy>) -> Result<Option<GroupChangePolicy>> {
    match request.map(|request| Policy::try_from(request.policy)) {
        None | Some(Ok(Policy::Unknown)) => Ok(None),
        Some(Ok(Policy::Always)) => Ok(Some(GroupChangePolicy::Always)),
        Some(Ok(Policy::OnRootMismatch)) => Ok(Some(GroupChangePolicy::OnRootMismatch)),
        Some(Err(_)) => Err(Refusal::invalid(POLICY, "is not a known policy")),
    }
}

/// Required size and limit in bytes; 0 means unspecified.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Range {
    pub required: u64,
    pub limit: u64,
}

pub fn range(request: Option<api::CapacityRange>) -> Result<Range> {
    let request = request.unwrap_or_default();
    let bytes = |field, number: i64| {
        u64::try_from(number).map_err(|_| Refusal::invalid(field, "is negative"))
    };
    let required = bytes("capacity_range.required_bytes", request.required_bytes)?;
    let limit = bytes("capacity_range.limit_bytes", request.limit_bytes)?;
    if limit != 0 && limit < required {
        return Err(Refusal::invalid("capacity_range.limit_bytes", "is less than required_bytes"));
    }
    Ok(Range { required, limit })
}
