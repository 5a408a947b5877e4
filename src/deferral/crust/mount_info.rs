//! `mountInfo.json`: the data that a runtime needs to mount a volume. The keys are those of the
//! proposal's example, which are Kata's, and Kata's `options`.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{Problem, Result, check};

/// The only volume type.
const BLOCK: &str = "block";
/// Keys of `metadata`, named as in Kata.
const GROUP: &str = "fsGroup";
const GROUP_POLICY: &str = "fsGroupChangePolicy";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MountInfo {
    volume_type: String,
    /// Path of the block device.
    pub device: String,
    #[serde(rename = "fstype")]
    pub fs_type: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

impl MountInfo {
    pub fn new(device: String, fs_type: String, options: Vec<String>) -> Self {
        Self { volume_type: BLOCK.to_owned(), device, fs_type, options, metadata: BTreeMap::new() }
    }

    /// Adds the group that owns the files, and the policy for changing it.
    pub fn with_group(mut self, group: u32, policy: Option<GroupChangePolicy>) -> Self {
        self.metadata.insert(GROUP.to_owned(), group.to_string());
        if let Some(policy) = policy {
            self.metadata.insert(GROUP_POLICY.to_owned(), policy.to_string());
        }
        self
    }

    /// Parses untrusted input and validates each value. The caller must verify that `device` is a
    /// block device ([`check::block_device`]).
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let read: Self = serde_json::from_slice(bytes)
            .map_err(|error| Problem::invalid("mountInfo.json", error.to_string()))?;
        if read.volume_type != BLOCK {
            return Err(Problem::invalid("volume-type", "only block can be mounted"));
        }
        check::device_path("device", &read.device)?;
        check::fs_type("fstype", &read.fs_type)?;
        let options = check::options("options", &read.options)?;
        read.group()?;
        Ok(Self { options, ..read })
    }

    pub fn to_json(&self) -> Vec<u8> {
        // A map of strings always serializes.
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }

    /// The group that owns the files. The default policy is to change all files at each mount.
    pub fn group(&self) -> Result<Option<(u32, GroupChangePolicy)>> {
        let Some(group) = self.metadata.get(GROUP).filter(|group| !group.is_empty()) else {
            return match self.metadata.contains_key(GROUP_POLICY) {
                true => {
                    Err(Problem::invalid("metadata.fsGroupChangePolicy", "requires an fsGroup"))
                }
                false => Ok(None),
            };
        };
        let group = group_id("metadata.fsGroup", group)?;
        let policy = match self.metadata.get(GROUP_POLICY) {
            Some(policy) => policy.parse()?,
            None => GroupChangePolicy::Always,
        };
        Ok(Some((group, policy)))
    }
}

/// Parses a decimal group id. The highest number means "unchanged" to chown(2).
pub fn group_id(field: &'static str, text: &str) -> Result<u32> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<u32>() {
        Ok(group) if digits && group != u32::MAX => Ok(group),
        _ => Err(Problem::invalid(field, "is not a decimal group id")),
    }
}

/// PodSecurityContext.fsGroupChangePolicy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupChangePolicy {
    Always,
    OnRootMismatch,
}

impl fmt::Display for GroupChangePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Always => "Always",
            Self::OnRootMismatch => "OnRootMismatch",
        })
    }
}

impl FromStr for GroupChangePolicy {
    type Err = Problem;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "Always" => Ok(Self::Always),
            "OnRootMismatch" => Ok(Self::OnRootMismatch),
            _ => Err(Problem::invalid(
                "metadata.fsGroupChangePolicy",
                "is neither Always nor OnRootMismatch",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_info_has_the_keys_of_the_proposal() {
        let info =
            MountInfo::new("/dev/sdf".into(), "xfs".into(), Vec::new()).with_group(4059, None);
        let json: serde_json::Value = serde_json::from_slice(&info.to_json()).unwrap();
        let example = serde_json::json!({
            "volume-type": "block", "device": "/dev/sdf", "fstype": "xfs", "metadata": { "fsGroup": "4059" }
        });
        assert_eq!(json, example);
        assert_eq!(MountInfo::parse(&info.to_json()).unwrap(), info);
    }

    #[test]
    fn invalid_mount_info_is_refused() {
        for bad in [
            "",
            "[]",
            r#"{"volume-type":"network","device":"x","fstype":"nfs"}"#,
            r#"{"volume-type":"block","device":"/dev/sdf","fstype":"xfs","metadata":{"fsGroup":"-1"}}"#,
            r#"{"volume-type":"block","device":"/dev/sdf","fstype":"xfs","metadata":{"fsGroup":"4294967295"}}"#,
            r#"{"volume-type":"block","device":"/dev/sdf","fstype":"xfs","metadata":{"fsGroupChangePolicy":"Always"}}"#,
            r#"{"volume-type":"block","device":"/dev/sdf","fstype":"xfs","metadata":{"fsGroup":"1","fsGroupChangePolicy":"x"}}"#,
        ] {
            assert!(MountInfo::parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
