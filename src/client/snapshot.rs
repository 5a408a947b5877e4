//! `snapshot`: cut, list and delete snapshots, ask for their blocks, and prove a delta by bytes.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::json;

use super::block_map::{BlockMap, Query, Window};
use super::cluster::{self, ClusterArgs};
use super::connection::{Connection, refused};
use super::{Options, Output, bounded, format, names, print_map, verify};
use crate::proto::csi::v1 as csi;
use crate::quantity;

#[derive(Debug, Args)]
pub struct SnapshotArgs {
    #[command(flatten)]
    pub(super) options: Options,
    #[command(subcommand)]
    command: SnapshotCommand,
}

#[derive(Debug, Subcommand)]
enum SnapshotCommand {
    /// Cut a snapshot of a volume
    Create {
        /// Name of the new snapshot; the same name again returns the same snapshot
        name: String,
        /// Volume, by name or id
        #[arg(long)]
        volume: String,
    },
    /// Show all snapshots
    List {
        /// Only those of this volume, by name or id
        #[arg(long)]
        volume: Option<String>,
    },
    /// Delete a snapshot; its id stays good as the base of a delta
    Delete {
        /// Name or id
        snapshot: String,
    },
    /// Print the extents that hold data
    Allocated {
        /// Name or id; with --namespace, name of a VolumeSnapshot
        snapshot: String,
        #[command(flatten)]
        window: WindowArgs,
        #[command(flatten)]
        cluster: Box<ClusterArgs>,
    },
    /// Print the extents that changed from one snapshot to a later one
    #[command(override_usage = DELTA_USAGE)]
    Delta {
        /// The earlier snapshot, by name or id; a deleted one by id. With --namespace, name of a VolumeSnapshot. With
        /// --base-id there is no BASE
        #[arg(value_name = "BASE")]
        first: String,
        /// The later snapshot, by name or id; with --namespace, name of a VolumeSnapshot
        #[arg(required_unless_present = "base_id", conflicts_with = "base_id")]
        target: Option<String>,
        /// CSI handle of the earlier snapshot, whose VolumeSnapshot may be gone, instead of BASE
        #[arg(long, value_name = "HANDLE")]
        base_id: Option<String>,
        #[command(flatten)]
        window: WindowArgs,
        #[command(flatten)]
        cluster: Box<ClusterArgs>,
    },
    /// Prove by bytes that a snapshot plus its delta is the later snapshot (on the driver's node)
    Verify {
        /// The earlier snapshot, by name or id
        base: String,
        /// The later snapshot, by name or id
        target: String,
    },
}

const DELTA_USAGE: &str = "csi-loopback snapshot delta [OPTIONS] <BASE> <TARGET>
       csi-loopback snapshot delta [OPTIONS] --base-id <HANDLE> <TARGET>";

#[derive(Debug, Args)]
struct WindowArgs {
    /// Offset in bytes from which on extents are wanted
    #[arg(long, default_value_t = 0, value_name = "BYTES", allow_negative_numbers = true)]
    starting_offset: i64,
    /// Extents in one message of the driver, at most; 0 leaves it to the driver
    #[arg(long, default_value_t = 0, value_name = "N", allow_negative_numbers = true)]
    max_results: i32,
    /// Extents to print, 0 for all [default: 20 in a table, all in JSON]
    #[arg(long, value_name = "N")]
    limit_rows: Option<u64>,
}

pub async fn run(args: SnapshotArgs) -> Result<ExitCode> {
    let SnapshotArgs { options, command } = args;
    let output = options.output;
    // It cleans up after itself when time runs out, so it minds the time itself.
    if let SnapshotCommand::Verify { base, target } = command {
        return verify::run(&options, &base, &target).await;
    }
    let command = match in_cluster(&options, command).await? {
        Some(command) => command,
        None => return Ok(ExitCode::SUCCESS),
    };
    bounded(&options, async move |connection| {
        let connection = &connection;
        match command {
            SnapshotCommand::Create { name, volume } => {
                create(connection, name, &volume, output).await
            }
            SnapshotCommand::List { volume } => list(connection, volume, output).await,
            SnapshotCommand::Delete { snapshot } => delete(connection, &snapshot, output).await,
            SnapshotCommand::Allocated { snapshot, window, cluster: _ } => {
                let snapshot = names::snapshot_id(connection, &snapshot).await?;
                ask(connection, Query::Allocated { snapshot }, &window, output).await
            }
            SnapshotCommand::Delta { first, target, base_id, window, cluster: _ } => {
                let is_id = base_id.is_some();
                let (base, target) = pair(first, target, base_id);
                let base = match is_id {
                    true => base,
                    false => names::snapshot_id(connection, &base).await?,
                };
                let target = names::snapshot_id(connection, &target).await?;
                ask(connection, Query::Delta { base, target }, &window, output).await
            }
            SnapshotCommand::Verify { .. } => Ok(()),
        }
    })
    .await?;
    Ok(ExitCode::SUCCESS)
}

/// Answers what is asked of a cluster; gives back what is asked of a driver.
async fn in_cluster(
    options: &Options,
    command: SnapshotCommand,
) -> Result<Option<SnapshotCommand>> {
    let (query, window, cluster) = match command {
        SnapshotCommand::Allocated { snapshot, window, cluster } if cluster.asked() => {
            (Query::Allocated { snapshot }, window, cluster)
        }
        SnapshotCommand::Delta { first, target, base_id, window, cluster } if cluster.asked() => {
            let cluster = Box::new(cluster.base_by_handle(base_id.is_some()));
            let (base, target) = pair(first, target, base_id);
            (Query::Delta { base, target }, window, cluster)
        }
        other => return Ok(Some(other)),
    };
    cluster::ask(options, *cluster, query, window.window(), window.limit_rows).await?;
    Ok(None)
}

/// Base and target, whichever of the two usages has them.
fn pair(first: String, target: Option<String>, base_id: Option<String>) -> (String, String) {
    match base_id {
        Some(base) => (base, first),
        // It is required then.
        None => (first, target.unwrap_or_default()),
    }
}

impl WindowArgs {
    fn window(&self) -> Window {
        Window { starting_offset: self.starting_offset, max_results: self.max_results }
    }
}

async fn ask(
    connection: &Connection,
    query: Query,
    args: &WindowArgs,
    output: Output,
) -> Result<()> {
    print_map::run(query, None, output, args.limit_rows, async |query| {
        BlockMap::open(connection, query, args.window()).await
    })
    .await
}

async fn create(connection: &Connection, name: String, volume: &str, output: Output) -> Result<()> {
    let request = csi::CreateSnapshotRequest {
        source_volume_id: names::volume(connection, volume).await?.volume_id,
        name,
        ..csi::CreateSnapshotRequest::default()
    };
    let response = connection.controller().create_snapshot(request).await.map_err(refused)?;
    let row = Row::from(response.into_inner().snapshot.unwrap_or_default());
    match output {
        Output::Json => format::print_json(&row),
        Output::Table => Ok(format::print(&format!(
            "snapshot {} created, {}",
            row.id,
            format::bytes(row.size_bytes)
        ))?),
    }
}

async fn list(connection: &Connection, volume: Option<String>, output: Output) -> Result<()> {
    let volume_id = match volume {
        Some(reference) => names::volume(connection, &reference).await?.volume_id,
        None => String::new(),
    };
    let mut rows = Vec::new();
    names::each_snapshot(connection, &volume_id, |snapshot| rows.push(Row::from(snapshot))).await?;
    rows.sort_by(|a, b| (&a.volume_id, &a.created, &a.id).cmp(&(&b.volume_id, &b.created, &b.id)));
    format::print_rows(output, &rows, shown)
}

fn shown(rows: &[Row]) -> String {
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            [
                row.name.clone(),
                row.id.clone(),
                row.volume.clone(),
                quantity::format(row.size_bytes),
                row.created.clone().unwrap_or_else(|| "unknown".to_owned()),
                if row.ready { "yes" } else { "no" }.to_owned(),
            ]
        })
        .collect();
    format::table(["NAME", "ID", "VOLUME", "SIZE", "CREATED", "READY"], &["SIZE"], &rows)
}

async fn delete(connection: &Connection, reference: &str, output: Output) -> Result<()> {
    let snapshot_id = names::snapshot_id(connection, reference).await?;
    let request = csi::DeleteSnapshotRequest {
        snapshot_id: snapshot_id.clone(),
        ..csi::DeleteSnapshotRequest::default()
    };
    connection.controller().delete_snapshot(request).await.map_err(refused)?;
    match output {
        Output::Json => format::print_json(&json!({ "id": snapshot_id, "state": "deleted" })),
        Output::Table => Ok(format::print(&format!("snapshot {snapshot_id} deleted"))?),
    }
}

/// A snapshot as it is printed.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    id: String,
    /// The volume's name.
    volume: String,
    volume_id: String,
    size_bytes: u64,
    created: Option<String>,
    ready: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    group_snapshot_id: String,
}

impl From<csi::Snapshot> for Row {
    fn from(snapshot: csi::Snapshot) -> Self {
        Self {
            name: names::name_of(&snapshot.snapshot_id).to_owned(),
            id: snapshot.snapshot_id,
            volume: names::name_of(&snapshot.source_volume_id).to_owned(),
            volume_id: snapshot.source_volume_id,
            size_bytes: u64::try_from(snapshot.size_bytes).unwrap_or_default(),
            created: format::time(snapshot.creation_time.as_ref()),
            ready: snapshot.ready_to_use,
            group_snapshot_id: snapshot.group_snapshot_id,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_are_listed_with_volume_and_time() {
        let row = Row::from(csi::Snapshot {
            size_bytes: 1 << 30,
            snapshot_id: "snap-a-0123456789abcdef".to_owned(),
            source_volume_id: "vol-v-0123456789abcdef".to_owned(),
            creation_time: Some(prost_types::Timestamp { seconds: 1_763_673_303, nanos: 0 }),
            ready_to_use: true,
            ..csi::Snapshot::default()
        });
        let expected = "\
NAME  ID                       VOLUME  SIZE  CREATED                   READY
a     snap-a-0123456789abcdef  v        1Gi  2025-11-20T21:15:03.000Z  yes";
        assert_eq!(shown(&[row]), expected);
    }
}
