//! The command line of `backup` and `restore`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use super::create::BaseChoice;
use super::manifest::Group;
use super::repository::Location;
use super::retention::Rules;
use crate::client::{Options, parse_timeout};
use kubernetes::name;

const HEADING: &str = "Repository";
const KUBERNETES: &str = "In Kubernetes";

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
    /// Directory, bucket or PersistentVolumeClaim with the backups [env: CSI_LOOPBACK_REPOSITORY]
    #[arg(long, value_name = "DIR|s3://BUCKET/PREFIX|claim:NAME/PATH", help_heading = HEADING)]
    pub repository: Option<Location>,
    /// File with the key, at least 32 random bytes [env: CSI_LOOPBACK_KEY_FILE]
    #[arg(long, value_name = "FILE", help_heading = HEADING)]
    pub key_file: Option<PathBuf>,
    /// Shell command that prints the key [env: CSI_LOOPBACK_KEY_COMMAND]
    #[arg(long, value_name = "COMMAND", conflicts_with = "key_file", help_heading = HEADING)]
    pub key_command: Option<String>,
    /// Directory with a file per S3 setting, such as AWS_REGION [default: the environment]
    #[arg(long, value_name = "DIR", help_heading = HEADING)]
    pub s3_credentials: Option<PathBuf>,
    /// Accept a network filesystem whose lists may be stale: no other machine writes to it
    #[arg(long, help_heading = HEADING)]
    pub one_machine: bool,
    /// Report progress in lines on stderr, as a mover pod does
    #[arg(long, hide = true)]
    pub report_progress: bool,
    #[command(flatten)]
    pub mover: MoverArgs,
}

/// The repository that `backup copy` writes.
#[derive(Debug, Clone, Args)]
pub struct CopyTo {
    /// Repository to copy to
    #[arg(long, value_name = "DIR|s3://BUCKET/PREFIX|claim:NAME/PATH")]
    pub to: Location,
    /// Key file of the other repository
    #[arg(long, value_name = "FILE")]
    pub to_key_file: Option<PathBuf>,
    /// Shell command that prints the key of the other repository
    #[arg(long, value_name = "COMMAND", conflicts_with = "to_key_file")]
    pub to_key_command: Option<String>,
    /// Secret whose entry `key` is the key of the other repository
    #[arg(long, requires = "namespace", conflicts_with_all = ["to_key_file", "to_key_command"], value_parser = name::object, value_name = "NAME", help_heading = KUBERNETES)]
    pub to_key_secret: Option<String>,
}

/// Work that a mover pod does; every other flag requires `--namespace`.
#[derive(Debug, Clone, Args)]
pub struct MoverArgs {
    /// Namespace of the VolumeSnapshot or claim, in which a mover pod does the work
    #[arg(long, short, value_parser = name::object, value_name = "NAME", help_heading = KUBERNETES)]
    pub namespace: Option<String>,
    /// Configuration of the client [env: KUBECONFIG] [default: ~/.kube/config, else the pod's]
    #[arg(long, requires = "namespace", value_name = "FILE", help_heading = KUBERNETES)]
    pub kubeconfig: Option<PathBuf>,
    /// Image of the mover pod, with this program [default: csi-loopback and its version]
    #[arg(long, requires = "namespace", value_name = "IMAGE", help_heading = KUBERNETES)]
    pub image: Option<String>,
    /// ServiceAccount of the mover pod [default: csi-loopback-mover]
    #[arg(long, requires = "namespace", value_parser = name::object, value_name = "NAME", help_heading = KUBERNETES)]
    pub service_account: Option<String>,
    /// Secret with an entry for each S3 setting, such as AWS_REGION
    #[arg(long, requires = "namespace", conflicts_with = "s3_credentials", value_parser = name::object, value_name = "NAME", help_heading = KUBERNETES)]
    pub s3_secret: Option<String>,
    /// Secret whose entry `key` is the key of an encrypted repository
    #[arg(long, requires = "namespace", conflicts_with_all = ["key_file", "key_command"], value_parser = name::object, value_name = "NAME", help_heading = KUBERNETES)]
    pub key_secret: Option<String>,
    /// StorageClass of new claims [default: that of the snapshot's claim, or the cluster's]
    #[arg(long, requires = "namespace", value_parser = name::object, value_name = "NAME", help_heading = KUBERNETES)]
    pub storage_class: Option<String>,
    /// YAML or JSON with labels, tolerations, limits, … of the mover pod
    #[arg(long, requires = "namespace", value_name = "FILE", help_heading = KUBERNETES)]
    pub pod_template: Option<PathBuf>,
    /// Time limit of a mover pod, from its creation to its end
    #[arg(long, requires = "namespace", value_parser = parse_timeout, default_value = "2days", value_name = "TIME", help_heading = KUBERNETES)]
    pub mover_timeout: Duration,
}

#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Snapshot, by name or id; with --group, a group snapshot by name or id
    #[arg(required_unless_present = "claim")]
    snapshot: Option<String>,
    #[command(flatten)]
    pub repository: RepositoryArgs,
    /// PersistentVolumeClaim to back up by a VolumeSnapshot that is then removed
    #[arg(long, requires = "namespace", conflicts_with_all = ["snapshot", "group", "source"], value_parser = name::object, value_name = "NAME", help_heading = KUBERNETES)]
    pub claim: Option<String>,
    /// With --claim: VolumeSnapshotClass [default: the default class of the driver]
    #[arg(long, requires = "claim", value_parser = name::object, value_name = "NAME", help_heading = KUBERNETES)]
    pub snapshot_class: Option<String>,
    /// Base of an incremental backup; `auto`: the newest usable one, else a full backup
    #[arg(long, value_parser = base, value_name = "BACKUP|auto", default_value = "auto")]
    pub base: BaseChoice,
    /// Back up all data, and not only what changed since the base
    #[arg(long, conflicts_with = "base")]
    pub full: bool,
    /// Back up all snapshots of a group snapshot as one set
    #[arg(long, conflicts_with = "source")]
    pub group: bool,
    /// Remove a repository of format 1 with its backups, and make a new one in its place
    #[arg(long, help_heading = HEADING)]
    pub replace_format_1: bool,
    /// Device with the data of the VolumeSnapshot, instead of a mover pod
    #[arg(long, requires = "namespace", value_name = "DEVICE", help_heading = KUBERNETES)]
    pub source: Option<PathBuf>,
    /// With --source: file with a token for the sidecar [default: request one]
    #[arg(long, requires = "source", value_name = "FILE", help_heading = KUBERNETES)]
    pub token_file: Option<PathBuf>,
    /// The set to which a mover pod adds its backup, as JSON
    #[arg(long, hide = true, requires = "source", value_parser = set, value_name = "JSON")]
    pub set: Option<Group>,
}

impl CreateArgs {
    /// Empty with `--claim`.
    pub fn snapshot(&self) -> &str {
        self.snapshot.as_deref().unwrap_or_default()
    }

    pub fn base(&self) -> &BaseChoice {
        if self.full { &BaseChoice::None } else { &self.base }
    }

    /// What the command of a mover pod gets, too.
    pub fn flags_for_pod(&self) -> Vec<String> {
        let base = match self.base() {
            BaseChoice::None => "--full".to_owned(),
            BaseChoice::Auto => "--base=auto".to_owned(),
            BaseChoice::Backup(backup) => format!("--base={backup}"),
        };
        let replace = self.replace_format_1.then(|| "--replace-format-1".to_owned());
        [base].into_iter().chain(replace).collect()
    }
}

#[derive(Debug, Subcommand)]
pub enum BackupCommand {
    /// Back up a snapshot: what changed since the newest backup, or all of its data
    #[command(after_help = "Examples:
  csi-loopback backup create monday --repository /backups
  csi-loopback backup create tuesday --repository /backups --full
  csi-loopback backup create nightly --namespace shop --repository claim:backups
  csi-loopback backup create nightly --group --namespace shop --repository claim:backups
  csi-loopback backup create --claim data --namespace shop --repository s3://bucket/backups")]
    Create(CreateArgs),
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
        /// Id, the beginning of one, or snapshot; with --group, a group snapshot
        backup: String,
        #[command(flatten)]
        repository: RepositoryArgs,
        /// Show the backups of a complete set
        #[arg(long)]
        group: bool,
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
    /// Show a backup as a read-only image file until it is unmounted or interrupted
    #[command(after_help = "Example:
  csi-loopback backup mount tuesday /mnt/backup --repository /backups")]
    Mount {
        /// Id, the beginning of one, or snapshot
        backup: String,
        /// Empty directory, which gets the file `image`
        #[arg(value_name = "DIR", conflicts_with = "namespace")]
        directory: PathBuf,
        #[command(flatten)]
        repository: RepositoryArgs,
    },
    /// Remove backups that no rule keeps and no kept backup needs
    #[command(after_help = "Example:
  csi-loopback backup prune --repository /backups --keep-daily 7 --keep-monthly 12 --dry-run")]
    Prune {
        #[command(flatten)]
        repository: RepositoryArgs,
        #[command(flatten)]
        rules: Rules,
        /// Show what would be removed, and remove nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Remove backups that no other backup needs
    #[command(after_help = "Example:
  csi-loopback backup delete 20261126T010203004Z-9f --repository /backups --dry-run")]
    Delete {
        /// Ids, the beginnings of ids, or snapshots
        #[arg(required = true)]
        backups: Vec<String>,
        #[command(flatten)]
        repository: RepositoryArgs,
        /// Also remove the last restorable backup of a volume
        #[arg(long)]
        remove_last: bool,
        /// Show what would be removed, and remove nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Copy backups and their chains to another repository
    #[command(after_help = "Example:
  csi-loopback backup copy tuesday --repository /backups --to s3://bucket/backups
  csi-loopback backup copy --namespace shop --repository claim:backups --to s3://bucket/backups")]
    Copy {
        /// Ids or snapshots [default: all backups]
        backups: Vec<String>,
        #[command(flatten)]
        repository: RepositoryArgs,
        #[command(flatten)]
        to: CopyTo,
    },
    /// Show, add and remove the keys of an encrypted repository
    Key {
        #[command(subcommand)]
        command: KeyCommand,
    },
}

#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// List the keys that open the repository
    #[command(after_help = "Example:
  csi-loopback backup key list --repository /backups --key-file old.key")]
    List {
        #[command(flatten)]
        repository: RepositoryArgs,
    },
    /// Add a key that opens the repository
    #[command(after_help = "Example:
  csi-loopback backup key add --repository /backups --key-file old.key --new-key-file new.key")]
    Add {
        #[command(flatten)]
        repository: RepositoryArgs,
        #[command(flatten)]
        new: NewKey,
    },
    /// Remove a key; at least one other must remain
    #[command(after_help = "Example:
  csi-loopback backup key remove 1f2e3d4c5b6a7988 --repository /backups --key-file new.key")]
    Remove {
        /// Id of the key, as `backup key list` prints it
        key: String,
        #[command(flatten)]
        repository: RepositoryArgs,
    },
}

/// The key to add.
#[derive(Debug, Clone, Args)]
#[group(required = true, multiple = false)]
pub struct NewKey {
    /// File with the new key, at least 32 random bytes
    #[arg(long, value_name = "FILE")]
    pub new_key_file: Option<PathBuf>,
    /// Shell command that prints the new key
    #[arg(long, value_name = "COMMAND")]
    pub new_key_command: Option<String>,
    /// Secret whose entry `key` is the new key
    #[arg(long, requires = "namespace", value_parser = name::object, value_name = "NAME", help_heading = KUBERNETES)]
    pub new_key_secret: Option<String>,
}

impl BackupCommand {
    /// The same command for a mover pod, without its repositories: `None` for `create`, whose pod
    /// has other arguments, and for `mount`, which needs none.
    pub fn for_pod(&self) -> Option<ForPod<'_>> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let mut args: Vec<String> = words(&["backup"]);
        let (mut copy_to, mut new_key) = (None, None);
        let repository = match self {
            Self::Create(_) | Self::Mount { .. } => return None,
            Self::List { repository, volume } => {
                args.push("list".to_owned());
                args.extend(volume.as_ref().map(|volume| format!("--volume={volume}")));
                repository
            }
            Self::Show { backup, repository, group } => {
                args.extend(["show".to_owned(), backup.clone()]);
                args.extend(group.then(|| "--group".to_owned()));
                repository
            }
            Self::Verify { backups, repository } => {
                args.push("verify".to_owned());
                args.extend(backups.iter().cloned());
                repository
            }
            Self::Prune { repository, rules, dry_run } => {
                args.push("prune".to_owned());
                args.extend(rules.flags());
                args.extend(dry_run.then(|| "--dry-run".to_owned()));
                repository
            }
            Self::Delete { backups, repository, remove_last, dry_run } => {
                args.push("delete".to_owned());
                args.extend(backups.iter().cloned());
                args.extend(remove_last.then(|| "--remove-last".to_owned()));
                args.extend(dry_run.then(|| "--dry-run".to_owned()));
                repository
            }
            Self::Copy { backups, repository, to } => {
                args.push("copy".to_owned());
                args.extend(backups.iter().cloned());
                copy_to = Some(to);
                repository
            }
            Self::Key { command } => {
                args.push("key".to_owned());
                match command {
                    KeyCommand::List { repository } => {
                        args.push("list".to_owned());
                        repository
                    }
                    KeyCommand::Add { repository, new } => {
                        args.push("add".to_owned());
                        new_key = Some(new);
                        repository
                    }
                    KeyCommand::Remove { key, repository } => {
                        args.extend(["remove".to_owned(), key.clone()]);
                        repository
                    }
                }
            }
        };
        Some(ForPod { repository, args, copy_to, new_key })
    }
}

/// A command for a mover pod.
pub struct ForPod<'a> {
    pub repository: &'a RepositoryArgs,
    pub args: Vec<String>,
    pub copy_to: Option<&'a CopyTo>,
    pub new_key: Option<&'a NewKey>,
}

fn base(text: &str) -> Result<BaseChoice, String> {
    match text {
        "" => Err("is empty; name a backup, or auto".to_owned()),
        "auto" => Ok(BaseChoice::Auto),
        backup => Ok(BaseChoice::Backup(backup.to_owned())),
    }
}

fn set(text: &str) -> Result<Group, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  csi-loopback restore tuesday --repository /backups --to /dev/vdb
  csi-loopback restore monday --repository /backups --to /dev/vdb --from tuesday
  csi-loopback restore tuesday --repository /backups --to - >image
  csi-loopback restore tuesday --repository /backups --to-volume restored
  csi-loopback restore nightly --namespace shop --repository claim:backups --to-claim restored
  csi-loopback restore nightly --group --repository /backups --to /restored")]
pub struct RestoreArgs {
    #[command(flatten)]
    pub options: Options,
    /// Id of a backup, the beginning of one, or snapshot; with --group, a group snapshot
    pub backup: String,
    #[command(flatten)]
    pub repository: RepositoryArgs,
    /// Block device or file to write, or - (standard output); with --group, a directory
    #[arg(
        long,
        value_name = "DEVICE|FILE|-",
        required_unless_present_any = ["to_volume", "to_claim", "namespace"],
        conflicts_with_all = ["to_volume", "to_claim", "namespace"]
    )]
    pub to: Option<PathBuf>,
    /// Name of a new volume to restore to
    #[arg(long, value_name = "NAME", conflicts_with_all = ["group", "to_claim", "namespace"])]
    pub to_volume: Option<String>,
    /// New PersistentVolumeClaim, or unused one in block mode; with --group, NAME-VOLUME for each
    #[arg(long, requires = "namespace", value_parser = name::object, value_name = "NAME", help_heading = KUBERNETES)]
    pub to_claim: Option<String>,
    /// Volume mode of the new claim
    #[arg(long, requires = "to_claim", value_enum, default_value_t = VolumeMode::Block, help_heading = KUBERNETES)]
    pub volume_mode: VolumeMode,
    /// Restore all members of a set
    #[arg(long)]
    pub group: bool,
    /// Backup that the device holds, apart from later changes: write only what differs
    #[arg(
        long,
        value_name = "BACKUP",
        requires = "to",
        conflicts_with_all = ["group", "resume", "overwrite"]
    )]
    pub from: Option<String>,
    /// Write only what the target does not hold yet, after an interrupted restore
    #[arg(long, conflicts_with = "to_volume")]
    pub resume: bool,
    /// Replace the content of an existing file
    #[arg(long, requires = "to", conflicts_with = "resume")]
    pub overwrite: bool,
}

/// How pods use a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum VolumeMode {
    /// As a raw block device
    Block,
    /// As the filesystem that the backup contains
    Filesystem,
}
