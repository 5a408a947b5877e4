//! How a volume is to be used, from flags to a CSI VolumeCapability.

use clap::{Args, ValueEnum};

use crate::proto::csi::v1::VolumeCapability;
use crate::proto::csi::v1::volume_capability::access_mode::Mode;
use crate::proto::csi::v1::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};

/// Flags that say how a volume is used.
#[derive(Debug, Clone, Args)]
pub struct CapabilityArgs {
    /// Filesystem: ext4 (the default), xfs or btrfs
    #[arg(long, value_name = "TYPE")]
    fs: Option<String>,
    /// A raw block device instead of a filesystem
    #[arg(long, conflicts_with_all = ["fs", "mount_flag", "mount_group"])]
    block: bool,
    /// Mount option; may be repeated
    #[arg(long, value_name = "OPTION")]
    mount_flag: Vec<String>,
    /// Group id that may write to the mounted filesystem
    #[arg(long, value_name = "GID")]
    mount_group: Option<u32>,
    /// Group id that a container runtime gives the files to, where it mounts the filesystem
    #[arg(long, value_name = "GID", conflicts_with = "block")]
    supplemental_group: Option<u32>,
    /// How the files are given to --supplemental-group: Always or OnRootMismatch
    #[arg(long, value_name = "POLICY", requires = "supplemental_group")]
    supplemental_group_change_policy: Option<String>,
    /// Who may use the volume at the same time
    #[arg(long, value_enum, default_value_t = Access::SingleNodeWriter, value_name = "MODE")]
    access_mode: Access,
}

/// CSI's access modes (CSI VolumeCapability.AccessMode).
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Access {
    SingleNodeWriter,
    SingleNodeReaderOnly,
    SingleNodeSingleWriter,
    SingleNodeMultiWriter,
    MultiNodeReaderOnly,
    MultiNodeSingleWriter,
    MultiNodeMultiWriter,
}

impl Access {
    const fn mode(self) -> Mode {
        match self {
            Self::SingleNodeWriter => Mode::SingleNodeWriter,
            Self::SingleNodeReaderOnly => Mode::SingleNodeReaderOnly,
            Self::SingleNodeSingleWriter => Mode::SingleNodeSingleWriter,
            Self::SingleNodeMultiWriter => Mode::SingleNodeMultiWriter,
            Self::MultiNodeReaderOnly => Mode::MultiNodeReaderOnly,
            Self::MultiNodeSingleWriter => Mode::MultiNodeSingleWriter,
            Self::MultiNodeMultiWriter => Mode::MultiNodeMultiWriter,
        }
    }
}

impl CapabilityArgs {
    pub fn capability(&self) -> VolumeCapability {
        if self.block {
            return block(self.access_mode.mode());
        }
        let id = |group: Option<u32>| group.map(|gid| gid.to_string()).unwrap_or_default();
        let mount = MountVolume {
            fs_type: self.fs.clone().unwrap_or_default(),
            mount_flags: self.mount_flag.clone(),
            volume_mount_group: id(self.mount_group),
            volume_supplemental_group: id(self.supplemental_group),
            volume_supplemental_group_change_policy: self
                .supplemental_group_change_policy
                .clone()
                .unwrap_or_default(),
        };
        with_mode(AccessType::Mount(mount), self.access_mode.mode())
    }
}

/// A raw block device.
pub fn block(mode: Mode) -> VolumeCapability {
    with_mode(AccessType::Block(BlockVolume {}), mode)
}

fn with_mode(access_type: AccessType, mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_type: Some(access_type),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}
