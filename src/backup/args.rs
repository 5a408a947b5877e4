//! The command line of `backup` and `restore`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::create::BaseChoice;
use super::repository::Location;
use crate::client::Options;

const HEADING: &str = "Repository";

#[derive(Debug, Args)]
pub struct BackupArgs {
    #[command(flatten)]
    pub options: Options,
    #[command(subcommand)]
    pub command: BackupCommand,
}

/// Which repository, and how it opens.
#[derive(Debug, Clone, Args)]
pub struct RepositoryArgs {
    /// Directory or bucket that holds the backups
    #[arg(long, value_name = "DIR|s3://BUCKET/PREFIX", help_heading = HEADING)]
    pub repository: Location,
    /// File with the key of an encrypted repository, at least 32 random bytes
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    pub key_file: Option<PathBuf>,
    /// Directory with a file per S3 setting, such as AWS_REGION [default: the environment]
    #[arg(long, value_name = "DIR", help_heading = HEADING)]
    pub s3_credentials: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum BackupCommand {
    /// Back up a snapshot: all of its data, or what changed since an earlier backup
    #[command(after_help = "Examples:
  csi-loopback backup create monday --repository /backups
  csi-loopback backup create tuesday --repository /backups --base auto")]
    Create {
        /// Snapshot, by name or id; with --group, a group snapshot by name or id
        snapshot: String,
        #[command(flatten)]
        repository: RepositoryArgs,
        /// Base of an incremental backup; `auto` is the newest usable one [default: none, full]
        #[arg(long, value_parser = base, value_name = "BACKUP|auto")]
        base: Option<BaseChoice>,
        /// Back up all snapshots of a group snapshot as one set
        #[arg(long)]
        group: bool,
    },
    /// List the backups of a repository, oldest first
    #[command(after_help = "Example:
  csi-loopback backup list --repository /backups --output json")]
    List {
        #[command(flatten)]
        repository: RepositoryArgs,
        /// Only those of this volume, by name or id
        #[arg(long)]
        volume: Option<String>,
    },
    /// Show a backup and its chain
    #[command(after_help = "Example:
  csi-loopback backup show tuesday --repository /backups")]
    Show {
        /// Id, the beginning of one, or snapshot
        backup: String,
        #[command(flatten)]
        repository: RepositoryArgs,
    },
    /// Read backups and compare every byte with its hash
    #[command(after_help = "Example:
  csi-loopback backup verify --repository /backups")]
    Verify {
        /// Ids or snapshots [default: all backups]
        backups: Vec<String>,
        #[command(flatten)]
        repository: RepositoryArgs,
    },
    /// Remove backups that no rule keeps and no kept backup needs
    #[command(after_help = "Example:
  csi-loopback backup prune --repository /backups --keep-last 7 --keep-within 30days")]
    Prune {
        #[command(flatten)]
        repository: RepositoryArgs,
        /// Keep the newest N backups of each volume
        #[arg(long, value_name = "N", required_unless_present = "keep_within")]
        keep_last: Option<usize>,
        /// Keep backups that are not older than this
        #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
        keep_within: Option<Duration>,
        /// Show what would be removed, and remove nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Copy backups and their chains to another repository
    #[command(after_help = "Example:
  csi-loopback backup copy tuesday --repository /backups --to s3://bucket/backups")]
    Copy {
        /// Ids or snapshots [default: all backups]
        backups: Vec<String>,
        #[command(flatten)]
        repository: RepositoryArgs,
        /// Repository to copy to
        #[arg(long, value_name = "DIR|s3://BUCKET/PREFIX")]
        to: Location,
        /// Key file of the other repository
        #[arg(long, value_name = "FILE")]
        to_key_file: Option<PathBuf>,
    },
}

fn base(text: &str) -> Result<BaseChoice, String> {
    match text {
        "" => Err("is empty; name a backup, or auto".to_owned()),
        "auto" => Ok(BaseChoice::Auto),
        backup => Ok(BaseChoice::Backup(backup.to_owned())),
    }
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  csi-loopback restore tuesday --repository /backups --to /dev/vdb
  csi-loopback restore tuesday --repository /backups --to-volume restored
  csi-loopback restore nightly --group --repository /backups --to /restored")]
pub struct RestoreArgs {
    #[command(flatten)]
    pub options: Options,
    /// Id of a backup, the beginning of one, or snapshot; with --group, a group snapshot
    pub backup: String,
    #[command(flatten)]
    pub repository: RepositoryArgs,
    /// Block device or file to write; with --group, a directory for a file per volume
    #[arg(
        long,
        value_name = "DEVICE|FILE",
        required_unless_present = "to_volume",
        conflicts_with = "to_volume"
    )]
    pub to: Option<PathBuf>,
    /// Name of a new volume to restore to
    #[arg(long, value_name = "NAME", conflicts_with = "group")]
    pub to_volume: Option<String>,
    /// Restore all members of a set
    #[arg(long)]
    pub group: bool,
    /// Write only what the target does not hold yet, after an interrupted restore
    #[arg(long, conflicts_with = "to_volume")]
    pub resume: bool,
}
