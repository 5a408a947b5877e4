//! What is asked, checked: nothing unchecked gets to a file or to a program.

use super::refusal::{Refusal, Result};
use crate::crust::{GroupChangePolicy, MountInfo, Target, check, group_id};
use crate::proto::crust as api;
use api::volume_group_change_policy::Policy;
use api::volume_type::Type;

const GROUP: &str = "volume_supplemental_group";
const POLICY: &str = "volume_supplemental_group_change_policy";

/// The path that names a volume.
pub fn target(path: &str) -> Result<Target> {
    let target = Target::new("volume_target_path", path).map_err(Refusal::of_request)?;
    // It is handed to programs and to logs.
    if path.chars().any(char::is_control) {
        return Err(Refusal::invalid("volume_target_path", "has a control character"));
    }
    Ok(target)
}

/// What is to be mounted.
pub fn mount_info(asked: &api::RuntimeStageVolumeRequest) -> Result<MountInfo> {
    let kind = asked.volume_type.unwrap_or_default();
    if Type::try_from(kind.r#type) != Ok(Type::Block) {
        let reason = "only BLOCK can be left to a runtime: other volumes need a secret to be mounted, or are unknown";
        return Err(Refusal::invalid("volume_type", reason));
    }
    let device = check::block_device("volume_backing_path", &asked.volume_backing_path)
        .map_err(Refusal::of_request)?;
    let device = device.into_os_string().into_string();
    let device = device.map_err(|_| Refusal::invalid("volume_backing_path", "is not UTF-8"))?;
    check::fs_type("fs_type", &asked.fs_type).map_err(Refusal::of_request)?;
    let options = check::options("mount_flags", &asked.mount_flags).map_err(Refusal::of_request)?;
    let info = MountInfo::new(device, asked.fs_type.clone(), options);
    let policy = policy(asked.volume_supplemental_group_change_policy)?;
    match (asked.volume_supplemental_group.as_str(), policy) {
        ("", None) => Ok(info),
        ("", Some(_)) => Err(Refusal::invalid(POLICY, format!("goes with a {GROUP} only"))),
        (group, policy) => {
            Ok(info.with_group(group_id(GROUP, group).map_err(Refusal::of_request)?, policy))
        }
    }
}

fn policy(asked: Option<api::VolumeGroupChangePolicy>) -> Result<Option<GroupChangePolicy>> {
    match asked.map(|asked| Policy::try_from(asked.policy)) {
        None | Some(Ok(Policy::Unknown)) => Ok(None),
        Some(Ok(Policy::Always)) => Ok(Some(GroupChangePolicy::Always)),
        Some(Ok(Policy::OnRootMismatch)) => Ok(Some(GroupChangePolicy::OnRootMismatch)),
        Some(Err(_)) => Err(Refusal::invalid(POLICY, "is no policy that is known here")),
    }
}

/// How large a volume may be, in bytes; 0: no bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Range {
    pub required: u64,
    pub limit: u64,
}

pub fn range(asked: Option<api::CapacityRange>) -> Result<Range> {
    let asked = asked.unwrap_or_default();
    let bytes = |field, number: i64| {
        u64::try_from(number).map_err(|_| Refusal::invalid(field, "is negative"))
    };
    let required = bytes("capacity_range.required_bytes", asked.required_bytes)?;
    let limit = bytes("capacity_range.limit_bytes", asked.limit_bytes)?;
    if limit != 0 && limit < required {
        return Err(Refusal::invalid("capacity_range.limit_bytes", "is less than required_bytes"));
    }
    Ok(Range { required, limit })
}
