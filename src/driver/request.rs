//! Checks of what clients send, before any of it reaches the backend. Each check returns the value in
//! the backend's types or `Error::Invalid`, which names the field. Ids are only checked for size: one
//! that cannot exist is simply not found. Values that may be sensitive (mount flags, parameters,
//! secrets) are never repeated in an error; names of keys are.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use super::deferral;
use crate::backend::{
    Access, AccessMode, Capability, Error, FsType, ModifyVolume, Precision, Result,
};
use crate::grpc::cut;
use crate::inline::{DEFER_BY_ANNOTATION, REMOVED_DEFER_FS_MOUNT};
use crate::proto::csi::v1 as csi;
use csi::volume_capability::AccessType;
use csi::volume_capability::access_mode::Mode;

/// CSI "Size limits": most strings have at most so many bytes.
const MAX_STRING: usize = 128;
/// CSI "Size limits": the mount flags have at most so many bytes together.
const MAX_MOUNT_FLAGS: usize = 4096;
/// Linux PATH_MAX without the terminating zero, in bytes.
const MAX_PATH: usize = 4095;
/// Bytes of a client's key that an error repeats.
const MAX_SHOWN: usize = 128;
/// Keys that Kubernetes components add by themselves.
const KUBERNETES_PREFIXES: [&str; 2] = ["csi.storage.k8s.io/", "storage.kubernetes.io/"];
/// Says that a volume is made for one pod (KEP-596).
const EPHEMERAL_KEY: &str = "csi.storage.k8s.io/ephemeral";
/// The parameters of this driver that are both immutable and mutable.
const CHANGE_TRACKING: &str = "changeTracking";
const CHANGE_PRECISION: &str = "changePrecision";

/// A required id of something that exists.
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

/// A required path at which something may be: whatever it looks like, what is not there is not found.
pub fn place(field: &'static str, value: &str) -> Result<PathBuf> {
    if value.is_empty() {
        return Err(Error::invalid(field, "is required"));
    }
    Ok(PathBuf::from(value))
}

/// Both ends of a capacity range in bytes, 0 for an end that is not given.
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

/// `max_entries` of a list: 0 for no limit.
pub fn max_entries(value: i32) -> Result<usize> {
    usize::try_from(value).map_err(|_| Error::invalid("max_entries", "is negative"))
}

/// Why a capability is not accepted. CSI tells the two apart where a client only asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The message is wrong.
    Malformed { field: &'static str, reason: String },
    /// The message is right, but this driver does not do that.
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

/// A required capability; `field` is where the message has it.
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
        Some(AccessType::Mount(wanted)) => Ok(Capability { access: mount(field, wanted)?, mode }),
    }
}

fn access_mode(
    field: &'static str,
    mode: Option<&csi::volume_capability::AccessMode>,
) -> Result<AccessMode, Refusal> {
    let refused = |name: &str| Refusal::Unsupported {
        field,
        reason: format!(
            "access_mode {name} is not supported: a volume is used on one node; use a SINGLE_NODE mode, or MULTI_NODE_READER_ONLY"
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

fn mount(
    field: &'static str,
    wanted: &csi::volume_capability::MountVolume,
) -> Result<Access, Refusal> {
    let malformed = |reason: &str| Refusal::Malformed { field, reason: reason.into() };
    let unsupported = |_| Refusal::Unsupported {
        field,
        reason: format!(
            "fs_type {:?} is not supported; use ext4, xfs or btrfs",
            cut(&wanted.fs_type, MAX_SHOWN)
        ),
    };
    let fs_type = match wanted.fs_type.as_str() {
        "" => None,
        name => Some(name.parse().map_err(unsupported)?),
    };
    let flags = &wanted.mount_flags;
    if flags.iter().any(|flag| flag.is_empty() || flag.contains('\0')) {
        return Err(malformed("mount_flags has an empty flag or a zero byte"));
    }
    if flags.iter().map(String::len).sum::<usize>() > MAX_MOUNT_FLAGS {
        return Err(malformed("mount_flags has more than 4 KiB"));
    }
    let group = group(field, "volume_mount_group", &wanted.volume_mount_group)?;
    // Whether it may be there is for the call to say that publishes.
    deferral::supplemental_group(field, wanted)?;
    Ok(Access::Mount { fs_type, flags: flags.clone(), group })
}

/// A group id, if there is one. `name` is what the capability calls it.
pub fn group(field: &'static str, name: &str, text: &str) -> Result<Option<u32>, Refusal> {
    if text.is_empty() {
        return Ok(None);
    }
    // The largest number means "leave the group as it is" to the kernel.
    match text.parse::<u32>() {
        Ok(id) if id != u32::MAX && text.bytes().all(|byte| byte.is_ascii_digit()) => Ok(Some(id)),
        _ => Err(Refusal::Malformed {
            field,
            reason: format!("{name} is not a group id in decimal"),
        }),
    }
}

/// The required capabilities of a volume that is to satisfy all of them.
pub fn capabilities(wanted: &[csi::VolumeCapability]) -> Result<Vec<Capability>, Refusal> {
    const FIELD: &str = "volume_capabilities";
    if wanted.is_empty() {
        return Err(Refusal::Malformed { field: FIELD, reason: "is required".into() });
    }
    wanted.iter().map(|one| capability(FIELD, Some(one))).collect()
}

/// The filesystem that a capability names, if it does.
pub fn named_filesystem(capability: &Capability) -> Option<FsType> {
    match capability.access {
        Access::Block => None,
        Access::Mount { fs_type, .. } => fs_type,
    }
}

/// The filesystem that satisfies all of them, ext4 where none is named: `None` when none is to be
/// mounted.
pub fn common_filesystem(wanted: &[Capability]) -> Result<Option<FsType>, Refusal> {
    let mut named = wanted.iter().filter_map(named_filesystem);
    let first = named.next();
    if named.any(|other| Some(other) != first) {
        return Err(Refusal::Unsupported {
            field: "volume_capabilities",
            reason: "ask for more than one fs_type; a volume has one filesystem".into(),
        });
    }
    let mounts = wanted.iter().any(|one| matches!(one.access, Access::Mount { .. }));
    Ok(first.or_else(|| mounts.then_some(FsType::Ext4)))
}

/// Whether a component of Kubernetes has added this key.
pub fn is_kubernetes_key(key: &str) -> bool {
    KUBERNETES_PREFIXES.iter().any(|prefix| key.starts_with(prefix))
}

/// Refuses every key that is not `known` and not one of those that Kubernetes adds.
pub fn keys(field: &'static str, map: &HashMap<String, String>, known: &[&str]) -> Result<()> {
    let expected = |key: &str| known.contains(&key) || is_kubernetes_key(key);
    // The first in order, so that the answer is the same each time.
    match map.keys().filter(|key| !expected(key)).min() {
        None => Ok(()),
        Some(key) if key == REMOVED_DEFER_FS_MOUNT => {
            Err(Error::invalid(field, format!("{key} {DEFER_BY_ANNOTATION}")))
        }
        Some(key) => {
            let shown = cut(key, MAX_SHOWN);
            Err(Error::invalid(field, format!("unknown key {shown:?}")))
        }
    }
}

/// Whether the volume of a node call is a pod's own.
pub fn is_inline(context: &HashMap<String, String>) -> Result<bool> {
    Ok(boolean("volume_context", context, EPHEMERAL_KEY)?.unwrap_or_default())
}

/// Checks the context of a node call for a persistent volume. Returns whether an earlier version created the volume to be mounted by
/// container runtimes only: a PersistentVolume keeps what its StorageClass said then.
pub fn volume_context(context: &HashMap<String, String>) -> Result<bool> {
    if is_inline(context)? {
        return Err(Error::invalid(
            "volume_context",
            format!("{EPHEMERAL_KEY}: an inline volume is published without being staged"),
        ));
    }
    keys("volume_context", context, &[REMOVED_DEFER_FS_MOUNT])?;
    Ok(boolean("volume_context", context, REMOVED_DEFER_FS_MOUNT)?.unwrap_or_default())
}

/// How the volume is tracked, as far as the parameters say so. Checks all of their keys.
pub fn parameters(map: &HashMap<String, String>) -> Result<ModifyVolume> {
    tracking("parameters", map)
}

/// The same of the mutable parameters, which know the same keys.
pub fn mutable_parameters(map: &HashMap<String, String>) -> Result<ModifyVolume> {
    tracking("mutable_parameters", map)
}

fn tracking(field: &'static str, map: &HashMap<String, String>) -> Result<ModifyVolume> {
    keys(field, map, &[CHANGE_TRACKING, CHANGE_PRECISION])?;
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

/// What `map` says of `key`, if it does.
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
