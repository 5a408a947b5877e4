//! `volume`: the CSI calls for one volume, one command for each call. [`super::node`] has those of
//! a node.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::json;

use super::capability::CapabilityArgs;
use super::connection::{Connection, refused};
use super::inline::{self, InlineCommand};
use super::node::{self, PublishArgs, StageArgs, UnpublishArgs, UnstageArgs};
use super::stats::stats;
use super::{Options, Output, bounded, format, names, show};
use common::quantity;
use grpc::proto::csi::v1 as csi;

/// The parameter of CreateVolume, and a key of the volume's context.
const SECTOR_SIZE: &str = "sectorSize";

#[derive(Debug, Args)]
pub struct VolumeArgs {
    #[command(flatten)]
    pub(super) options: Options,
    #[command(subcommand)]
    command: VolumeCommand,
}

#[derive(Debug, Subcommand)]
enum VolumeCommand {
    /// Create a volume: empty, from a snapshot, or a clone of a volume
    #[command(after_help = "Examples:
  csi-loopback volume create data --size 10Gi --fs xfs
  csi-loopback volume create restored --from-snapshot monday")]
    Create(CreateArgs),
    /// List all volumes
    #[command(after_help = "Example:
  csi-loopback volume list --output json")]
    List,
    /// Show a volume: filesystem, use on this node, tracking, source
    #[command(after_help = "Example:
  csi-loopback volume show data")]
    Show {
        /// Name or id
        volume: String,
    },
    /// Delete a volume; its snapshots remain
    #[command(after_help = "Example:
  csi-loopback volume delete data")]
    Delete {
        /// Name or id
        volume: String,
        /// Exit with 0 if the volume does not exist
        #[arg(long)]
        if_exists: bool,
    },
    /// Grow a volume, and with --path its device and filesystem
    #[command(after_help = "Example:
  csi-loopback volume expand data --size 20Gi --path /mnt/data")]
    Expand {
        /// Name or id
        volume: String,
        /// New size
        #[arg(long, value_parser = parse_size)]
        size: i64,
        /// Path at which the volume is staged or published
        #[arg(long)]
        path: Option<PathBuf>,
        /// Require that a container runtime mounts the volume
        #[arg(long, requires = "path")]
        defer_fs_ops: bool,
    },
    /// Attach a volume, create a missing filesystem, and mount it
    #[command(after_help = "Examples:
  csi-loopback volume stage data --staging /var/tmp/data
  csi-loopback volume stage raw --staging /var/tmp/raw --block")]
    Stage(StageArgs),
    /// Publish a staged volume at a target path
    #[command(after_help = "Example:
  csi-loopback volume publish data --staging /var/tmp/data --target /mnt/data")]
    Publish(PublishArgs),
    /// Show usage and health of a volume in use
    #[command(after_help = "Example:
  csi-loopback volume stats data --path /mnt/data")]
    Stats {
        /// Name or id
        volume: String,
        /// Path at which the volume is staged or published
        #[arg(long, value_name = "PATH")]
        path: PathBuf,
        /// Require that a container runtime mounts the volume
        #[arg(long)]
        defer_fs_ops: bool,
    },
    /// Remove a volume from a target path
    #[command(after_help = "Example:
  csi-loopback volume unpublish data --target /mnt/data")]
    Unpublish(UnpublishArgs),
    /// Unmount a volume from its staging path and detach it
    #[command(after_help = "Example:
  csi-loopback volume unstage data --staging /var/tmp/data --if-staged")]
    Unstage(UnstageArgs),
    /// Publish, list and unpublish inline volumes, as kubelet does
    #[command(subcommand)]
    Inline(InlineCommand),
}

#[derive(Debug, Args)]
struct CreateArgs {
    /// Name of the new volume
    name: String,
    /// Minimum size, such as 1Gi [default: the source's size, else 1Gi]
    #[arg(long, value_parser = parse_size)]
    size: Option<i64>,
    /// Maximum size
    #[arg(long, value_parser = parse_size, value_name = "SIZE")]
    limit: Option<i64>,
    /// Snapshot to copy, by name or id
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "from_volume")]
    from_snapshot: Option<String>,
    /// Volume to clone, by name or id
    #[arg(long, value_name = "VOLUME")]
    from_volume: Option<String>,
    /// Whether snapshots of the volume record changes [default: true]
    #[arg(long, value_name = "true|false")]
    change_tracking: Option<bool>,
    /// Sectors of the device; 512 excludes direct I/O [default: the source's, else 4096]
    #[arg(long, value_name = "BYTES", value_parser = ["512", "4096"])]
    sector_size: Option<String>,
    #[command(flatten)]
    capability: CapabilityArgs,
}

/// The result of a command on a volume.
#[derive(Debug, Serialize)]
pub struct Change {
    id: String,
    /// The state after the command, such as `staged`.
    state: &'static str,
    /// False if the volume was in that state before.
    changed: bool,
}

impl Change {
    pub fn of(id: String, state: &'static str, changed: bool) -> Self {
        Self { id, state, changed }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, state, changed } = self;
        match changed {
            true => write!(f, "volume {id} {state}"),
            false => write!(f, "volume {id} is already {state}"),
        }
    }
}

pub async fn run(args: VolumeArgs) -> Result<ExitCode> {
    let VolumeArgs { options, command } = args;
    let output = options.print.output;
    bounded(&options, async move |connection| {
        let connection = &connection;
        let change = match command {
            VolumeCommand::Create(args) => return create(connection, args, output).await,
            VolumeCommand::List => return list(connection, output).await,
            VolumeCommand::Show { volume } => {
                return show::run(connection, &volume, output).await;
            }
            VolumeCommand::Expand { volume, size, path, defer_fs_ops } => {
                let in_use = path.as_deref().map(|path| (path, defer_fs_ops));
                return expand(connection, &volume, size, in_use, output).await;
            }
            VolumeCommand::Stats { volume, path, defer_fs_ops } => {
                let volume_id = names::volume(connection, &volume).await?.volume_id;
                return stats(connection, volume_id, &path, defer_fs_ops, output).await;
            }
            VolumeCommand::Inline(command) => {
                return inline::run(connection, command, output).await;
            }
            VolumeCommand::Delete { volume, if_exists } => {
                delete(connection, &volume, if_exists).await?
            }
            VolumeCommand::Stage(args) => node::stage(connection, args).await?,
            VolumeCommand::Publish(args) => node::publish(connection, args).await?,
            VolumeCommand::Unpublish(args) => node::unpublish(connection, args).await?,
            VolumeCommand::Unstage(args) => node::unstage(connection, args).await?,
        };
        format::print_one(output, &change, Change::to_string)
    })
    .await?;
    Ok(ExitCode::SUCCESS)
}

async fn create(connection: &Connection, args: CreateArgs, output: Output) -> Result<()> {
    let CreateArgs {
        name,
        size,
        limit,
        from_snapshot,
        from_volume,
        change_tracking,
        sector_size,
        capability,
    } = args;
    let source = source(connection, from_snapshot, from_volume).await?;
    let previous = names::find_volume(connection, &name).await?;
    let request = csi::CreateVolumeRequest {
        secrets: connection.secrets(),
        name,
        capacity_range: (size.is_some() || limit.is_some()).then(|| csi::CapacityRange {
            required_bytes: size.unwrap_or_default(),
            limit_bytes: limit.unwrap_or_default(),
        }),
        volume_capabilities: vec![capability.capability()],
        parameters: tracking(change_tracking)
            .into_iter()
            .chain(sector_size.map(|bytes| (SECTOR_SIZE.to_owned(), bytes)))
            .collect(),
        volume_content_source: source.map(|kind| csi::VolumeContentSource { r#type: Some(kind) }),
        ..csi::CreateVolumeRequest::default()
    };
    let response = connection.controller().create_volume(request).await.map_err(refused)?;
    let volume = response.into_inner().volume.unwrap_or_default();
    let existed = previous.is_some_and(|previous| previous.volume_id == volume.volume_id);
    let created = Created { row: Row::new(volume, None), changed: !existed };
    format::print_one(output, &created, |Created { row, changed }| {
        let state = if *changed { "created" } else { "exists already" };
        format!("volume {} {state}, {}", row.id, format::bytes(row.capacity_bytes))
    })
}

/// The result of a creation.
#[derive(Debug, Serialize)]
pub struct Created<R> {
    #[serde(flatten)]
    pub row: R,
    pub changed: bool,
}

async fn source(
    connection: &Connection,
    snapshot: Option<String>,
    volume: Option<String>,
) -> Result<Option<csi::volume_content_source::Type>> {
    use csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
    Ok(match (snapshot, volume) {
        (Some(reference), _) => {
            let snapshot_id = names::snapshot_id(connection, &reference).await?;
            Some(Type::Snapshot(SnapshotSource { snapshot_id }))
        }
        (None, Some(reference)) => {
            let volume_id = names::volume(connection, &reference).await?.volume_id;
            Some(Type::Volume(VolumeSource { volume_id }))
        }
        (None, None) => None,
    })
}

/// The parameters of CreateVolume that set change tracking.
pub fn tracking(on: Option<bool>) -> HashMap<String, String> {
    on.map(|on| ("changeTracking".to_owned(), on.to_string())).into_iter().collect()
}

async fn list(connection: &Connection, output: Output) -> Result<()> {
    let mut rows = Vec::new();
    names::each_volume(connection, |entry| {
        let condition = entry.status.and_then(|status| status.volume_condition);
        rows.push(Row::new(entry.volume.unwrap_or_default(), condition));
    })
    .await?;
    rows.sort_by(|a, b| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
    format::print_rows(output, &rows, table)
}

fn table(rows: &[Row]) -> String {
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            let condition = match &row.condition {
                None => "unknown".to_owned(),
                Some(Condition { abnormal: false, .. }) => "ok".to_owned(),
                Some(Condition { message, .. }) => format!("abnormal: {message}"),
            };
            [row.name.clone(), row.id.clone(), quantity::format(row.capacity_bytes), condition]
        })
        .collect();
    format::table(["NAME", "ID", "CAPACITY", "CONDITION"], &["CAPACITY"], &rows)
}

async fn delete(connection: &Connection, reference: &str, if_exists: bool) -> Result<Change> {
    let volume = match if_exists {
        true => names::find_volume(connection, reference).await?,
        false => Some(names::existing_volume(connection, reference).await?),
    };
    let Some(volume) = volume else {
        return Ok(Change::of(reference.to_owned(), "deleted", false));
    };
    let request = csi::DeleteVolumeRequest {
        secrets: connection.secrets(),
        volume_id: volume.volume_id.clone(),
    };
    connection.controller().delete_volume(request).await.map_err(refused)?;
    Ok(Change::of(volume.volume_id, "deleted", true))
}

async fn expand(
    connection: &Connection,
    reference: &str,
    size: i64,
    in_use: Option<(&Path, bool)>,
    output: Output,
) -> Result<()> {
    let volume_id = names::volume(connection, reference).await?.volume_id;
    let capacity_range = Some(csi::CapacityRange { required_bytes: size, limit_bytes: 0 });
    let request = csi::ControllerExpandVolumeRequest {
        secrets: connection.secrets(),
        volume_id: volume_id.clone(),
        capacity_range,
        ..csi::ControllerExpandVolumeRequest::default()
    };
    let grown = connection.controller().controller_expand_volume(request).await.map_err(refused)?;
    let csi::ControllerExpandVolumeResponse { capacity_bytes, node_expansion_required } =
        grown.into_inner();
    let on_node = match in_use {
        Some((path, defer_fs_ops)) => {
            let request = csi::NodeExpandVolumeRequest {
                secrets: connection.secrets(),
                volume_id: volume_id.clone(),
                volume_path: absolute(path)?,
                capacity_range,
                defer_fs_ops,
                ..csi::NodeExpandVolumeRequest::default()
            };
            connection.node().node_expand_volume(request).await.map(drop).map_err(refused)
        }
        None => Ok(()),
    };
    let expanded = Expanded {
        node_expansion_required: node_expansion_required && (in_use.is_none() || on_node.is_err()),
        id: volume_id,
        capacity_bytes,
    };
    // The volume has grown in any case, and the output states it.
    format::print_one(output, &expanded, Expanded::to_string)?;
    on_node.map_err(|error| {
        anyhow!(
            "partial success: volume {} has {} bytes, but its device or filesystem did not grow: {error:#}; repeat the \
             command when the cause is removed",
            expanded.id,
            expanded.capacity_bytes
        )
    })
}

#[derive(Debug, Serialize)]
struct Expanded {
    id: String,
    capacity_bytes: i64,
    node_expansion_required: bool,
}

impl fmt::Display for Expanded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = format::bytes(u64::try_from(self.capacity_bytes).unwrap_or_default());
        write!(f, "volume {} has {bytes}", self.id)?;
        if self.node_expansion_required {
            f.write_str(
                "; `volume expand --path` grows its device and filesystem where it is in use",
            )?;
        }
        Ok(())
    }
}

/// A path as CSI requires it: absolute, and UTF-8.
pub fn absolute(path: &Path) -> Result<String> {
    let whole = std::path::absolute(path).with_context(|| format!("path {}", path.display()))?;
    let text = whole.to_str().with_context(|| format!("{} is not UTF-8", whole.display()))?;
    Ok(text.to_owned())
}

/// A size in bytes, more than 0, that fits CSI's fields.
fn parse_size(text: &str) -> Result<i64, String> {
    match i64::try_from(quantity::parse(text)?) {
        Ok(0) => Err("must be more than 0".to_owned()),
        Ok(bytes) => Ok(bytes),
        Err(_) => {
            Err(format!("{text:?} is too large for CSI, which allows up to {} bytes", i64::MAX))
        }
    }
}

/// A volume as it is printed.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    id: String,
    capacity_bytes: u64,
    /// The health that the driver reports, if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    condition: Option<Condition>,
}

#[derive(Debug, Serialize)]
struct Condition {
    abnormal: bool,
    message: String,
}

impl Row {
    fn new(volume: csi::Volume, condition: Option<csi::VolumeCondition>) -> Self {
        Self {
            name: names::name_of(&volume.volume_id).to_owned(),
            id: volume.volume_id,
            capacity_bytes: u64::try_from(volume.capacity_bytes).unwrap_or_default(),
            condition: condition
                .map(|csi::VolumeCondition { abnormal, message }| Condition { abnormal, message }),
        }
    }
}

/// The result of a command without more than an id and a state.
pub fn changed(output: Output, kind: &str, id: &str, state: &str, changed: bool) -> Result<()> {
    let value = json!({ "id": id, "state": state, "changed": changed });
    format::print_one(output, &value, |_| match changed {
        true => format!("{kind} {id} {state}"),
        false => format!("{kind} {id} is already {state}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: &str, condition: Option<bool>) -> Row {
        let volume = csi::Volume {
            volume_id: id.to_owned(),
            capacity_bytes: 1 << 30,
            ..csi::Volume::default()
        };
        let condition = condition
            .map(|abnormal| csi::VolumeCondition { abnormal, message: "no file".to_owned() });
        Row::new(volume, condition)
    }

    #[test]
    fn volumes_are_listed_with_their_condition() {
        let rows = [
            row("vol-a-0123456789abcdef", Some(false)),
            row("vol-b-0123456789abcdef", Some(true)),
            row("pvc-7", None),
        ];
        let expected = "\
NAME   ID                      CAPACITY  CONDITION
a      vol-a-0123456789abcdef       1Gi  ok
b      vol-b-0123456789abcdef       1Gi  abnormal: no file
pvc-7  pvc-7                        1Gi  unknown";
        assert_eq!(table(&rows), expected);
        assert_eq!(table(&[]), "NAME  ID  CAPACITY  CONDITION");
    }

    #[test]
    fn a_size_of_zero_or_too_large_for_csi_is_refused() {
        assert_eq!(parse_size("1Gi"), Ok(1 << 30));
        assert!(parse_size("9223372036854775808").is_err());
        assert!(parse_size("0").is_err() && parse_size("0Gi").is_err());
    }

    #[test]
    fn tracking_is_the_drivers_default_without_a_flag() {
        assert!(tracking(None).is_empty());
        assert_eq!(tracking(Some(false))["changeTracking"], "false");
    }
}
