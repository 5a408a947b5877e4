//! `volume`: what a container orchestrator asks of a driver for one volume, one verb for each call.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::json;

use super::capability::CapabilityArgs;
use super::connection::{Connection, refused};
use super::inline::{self, InlineCommand};
use super::stats::stats;
use super::{Options, Output, bounded, format, names};
use crate::proto::csi::v1 as csi;
use crate::quantity;
use csi::node_service_capability::{Rpc, Type, rpc};

#[derive(Debug, Args)]
pub struct VolumeArgs {
    #[command(flatten)]
    pub(super) options: Options,
    #[command(subcommand)]
    command: VolumeCommand,
}

#[derive(Debug, Subcommand)]
enum VolumeCommand {
    /// Make a volume: empty, from a snapshot, or a clone of another volume
    Create(CreateArgs),
    /// Show all volumes
    List,
    /// Delete a volume; its snapshots stay
    Delete {
        /// Name or id
        volume: String,
    },
    /// Grow a volume, and with --path what sits on it
    Expand {
        /// Name or id
        volume: String,
        /// New size in bytes or as 2Gi
        #[arg(long, value_parser = parse_size)]
        size: i64,
        /// A path where the volume is staged or published: grows the filesystem too
        #[arg(long)]
        path: Option<PathBuf>,
        /// The filesystem is a container runtime's to grow; without it the driver knows whose it is
        #[arg(long, requires = "path")]
        defer_fs_ops: bool,
    },
    /// Attach, make the filesystem if there is none, and mount at the staging path
    Stage {
        /// Name or id
        volume: String,
        /// Directory for the driver; made when missing
        #[arg(long, value_name = "PATH")]
        staging: PathBuf,
        #[command(flatten)]
        capability: CapabilityArgs,
    },
    /// Show a staged volume at a target path
    Publish {
        /// Name or id
        volume: String,
        /// Where the volume is staged
        #[arg(long, value_name = "PATH")]
        staging: PathBuf,
        /// Directory (filesystem) or file (block) that the driver makes
        #[arg(long, value_name = "PATH")]
        target: PathBuf,
        /// No writes through this path
        #[arg(long)]
        read_only: bool,
        /// Have a container runtime mount the filesystem, and nothing on this host
        #[arg(long)]
        defer_fs_ops: bool,
        #[command(flatten)]
        capability: CapabilityArgs,
    },
    /// Show how full a volume is where it is in use, and whether it is well
    Stats {
        /// Name or id
        volume: String,
        /// A path where the volume is staged or published
        #[arg(long, value_name = "PATH")]
        path: PathBuf,
        /// As it was published; without it the driver knows who has mounted it
        #[arg(long)]
        defer_fs_ops: bool,
    },
    /// Remove a volume from a target path
    Unpublish {
        /// Name or id
        volume: String,
        #[arg(long, value_name = "PATH")]
        target: PathBuf,
        /// As it was published; without it the driver knows who has mounted it
        #[arg(long)]
        defer_fs_ops: bool,
    },
    /// Unmount from the staging path and detach
    Unstage {
        /// Name or id
        volume: String,
        #[arg(long, value_name = "PATH")]
        staging: PathBuf,
    },
    /// Volumes that live from one publish to its unpublish, as those declared in pods
    #[command(subcommand)]
    Inline(InlineCommand),
}

#[derive(Debug, Args)]
struct CreateArgs {
    /// Name of the new volume; the same name again returns the same volume
    name: String,
    /// At least this many bytes, or as 1Gi; the driver's default when left out
    #[arg(long, value_parser = parse_size)]
    size: Option<i64>,
    /// At most this many bytes, or as 2Gi
    #[arg(long, value_parser = parse_size)]
    limit: Option<i64>,
    /// Snapshot to start from, by name or id
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "from_volume")]
    from_snapshot: Option<String>,
    /// Volume to clone, by name or id
    #[arg(long, value_name = "VOLUME")]
    from_volume: Option<String>,
    /// Whether snapshots of the volume record what changed
    #[arg(long, value_name = "true|false")]
    change_tracking: Option<bool>,
    #[command(flatten)]
    capability: CapabilityArgs,
}

pub async fn run(args: VolumeArgs) -> Result<ExitCode> {
    let VolumeArgs { options, command } = args;
    let output = options.output;
    bounded(&options, async move |connection| {
        let connection = &connection;
        match command {
            VolumeCommand::Create(args) => create(connection, args, output).await,
            VolumeCommand::List => list(connection, output).await,
            VolumeCommand::Delete { volume } => delete(connection, &volume, output).await,
            VolumeCommand::Expand { volume, size, path, defer_fs_ops } => {
                let where_used = path.as_deref().map(|path| (path, defer_fs_ops));
                expand(connection, &volume, size, where_used, output).await
            }
            VolumeCommand::Stage { volume, staging, capability } => {
                stage(connection, &volume, &staging, &capability, output).await
            }
            VolumeCommand::Publish {
                volume,
                staging,
                target,
                read_only,
                defer_fs_ops,
                capability,
            } => {
                let how = Publish { staging, target, read_only, defer_fs_ops, capability };
                publish(connection, &volume, how, output).await
            }
            VolumeCommand::Stats { volume, path, defer_fs_ops } => {
                let volume_id = names::volume(connection, &volume).await?.volume_id;
                stats(connection, volume_id, &path, defer_fs_ops, output).await
            }
            VolumeCommand::Unpublish { volume, target, defer_fs_ops } => {
                unpublish(connection, &volume, &target, defer_fs_ops, output).await
            }
            VolumeCommand::Unstage { volume, staging } => {
                unstage(connection, &volume, &staging, output).await
            }
            VolumeCommand::Inline(command) => inline::run(connection, command, output).await,
        }
    })
    .await?;
    Ok(ExitCode::SUCCESS)
}

async fn create(connection: &Connection, args: CreateArgs, output: Output) -> Result<()> {
    let CreateArgs { name, size, limit, from_snapshot, from_volume, change_tracking, capability } =
        args;
    let source = source(connection, from_snapshot, from_volume).await?;
    let request = csi::CreateVolumeRequest {
        name,
        capacity_range: (size.is_some() || limit.is_some()).then(|| csi::CapacityRange {
            required_bytes: size.unwrap_or_default(),
            limit_bytes: limit.unwrap_or_default(),
        }),
        volume_capabilities: vec![capability.capability()],
        parameters: tracking(change_tracking).into_iter().collect(),
        volume_content_source: source.map(|kind| csi::VolumeContentSource { r#type: Some(kind) }),
        ..csi::CreateVolumeRequest::default()
    };
    let response = connection.controller().create_volume(request).await.map_err(refused)?;
    let row = Row::new(response.into_inner().volume.unwrap_or_default(), None);
    match output {
        Output::Json => format::print_json(&row),
        Output::Table => Ok(format::print(&format!(
            "volume {} created, {}",
            row.id,
            format::bytes(row.capacity_bytes)
        ))?),
    }
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
    format::print_rows(output, &rows, shown)
}

fn shown(rows: &[Row]) -> String {
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

async fn delete(connection: &Connection, reference: &str, output: Output) -> Result<()> {
    let volume_id = names::volume(connection, reference).await?.volume_id;
    let request = csi::DeleteVolumeRequest {
        volume_id: volume_id.clone(),
        ..csi::DeleteVolumeRequest::default()
    };
    connection.controller().delete_volume(request).await.map_err(refused)?;
    done(output, &volume_id, "deleted")
}

async fn expand(
    connection: &Connection,
    reference: &str,
    size: i64,
    where_used: Option<(&Path, bool)>,
    output: Output,
) -> Result<()> {
    let volume_id = names::volume(connection, reference).await?.volume_id;
    let capacity_range = Some(csi::CapacityRange { required_bytes: size, limit_bytes: 0 });
    let request = csi::ControllerExpandVolumeRequest {
        volume_id: volume_id.clone(),
        capacity_range,
        ..csi::ControllerExpandVolumeRequest::default()
    };
    let grown = connection.controller().controller_expand_volume(request).await.map_err(refused)?;
    let csi::ControllerExpandVolumeResponse { capacity_bytes, node_expansion_required } =
        grown.into_inner();
    if let Some((path, defer_fs_ops)) = where_used {
        let request = csi::NodeExpandVolumeRequest {
            volume_id: volume_id.clone(),
            volume_path: absolute(path)?,
            capacity_range,
            defer_fs_ops,
            ..csi::NodeExpandVolumeRequest::default()
        };
        connection.node().node_expand_volume(request).await.map_err(refused)?;
    }
    let open = node_expansion_required && where_used.is_none();
    match output {
        Output::Json => format::print_json(&json!({
            "id": volume_id, "capacity_bytes": capacity_bytes, "node_expansion_required": open,
        })),
        Output::Table => {
            let size = format::bytes(u64::try_from(capacity_bytes).unwrap_or_default());
            let hint = if open {
                "; where it is in use, `volume expand --path` grows what sits on it"
            } else {
                ""
            };
            Ok(format::print(&format!("volume {volume_id} has {size}{hint}"))?)
        }
    }
}

async fn stage(
    connection: &Connection,
    reference: &str,
    staging: &Path,
    capability: &CapabilityArgs,
    output: Output,
) -> Result<()> {
    let volume = names::volume(connection, reference).await?;
    // CSI NodeStageVolume: the directory is the caller's to make.
    fs::create_dir_all(staging).with_context(|| format!("make {}", staging.display()))?;
    let request = csi::NodeStageVolumeRequest {
        volume_id: volume.volume_id.clone(),
        staging_target_path: absolute(staging)?,
        volume_capability: Some(capability.capability()),
        volume_context: volume.volume_context,
        ..csi::NodeStageVolumeRequest::default()
    };
    connection.node().node_stage_volume(request).await.map_err(refused)?;
    done(output, &volume.volume_id, "staged")
}

/// How to publish a volume.
struct Publish {
    staging: PathBuf,
    target: PathBuf,
    read_only: bool,
    defer_fs_ops: bool,
    capability: CapabilityArgs,
}

async fn publish(
    connection: &Connection,
    reference: &str,
    how: Publish,
    output: Output,
) -> Result<()> {
    let Publish { staging, target, read_only, defer_fs_ops, capability } = how;
    if defer_fs_ops {
        check_defers(connection).await?;
    }
    let volume = names::volume(connection, reference).await?;
    make_parent(&target)?;
    let request = csi::NodePublishVolumeRequest {
        volume_id: volume.volume_id.clone(),
        staging_target_path: absolute(&staging)?,
        target_path: absolute(&target)?,
        volume_capability: Some(capability.capability()),
        readonly: read_only,
        volume_context: volume.volume_context,
        defer_fs_ops,
        ..csi::NodePublishVolumeRequest::default()
    };
    connection.node().node_publish_volume(request).await.map_err(refused)?;
    done(output, &volume.volume_id, "published")
}

/// That the driver knows `defer_fs_ops`: one that does not passes the field over, and mounts on this host.
pub async fn check_defers(connection: &Connection) -> Result<()> {
    let request = csi::NodeGetCapabilitiesRequest {};
    let answer = connection.node().node_get_capabilities(request).await.map_err(refused)?;
    ensure!(
        defers(answer.get_ref()),
        "--defer-fs-ops: the driver does not have the capability DEFER_FS_OPS; start it with --enable-defer-fs-ops, or upgrade it"
    );
    Ok(())
}

fn defers(answer: &csi::NodeGetCapabilitiesResponse) -> bool {
    let wanted = Some(Type::Rpc(Rpc { r#type: rpc::Type::DeferFsOps.into() }));
    answer.capabilities.iter().any(|one| one.r#type == wanted)
}

/// CSI NodePublishVolume: the parent is the caller's to make, the target the driver's.
pub fn make_parent(target: &Path) -> Result<()> {
    match target.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        Some(parent) => {
            fs::create_dir_all(parent).with_context(|| format!("make {}", parent.display()))
        }
        None => Ok(()),
    }
}

async fn unpublish(
    connection: &Connection,
    reference: &str,
    target: &Path,
    defer_fs_ops: bool,
    output: Output,
) -> Result<()> {
    let volume_id = names::volume(connection, reference).await?.volume_id;
    let request = csi::NodeUnpublishVolumeRequest {
        volume_id: volume_id.clone(),
        target_path: absolute(target)?,
        defer_fs_ops,
    };
    connection.node().node_unpublish_volume(request).await.map_err(refused)?;
    done(output, &volume_id, "unpublished")
}

async fn unstage(
    connection: &Connection,
    reference: &str,
    staging: &Path,
    output: Output,
) -> Result<()> {
    let volume_id = names::volume(connection, reference).await?.volume_id;
    let request = csi::NodeUnstageVolumeRequest {
        volume_id: volume_id.clone(),
        staging_target_path: absolute(staging)?,
    };
    connection.node().node_unstage_volume(request).await.map_err(refused)?;
    done(output, &volume_id, "unstaged")
}

pub fn done(output: Output, id: &str, what: &str) -> Result<()> {
    match output {
        Output::Json => format::print_json(&json!({ "id": id, "state": what })),
        Output::Table => Ok(format::print(&format!("volume {id} {what}"))?),
    }
}

/// A path as CSI wants it: absolute, and text.
pub fn absolute(path: &Path) -> Result<String> {
    let whole = std::path::absolute(path).with_context(|| format!("path {}", path.display()))?;
    let text = whole.to_str().with_context(|| format!("{} is not UTF-8", whole.display()))?;
    Ok(text.to_owned())
}

/// A size in bytes that CSI's fields hold.
fn parse_size(text: &str) -> Result<i64, String> {
    let bytes = quantity::parse(text)?;
    i64::try_from(bytes).map_err(|_| format!("{bytes} bytes are more than CSI can say"))
}

/// A volume as it is printed.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    id: String,
    capacity_bytes: u64,
    /// What the driver says of its health, if it does.
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
        assert_eq!(shown(&rows), expected);
        assert_eq!(shown(&[]), "NAME  ID  CAPACITY  CONDITION");
    }

    #[test]
    fn a_driver_of_csi_1_13_or_with_the_former_numbers_does_not_defer() {
        let with = |numbers: &[i32]| {
            let rpc = |number: &i32| Some(Type::Rpc(Rpc { r#type: *number }));
            let capability = |number| csi::NodeServiceCapability { r#type: rpc(number) };
            let capabilities = numbers.iter().map(capability).collect();
            defers(&csi::NodeGetCapabilitiesResponse { capabilities })
        };
        assert!(with(&[1, 2857]));
        assert!(!with(&[]) && !with(&[1, 7, 8]) && !with(&[1, 7, 8, 9]));
    }

    #[test]
    fn a_size_too_large_for_csi_is_refused() {
        assert_eq!(parse_size("1Gi"), Ok(1 << 30));
        assert!(parse_size("9223372036854775808").is_err());
    }

    #[test]
    fn tracking_is_left_to_the_driver_unless_asked() {
        assert!(tracking(None).is_empty());
        assert_eq!(tracking(Some(false))["changeTracking"], "false");
    }
}
