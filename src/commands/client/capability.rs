//! The use of a volume, from flags to a CSI VolumeCapability.

use clap::{Args, ValueEnum};

use grpc::proto::csi::v1::VolumeCapability;
use grpc::proto::csi::v1::volume_capability::access_mode::Mode;
use grpc::proto::csi::v1::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};

/// Heading of these flags in `--help`.
const HEADING: &str = "Use of the volume";

/// Flags for the use of a volume.
#[derive(Debug, Clone, Args)]
pub struct CapabilityArgs {
    /// Filesystem: ext4, xfs or btrfs [default: ext4]
    #[arg(long, value_name = "TYPE", help_heading = HEADING)]
    fs: Option<String>,
    /// Raw block device instead of a filesystem
    #[arg(long, conflicts_with_all = ["fs", "mount_flag", "mount_group"], help_heading = HEADING)]
    block: bool,
    /// Mount option; repeatable
    #[arg(long, value_name = "OPTION", help_heading = HEADING)]
    mount_flag: Vec<String>,
    /// Group id that owns the mounted files
    #[arg(long, value_name = "GID", help_heading = HEADING)]
    mount_group: Option<u32>,
    /// Group id that a container runtime gives the files to
    #[arg(long, value_name = "GID", conflicts_with = "block", help_heading = HEADING)]
    supplemental_group: Option<u32>,
    /// When the runtime changes owners: Always or OnRootMismatch
    #[arg(long, value_name = "POLICY", requires = "supplemental_group", help_heading = HEADING)]
    supplemental_group_change_policy: Option<String>,
    /// CSI access mode
    #[arg(long, value_enum, default_value_t = Access::SingleNodeWriter, value_name = "MODE", help_heading = HEADING)]
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
    /// Whether `--block` or `--fs` is set.
    pub fn has_access(&self) -> bool {
        self.block || self.fs.is_some()
    }

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

/// A filesystem of this type; empty: the existing one, or the driver's default.
pub fn mounted(mode: Mode, fs_type: String) -> VolumeCapability {
    let mount = MountVolume { fs_type, ..MountVolume::default() };
    with_mode(AccessType::Mount(mount), mode)
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
