//! Validation of requests before they reach the backend. Each check returns the value in the
//! backend's types, or `Error::Invalid` with the field. Ids are only checked for size: an id that
//! cannot exist is reported as not found. Errors never repeat values that may be sensitive (mount
//! flags, parameters, secrets); they do repeat the names of keys.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use common::text::truncate;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessType, MountVolume};
use grpc::proto::csi::v1 as csi;
use storage::{
    Access, AccessMode, Capability, Deferral, Error, FsType, GroupPolicy, ModifyVolume, Precision,
    Result, SectorSize,
};

/// Maximum bytes of most strings (CSI "Size limits").
const MAX_STRING: usize = 128;
/// Maximum total bytes of the mount flags (CSI "Size limits").
const MAX_MOUNT_FLAGS: usize = 4096;
/// Linux PATH_MAX without the terminating zero, in bytes.
const MAX_PATH: usize = 4095;
/// Maximum bytes of a client's key in an error.
const MAX_SHOWN: usize = 128;
/// Maximum entries in a page of a list: the message stays below gRPC's limit of 4 MiB.
pub const MAX_ENTRIES: usize = 4096;
/// Prefixes of keys that Kubernetes components add.
const KUBERNETES_PREFIXES: [&str; 2] = ["csi.storage.k8s.io/", "storage.kubernetes.io/"];
/// Marks an inline volume, which belongs to one pod (KEP-596).
const EPHEMERAL_KEY: &str = "csi.storage.k8s.io/ephemeral";
/// The driver's parameters, which may be immutable or mutable.
const CHANGE_TRACKING: &str = "changeTracking";
const CHANGE_PRECISION: &str = "changePrecision";
/// An immutable parameter. It is part of the context of volumes that have it.
pub const SECTOR_SIZE: &str = "sectorSize";

/// A required id.
pub fn id<'a>(field: &'static str, value: &'a str) -> Result<&'a str> {
    if value.is_empty() {
        return Err(Error::invalid(field, "is required"));
    }
    optional_id(field, value)
}

/// An id that may be empty.
pub fn optional_id<'a>(field: &'static str, value: &'a str) -> Result<&'a str> {
    if value.len() > MAX_STRING {
        return Err(Error::invalid(field, format!("has more than {MAX_STRING} bytes")));
    }
    Ok(value)
}

/// A required name, chosen by the client.
pub fn name(value: &str) -> Result<&str> {
    let value = id("name", value)?;
    if value.chars().any(char::is_control) {
        return Err(Error::invalid("name", "has control characters"));
    }
    Ok(value)
}

/// A required absolute path.
pub fn path(field: &'static str, value: &str) -> Result<PathBuf> {
    if value.is_empty() {
        return Err(Error::invalid(field, "is required"));
    }
    if value.len() > MAX_PATH || value.contains('\0') {
        return Err(Error::invalid(field, format!("is not a path of at most {MAX_PATH} bytes")));
    }
    let path = Path::new(value);
    if !path.is_absolute() || path.components().any(|part| part == Component::ParentDir) {
        return Err(Error::invalid(field, "is not an absolute path without \"..\""));
    }
    Ok(path.to_owned())
}

/// A required path of a volume. Any value is accepted: a path that does not exist is reported as
/// not found.
pub fn volume_path(field: &'static str, value: &str) -> Result<PathBuf> {
    if value.is_empty() {
        return Err(Error::invalid(field, "is required"));
    }
    Ok(PathBuf::from(value))
}

/// Bounds of a capacity range in bytes; 0 means no bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Range {
    pub required: u64,
    pub limit: u64,
}

pub fn capacity_range(range: Option<&csi::CapacityRange>) -> Result<Range> {
    let Some(range) = range else { return Ok(Range::default()) };
    let bytes =
        |field, value: i64| u64::try_from(value).map_err(|_| Error::invalid(field, "is negative"));
    let required = bytes("capacity_range.required_bytes", range.required_bytes)?;
    let limit = bytes("capacity_range.limit_bytes", range.limit_bytes)?;
    if limit != 0 && limit < required {
        return Err(Error::invalid("capacity_range.limit_bytes", "is less than required_bytes"));
    }
    Ok(Range { required, limit })
}

/// `max_entries` of a list request; 0 means no limit.
pub fn max_entries(value: i32) -> Result<usize> {
    usize::try_from(value).map_err(|_| Error::invalid("max_entries", "is negative"))
}

/// Maximum entries of a page. CSI allows a plugin to return fewer than requested, with a token for
/// the rest.
pub fn page(max_entries: usize) -> usize {
    match max_entries {
        0 => MAX_ENTRIES,
        requested => requested.min(MAX_ENTRIES),
    }
}

pub fn token(starting_token: &str) -> Option<&str> {
    (!starting_token.is_empty()).then_some(starting_token)
}

/// Why a capability is refused. CSI distinguishes the two cases in calls that only query support.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The request is malformed.
    Malformed { field: &'static str, reason: String },
    /// The request is valid, but this driver does not support it.
    Unsupported { field: &'static str, reason: String },
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Malformed { field, reason } | Refusal::Unsupported { field, reason } => {
                Self::Invalid { field, reason }
            }
        }
    }
}

/// A required capability; `field` is its field in the request.
pub fn capability(
    field: &'static str,
    capability: Option<&csi::VolumeCapability>,
) -> Result<Capability, Refusal> {
    let malformed = |reason: &str| Refusal::Malformed { field, reason: reason.into() };
    let capability = capability.ok_or_else(|| malformed("is required"))?;
    let mode = access_mode(field, capability.access_mode.as_ref())?;
    match &capability.access_type {
        None => Err(malformed("access_type is required: block or mount")),
        Some(AccessType::Block(_)) => Ok(Capability { access: Access::Block, mode }),
        Some(AccessType::Mount(wire)) => Ok(Capability { access: mount(field, wire)?, mode }),
    }
}

fn access_mode(
    field: &'static str,
    mode: Option<&csi::volume_capability::AccessMode>,
) -> Result<AccessMode, Refusal> {
    let refused = |name: &str| Refusal::Unsupported {
        field,
        reason: format!(
            "access_mode {name} is not supported: a volume is on one node; use a SINGLE_NODE mode or MULTI_NODE_READER_ONLY"
        ),
    };
    let number = mode.map_or(0, |mode| mode.mode);
    match Mode::try_from(number) {
        Ok(Mode::Unknown) => {
            Err(Refusal::Malformed { field, reason: "access_mode.mode is required".into() })
        }
        Ok(Mode::SingleNodeWriter) => Ok(AccessMode::SingleNodeWriter),
        Ok(Mode::SingleNodeReaderOnly) => Ok(AccessMode::SingleNodeReaderOnly),
        Ok(Mode::SingleNodeSingleWriter) => Ok(AccessMode::SingleNodeSingleWriter),
        Ok(Mode::SingleNodeMultiWriter) => Ok(AccessMode::SingleNodeMultiWriter),
        Ok(Mode::MultiNodeReaderOnly) => Ok(AccessMode::MultiNodeReaderOnly),
        Ok(other) => Err(refused(other.as_str_name())),
        Err(_) => Err(refused(&number.to_string())),
    }
}

fn mount(field: &'static str, wire: &MountVolume) -> Result<Access, Refusal> {
    let malformed = |reason: &str| Refusal::Malformed { field, reason: reason.into() };
    let unsupported = |_| Refusal::Unsupported {
        field,
        reason: format!(
            "fs_type {:?} is not supported; use ext4, xfs or btrfs",
            truncate(&wire.fs_type, MAX_SHOWN)
        ),
    };
    let fs_type = match wire.fs_type.as_str() {
        "" => None,
        name => Some(name.parse().map_err(unsupported)?),
    };
    let flags = &wire.mount_flags;
    if flags.iter().any(|flag| flag.is_empty() || flag.contains('\0')) {
        return Err(malformed("mount_flags has an empty flag or a NUL byte"));
    }
    if flags.iter().map(String::len).sum::<usize>() > MAX_MOUNT_FLAGS {
        return Err(malformed("mount_flags has more than 4 KiB"));
    }
    let group = group(field, "volume_mount_group", &wire.volume_mount_group)?;
    // Checked only for validity: NodePublishVolume decides whether the group is allowed.
    supplemental_group(field, wire)?;
    Ok(Access::Mount { fs_type, flags: flags.clone(), group })
}

/// The supplemental group of a capability and its change policy; `field` is the field of the
/// capability in the request.
pub fn supplemental_group(
    field: &'static str,
    mount: &MountVolume,
) -> Result<Option<Deferral>, Refusal> {
    let malformed = |reason: &str| Err(Refusal::Malformed { field, reason: reason.into() });
    let policy = match mount.volume_supplemental_group_change_policy.as_str() {
        "" => None,
        "Always" => Some(GroupPolicy::Always),
        "OnRootMismatch" => Some(GroupPolicy::OnRootMismatch),
        _ => {
            return malformed(
                "volume_supplemental_group_change_policy is neither Always nor OnRootMismatch",
            );
        }
    };
    let text = &mount.volume_supplemental_group;
    let Some(id) = group(field, "volume_supplemental_group", text)? else {
        return match policy {
            None => Ok(None),
            Some(_) => malformed(
                "volume_supplemental_group_change_policy requires volume_supplemental_group",
            ),
        };
    };
    match group(field, "volume_mount_group", &mount.volume_mount_group)? {
        Some(other) if other != id => malformed(
            "volume_supplemental_group and volume_mount_group differ; both are the group of the pod",
        ),
        _ => Ok(Some(Deferral { group: Some(id), policy })),
    }
}

/// A group id, or `None` for an empty text. `name` is the field within the capability.
pub fn group(field: &'static str, name: &str, text: &str) -> Result<Option<u32>, Refusal> {
    if text.is_empty() {
        return Ok(None);
    }
    // To the kernel, the largest number means "keep the group".
    match text.parse::<u32>() {
        Ok(id) if id != u32::MAX && text.bytes().all(|byte| byte.is_ascii_digit()) => Ok(Some(id)),
        _ => Err(Refusal::Malformed { field, reason: format!("{name} is not a decimal group id") }),
    }
}

/// The required capabilities of a volume; the volume must satisfy all of them.
pub fn capabilities(wire: &[csi::VolumeCapability]) -> Result<Vec<Capability>, Refusal> {
    const FIELD: &str = "volume_capabilities";
    if wire.is_empty() {
        return Err(Refusal::Malformed { field: FIELD, reason: "is required".into() });
    }
    wire.iter().map(|one| capability(FIELD, Some(one))).collect()
}

/// The filesystem that a capability names, if any.
pub fn named_filesystem(capability: &Capability) -> Option<FsType> {
    match capability.access {
        Access::Block => None,
        Access::Mount { fs_type, .. } => fs_type,
    }
}

/// The filesystem that satisfies all capabilities: ext4 if none is named, `None` if no capability
/// mounts.
pub fn common_filesystem(capabilities: &[Capability]) -> Result<Option<FsType>, Refusal> {
    let mut named = capabilities.iter().filter_map(named_filesystem);
    let first = named.next();
    if named.any(|other| Some(other) != first) {
        return Err(Refusal::Unsupported {
            field: "volume_capabilities",
            reason: "name more than one fs_type; a volume has one filesystem".into(),
        });
    }
    let mounts = capabilities.iter().any(|one| matches!(one.access, Access::Mount { .. }));
    Ok(first.or_else(|| mounts.then_some(FsType::Ext4)))
}

/// Whether Kubernetes components add keys of this kind.
pub fn is_kubernetes_key(key: &str) -> bool {
    KUBERNETES_PREFIXES.iter().any(|prefix| key.starts_with(prefix))
}

/// Rejects every key that is neither in `known` nor added by Kubernetes.
pub fn keys(field: &'static str, map: &HashMap<String, String>, known: &[&str]) -> Result<()> {
    let expected = |key: &str| known.contains(&key) || is_kubernetes_key(key);
    // The first in order, so that the error is deterministic.
    match map.keys().filter(|key| !expected(key)).min() {
        None => Ok(()),
        Some(key) => {
            let shown = truncate(key, MAX_SHOWN);
            Err(Error::invalid(field, format!("unknown key {shown:?}")))
        }
    }
}

/// Whether a node call concerns an inline volume.
pub fn is_inline(context: &HashMap<String, String>) -> Result<bool> {
    Ok(boolean("volume_context", context, EPHEMERAL_KEY)?.unwrap_or_default())
}

/// Checks the context of a node call for a persistent volume.
pub fn volume_context(context: &HashMap<String, String>) -> Result<()> {
    if is_inline(context)? {
        return Err(Error::invalid(
            "volume_context",
            format!("{EPHEMERAL_KEY}: an inline volume must not be staged; publish it"),
        ));
    }
    keys("volume_context", context, &[SECTOR_SIZE])
}

/// The change tracking settings and the sector size in the parameters. Checks all keys.
pub fn parameters(map: &HashMap<String, String>) -> Result<(ModifyVolume, Option<SectorSize>)> {
    let sector = map.get(SECTOR_SIZE).map(|text| {
        text.parse()
            .map_err(|reason| Error::invalid("parameters", format!("{SECTOR_SIZE} {reason}")))
    });
    keys("parameters", map, &[CHANGE_TRACKING, CHANGE_PRECISION, SECTOR_SIZE])?;
    Ok((tracking("parameters", map)?, sector.transpose()?))
}

/// The change tracking settings in the mutable parameters. Checks all keys.
pub fn mutable_parameters(map: &HashMap<String, String>) -> Result<ModifyVolume> {
    keys("mutable_parameters", map, &[CHANGE_TRACKING, CHANGE_PRECISION])?;
    tracking("mutable_parameters", map)
}

fn tracking(field: &'static str, map: &HashMap<String, String>) -> Result<ModifyVolume> {
    Ok(ModifyVolume {
        change_tracking: boolean(field, map, CHANGE_TRACKING)?,
        change_precision: match map.get(CHANGE_PRECISION).map(String::as_str) {
            None => None,
            Some("exact") => Some(Precision::Exact),
            Some("block") => Some(Precision::Block),
            Some(_) => {
                let message = format!("{CHANGE_PRECISION} is neither exact nor block");
                return Err(Error::invalid(field, message));
            }
        },
    })
}

/// The boolean value of `key`, if present.
fn boolean(
    field: &'static str,
    map: &HashMap<String, String>,
    key: &'static str,
) -> Result<Option<bool>> {
    match map.get(key).map(String::as_str) {
        None => Ok(None),
        Some("true") => Ok(Some(true)),
        Some("false") => Ok(Some(false)),
        Some(_) => Err(Error::invalid(field, format!("{key} is neither true nor false"))),
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
