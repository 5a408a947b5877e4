//! How volumes are used on this node: access, staged and published volumes, inline volumes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Format, FsType, Phase};
use crate::sector::SectorSize;

/// The access modes that one node can satisfy (CSI VolumeCapability.AccessMode), including
/// read-only use by many nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccessMode {
    SingleNodeWriter,
    SingleNodeReaderOnly,
    SingleNodeSingleWriter,
    SingleNodeMultiWriter,
    MultiNodeReaderOnly,
}

impl AccessMode {
    /// Whether the volume may be published at several target paths at the same time (CSI
    /// NodePublishVolume, tables on the second call).
    pub const fn shares(self) -> bool {
        matches!(self, Self::SingleNodeMultiWriter | Self::MultiNodeReaderOnly)
    }

    pub const fn read_only(self) -> bool {
        matches!(self, Self::SingleNodeReaderOnly | Self::MultiNodeReaderOnly)
    }
}

/// The access type of a volume (CSI VolumeCapability).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    Block,
    Mount {
        /// `None`: the existing filesystem, or ext4.
        fs_type: Option<FsType>,
        /// Mount options. They may contain secrets and are never logged.
        flags: Vec<String>,
        /// The group that owns the mounted tree (CSI volume_mount_group).
        group: Option<u32>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capability {
    pub access: Access,
    pub mode: AccessMode,
}

impl Capability {
    /// Whether the volume is read-only, by access mode or mount option.
    pub fn is_read_only(&self) -> bool {
        let option = match &self.access {
            Access::Block => false,
            Access::Mount { flags, .. } => {
                flags.iter().flat_map(|flags| flags.split(',')).any(|flag| flag == "ro")
            }
        };
        option || self.mode.read_only()
    }

    /// Whether two capabilities are compatible. The group is ignored: each pod has its own, and it
    /// applies to files, not to the mount.
    pub fn is_like(&self, other: &Self) -> bool {
        let same_access = match (&self.access, &other.access) {
            (
                Access::Mount { fs_type, flags, group: _ },
                Access::Mount { fs_type: other_type, flags: other_flags, group: _ },
            ) => fs_type == other_type && flags == other_flags,
            (access, other) => access == other,
        };
        same_access && self.mode == other.mode
    }
}

/// A volume in use on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    pub volume_id: String,
    pub staging_path: PathBuf,
    pub capability: Capability,
    /// By target path.
    pub published: BTreeMap<PathBuf, Publication>,
    /// Where the filesystem is mounted. Rows without this field are mounted at the staging path.
    #[serde(default)]
    pub mounted: Mounted,
}

/// Where this host mounts the filesystem of a staged volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mounted {
    /// At the staging path, which is bind-mounted at each target.
    #[default]
    AtStaging,
    /// At each target, unless a container runtime mounts it (KEP-2857).
    AtTargets,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Publication {
    pub capability: Capability,
    pub readonly: bool,
    /// A container runtime mounts it, and this host never does.
    #[serde(default)]
    pub deferred: Option<Deferral>,
}

/// Instructions for the container runtime that mounts a deferred volume (KEP-2857).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Deferral {
    /// The group that must own the files.
    pub group: Option<u32>,
    /// When to change the group of the files; `None` if not specified.
    pub policy: Option<GroupPolicy>,
}

/// PodSecurityContext.fsGroupChangePolicy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupPolicy {
    Always,
    OnRootMismatch,
}

impl Publication {
    /// On this host.
    pub fn on_host(capability: Capability, readonly: bool) -> Self {
        Self { capability, readonly, deferred: None }
    }

    pub fn is_read_only(&self) -> bool {
        self.readonly || self.capability.is_read_only()
    }
}

impl Attachment {
    /// The target at which a container runtime mounts the volume. Such a volume has no other
    /// target.
    pub fn deferred_at(&self) -> Option<(&Path, &Deferral)> {
        let mut published = self.published.iter();
        published.find_map(|(target, one)| Some((target.as_path(), one.deferred.as_ref()?)))
    }
}

/// A volume that belongs to one pod, from NodePublishVolume to NodeUnpublishVolume (KEP-596).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inline {
    /// The id from kubelet. It is never part of a path.
    pub handle: String,
    /// The name of its backing file. Unique forever.
    pub id: String,
    /// `Ready` when the pod may have used it.
    pub phase: Phase,
    pub target: PathBuf,
    pub capacity_bytes: u64,
    /// `None` until the filesystem is created.
    pub format: Option<Format>,
    pub request: InlineRequest,
}

/// The fields of the request for an inline volume that a repeated call must match. Content may
/// change, and is not stored here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InlineRequest {
    /// `None`: the driver chooses.
    pub size_bytes: Option<u64>,
    pub capability: Capability,
    pub readonly: bool,
    /// A tmpfs at the target instead of a file in the pool.
    pub in_memory: bool,
    /// Only the driver writes to it and updates its content.
    pub read_only_content: bool,
    #[serde(default, skip_serializing_if = "SectorSize::is_default")]
    pub sector_size: SectorSize,
    /// A container runtime mounts it, and this host never does.
    #[serde(default)]
    pub deferred: Option<Deferral>,
}

impl InlineRequest {
    /// Whether nothing, not even content, is written through its mount.
    pub fn is_read_only(&self) -> bool {
        !self.read_only_content && (self.readonly || self.capability.is_read_only())
    }
}
