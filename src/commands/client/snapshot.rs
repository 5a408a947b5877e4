//! `snapshot`: take, list and delete snapshots, list and draw their blocks, and verify them by
//! their bytes.

use std::collections::HashMap;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use serde::Serialize;
use tonic::Code;

use super::block_map::{Consumer, Query, Window};
use super::cluster::{self, ClusterArgs};
use super::connection::{Connection, refused};
use super::group::{self, GroupCommand};
use super::map::{self, MapArgs};
use super::mount::{self, MountArgs};
use super::names::Subject;
use super::print_map::Printer;
use super::verify::{self, VerifyArgs};
use super::volume::{Created, changed};
use super::{Options, Output, base, bounded, format, names};
use common::quantity;
use grpc::proto::admin::v1 as admin;
use grpc::proto::csi::v1 as csi;

#[derive(Debug, Args)]
pub struct SnapshotArgs {
    #[command(flatten)]
    pub(super) options: Options,
    #[command(subcommand)]
    command: SnapshotCommand,
}

#[derive(Debug, Subcommand)]
enum SnapshotCommand {
    /// Take a snapshot of a volume
    #[command(after_help = "Example:
  csi-loopback snapshot create monday --volume data")]
    Create {
        /// Name of the new snapshot
        name: String,
        /// Volume, by name or id
        #[arg(long)]
        volume: String,
    },
    /// List snapshots, or with --bases all that can be the base of a delta
    #[command(after_help = "Examples:
  csi-loopback snapshot list --volume data
  csi-loopback snapshot list --bases --volume data")]
    List {
        /// Only snapshots of this volume, by name or id
        #[arg(long)]
        volume: Option<String>,
        /// List usable bases, deleted snapshots included, with their expiry
        #[arg(long)]
        bases: bool,
    },
    /// Delete a snapshot; its id remains a valid base of deltas
    #[command(after_help = "Example:
  csi-loopback snapshot delete monday")]
    Delete {
        /// Name or id
        snapshot: String,
        /// Exit with 0 if the snapshot does not exist
        #[arg(long)]
        if_exists: bool,
    },
    /// List the extents that hold data
    #[command(after_help = "Examples:
  csi-loopback snapshot allocated monday
  csi-loopback snapshot allocated monday --starting-offset 1Gi --output ndjson
  csi-loopback snapshot allocated monday --namespace demo")]
    Allocated {
        /// Name or id; with --namespace, name of a VolumeSnapshot
        snapshot: String,
        #[command(flatten)]
        window: WindowArgs,
        #[command(flatten)]
        cluster: Box<ClusterArgs>,
    },
    /// List the extents that changed from one snapshot to a later one
    #[command(override_usage = DELTA_USAGE, after_help = "Examples:
  csi-loopback snapshot delta monday tuesday
  csi-loopback snapshot delta snap-monday-d6c160afa2a7f59a tuesday --output json
  csi-loopback snapshot delta monday tuesday --namespace demo --api session")]
    Delta {
        /// Earlier snapshot, by name or id; a deleted one by id
        #[arg(value_name = "BASE")]
        first: String,
        /// Later snapshot, by name or id; with --namespace, name of a VolumeSnapshot
        #[arg(required_unless_present = "base_id", conflicts_with = "base_id")]
        target: Option<String>,
        /// CSI handle of the earlier snapshot, instead of BASE
        #[arg(long, value_name = "HANDLE")]
        base_id: Option<String>,
        #[command(flatten)]
        window: WindowArgs,
        #[command(flatten)]
        cluster: Box<ClusterArgs>,
    },
    /// Draw allocated and changed blocks of snapshots as a map
    #[command(after_help = "Examples:
  csi-loopback snapshot map monday
  csi-loopback snapshot map monday tuesday wednesday
  csi-loopback snapshot map --volume data --file map.svg")]
    Map(Box<MapArgs>),
    /// Verify by all bytes that the listed blocks are complete
    #[command(override_usage = VERIFY_USAGE, after_help = "Examples:
  csi-loopback snapshot verify monday tuesday
  csi-loopback snapshot verify monday --sample 5
  csi-loopback snapshot verify monday tuesday --namespace demo --source /dev/xvda --target /dev/xvdb")]
    Verify(Box<VerifyArgs>),
    /// Show the files of a snapshot in a directory, read-only, until a signal
    #[command(after_help = "Example:
  csi-loopback snapshot mount monday /mnt")]
    Mount(MountArgs),
    /// Take, list and delete snapshots of several volumes
    #[command(subcommand)]
    Group(GroupCommand),
}

const DELTA_USAGE: &str = "csi-loopback snapshot delta [OPTIONS] <BASE> <TARGET>
       csi-loopback snapshot delta [OPTIONS] --base-id <HANDLE> <TARGET>";

const VERIFY_USAGE: &str = "csi-loopback snapshot verify [OPTIONS] <TARGET>
       csi-loopback snapshot verify [OPTIONS] <BASE> <TARGET>";

#[derive(Debug, Args)]
struct WindowArgs {
    /// First byte to list, such as 4096 or 1Gi
    #[arg(long, default_value = "0", value_name = "SIZE", value_parser = offset, allow_negative_numbers = true)]
    starting_offset: i64,
    /// Maximum number of extents per message; 0 for the driver's default
    #[arg(long, default_value_t = 0, value_name = "N", allow_negative_numbers = true)]
    max_results: i32,
    /// Maximum number of extents to print, 0 for all [default: 20 in a table, else 0]
    #[arg(long, value_name = "N")]
    limit_rows: Option<u64>,
}

/// An offset in bytes. A negative number passes: it tests how a driver refuses it.
fn offset(text: &str) -> Result<i64, String> {
    if text.starts_with('-') {
        return text.parse().map_err(|_| format!("{text:?} is not a size"));
    }
    let bytes = quantity::parse(text)?;
    i64::try_from(bytes).map_err(|_| format!("{text:?} is too large for CSI"))
}

pub async fn run(args: SnapshotArgs) -> Result<ExitCode> {
    let SnapshotArgs { options, command } = args;
    let command = match command {
        SnapshotCommand::Verify(args) => return verify::run(&options, *args).await,
        SnapshotCommand::Map(args) => return map::run(&options, *args).await,
        SnapshotCommand::Mount(args) => return mount::run(&options, args).await,
        other => other,
    };
    if let Some(command) = in_cluster(&options, command).await? {
        let output = options.print.output;
        bounded(&options, async |connection| on_driver(&connection, command, output).await).await?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn on_driver(
    connection: &Connection,
    command: SnapshotCommand,
    output: Output,
) -> Result<()> {
    match command {
        SnapshotCommand::Create { name, volume } => create(connection, name, &volume, output).await,
        SnapshotCommand::List { volume, bases: false } => list(connection, volume, output).await,
        SnapshotCommand::List { volume, bases: true } => {
            list_bases(connection, volume, output).await
        }
        SnapshotCommand::Delete { snapshot, if_exists } => {
            delete(connection, &snapshot, if_exists, output).await
        }
        SnapshotCommand::Group(command) => group::run(connection, command, output).await,
        SnapshotCommand::Allocated { snapshot, window, cluster: _ } => {
            let snapshot = names::subject(connection, &snapshot).await?;
            list_blocks(connection, None, &snapshot, &window, output).await
        }
        SnapshotCommand::Delta { first, target, base_id, window, cluster: _ } => {
            let is_id = base_id.is_some();
            let (base, target) = pair(first, target, base_id);
            let base = match is_id {
                true => Subject::with_id(base),
                false => names::subject(connection, &base).await?,
            };
            let target = names::subject(connection, &target).await?;
            list_blocks(connection, Some(&base), &target, &window, output).await
        }
        SnapshotCommand::Map(_) | SnapshotCommand::Mount(_) | SnapshotCommand::Verify(_) => {
            bail!("this command runs without a shared connection")
        }
    }
}

/// Lists blocks through Kubernetes; returns the command if it is for a driver.
async fn in_cluster(
    options: &Options,
    command: SnapshotCommand,
) -> Result<Option<SnapshotCommand>> {
    let (query, window, cluster) = match command {
        SnapshotCommand::Allocated { snapshot, window, cluster } if cluster.is_requested() => {
            (Query::Allocated { snapshot }, window, cluster)
        }
        SnapshotCommand::Delta { first, target, base_id, window, cluster }
            if cluster.is_requested() =>
        {
            let cluster = Box::new(cluster.base_by_handle(base_id.is_some()));
            let (base, target) = pair(first, target, base_id);
            (Query::Delta { base, target }, window, cluster)
        }
        other => return Ok(Some(other)),
    };
    let printer =
        Printer::new(options.print.output, &query, cluster.namespace(), window.limit_rows);
    cluster::list(options, *cluster, query, window.window(), printer).await?;
    Ok(None)
}

/// Base and target of either usage.
fn pair(first: String, target: Option<String>, base_id: Option<String>) -> (String, String) {
    match base_id {
        Some(base) => (base, first),
        // clap requires TARGET then.
        None => (first, target.unwrap_or_default()),
    }
}

impl WindowArgs {
    fn window(&self) -> Window {
        Window { starting_offset: self.starting_offset, max_results: self.max_results }
    }
}

async fn list_blocks(
    connection: &Connection,
    base: Option<&Subject>,
    target: &Subject,
    args: &WindowArgs,
    output: Output,
) -> Result<()> {
    let printer = Printer::new(output, &names::query(base, target), None, args.limit_rows);
    printer.consume(names::listing(connection, base, target, args.window()).await?).await
}

async fn create(connection: &Connection, name: String, volume: &str, output: Output) -> Result<()> {
    let source_volume_id = names::volume(connection, volume).await?.volume_id;
    let previous = names::find_snapshot(connection, &name).await?;
    let request = csi::CreateSnapshotRequest {
        secrets: connection.secrets(),
        source_volume_id,
        name,
        ..csi::CreateSnapshotRequest::default()
    };
    let response = connection.controller().create_snapshot(request).await.map_err(refused)?;
    let snapshot = response.into_inner().snapshot.unwrap_or_default();
    let existed = previous.is_some_and(|previous| previous.snapshot_id == snapshot.snapshot_id);
    let created = Created { row: Row::from(snapshot), changed: !existed };
    format::print_one(output, &created, |Created { row, changed }| {
        let state = if *changed { "created" } else { "exists already" };
        format!("snapshot {} {state}, {}", row.id, format::bytes(row.size_bytes))
    })
}

async fn list(connection: &Connection, volume: Option<String>, output: Output) -> Result<()> {
    let volume_id = match volume {
        Some(reference) => names::volume(connection, &reference).await?.volume_id,
        None => String::new(),
    };
    let found = names::snapshots_in_order(connection, &volume_id).await?;
    let mut rows: Vec<Row> = found.into_iter().map(Row::from).collect();
    // The rows of a volume are neighbors.
    for of_volume in rows.chunk_by_mut(|a, b| a.volume_id == b.volume_id) {
        // Other drivers lack the service: one call shows that.
        if add_sizes(connection, of_volume).await == Some(Code::Unimplemented) {
            break;
        }
    }
    format::print_rows(output, &rows, table)
}

/// Adds the sizes that this driver knows to the rows of a volume. Returns why it cannot.
async fn add_sizes(connection: &Connection, rows: &mut [Row]) -> Option<Code> {
    let volume_id = rows.first()?.volume_id.clone();
    let request = admin::ListBasesRequest { volume_id, include_sizes: true, ..Default::default() };
    let bases = match base::list_all(connection, request).await {
        Ok(bases) => bases,
        Err(status) => return Some(status.code()),
    };
    let mut sizes: HashMap<_, _> = bases
        .into_iter()
        .map(|base| (base.snapshot_id, (base.allocated_bytes, base.changed_bytes)))
        .collect();
    for row in rows {
        (row.allocated_bytes, row.changed_bytes) = sizes.remove(&row.id).unwrap_or_default();
    }
    None
}

/// The bases of one volume or of all volumes.
async fn list_bases(connection: &Connection, volume: Option<String>, output: Output) -> Result<()> {
    let mut volume_ids = Vec::new();
    match volume {
        Some(reference) => volume_ids.push(names::volume(connection, &reference).await?.volume_id),
        None => {
            names::each_volume(connection, |entry| {
                volume_ids.extend(entry.volume.map(|volume| volume.volume_id));
            })
            .await?;
        }
    }
    base::print_of_volumes(connection, volume_ids, output).await
}

pub fn table(rows: &[Row]) -> String {
    let known = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), quantity::format);
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            [
                row.name.clone(),
                row.id.clone(),
                row.volume.clone(),
                quantity::format(row.size_bytes),
                known(row.allocated_bytes),
                known(row.changed_bytes),
                row.created.clone().unwrap_or_else(|| "unknown".to_owned()),
                if row.ready { "yes" } else { "no" }.to_owned(),
            ]
        })
        .collect();
    let header = ["NAME", "ID", "VOLUME", "SIZE", "ALLOCATED", "CHANGED", "CREATED", "READY"];
    format::table(header, &["SIZE", "ALLOCATED", "CHANGED"], &rows)
}

async fn delete(
    connection: &Connection,
    reference: &str,
    if_exists: bool,
    output: Output,
) -> Result<()> {
    const KIND: &str = "snapshot";
    let snapshot = match if_exists {
        true => names::find_snapshot(connection, reference).await?,
        false => Some(names::existing_snapshot(connection, reference).await?),
    };
    let Some(snapshot) = snapshot else {
        return changed(output, KIND, reference, "deleted", false);
    };
    let snapshot_id = snapshot.snapshot_id;
    let request = csi::DeleteSnapshotRequest {
        secrets: connection.secrets(),
        snapshot_id: snapshot_id.clone(),
    };
    connection.controller().delete_snapshot(request).await.map_err(refused)?;
    changed(output, KIND, &snapshot_id, "deleted", true)
}

/// A snapshot as it is printed.
#[derive(Debug, Serialize)]
pub struct Row {
    pub name: String,
    pub id: String,
    /// The volume's name.
    pub volume: String,
    pub volume_id: String,
    pub size_bytes: u64,
    /// Bytes of allocated blocks, and of those that changed since the previous base; `None` from
    /// other drivers.
    pub allocated_bytes: Option<u64>,
    pub changed_bytes: Option<u64>,
    pub created: Option<String>,
    pub ready: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub group_snapshot_id: String,
}

impl From<csi::Snapshot> for Row {
    fn from(snapshot: csi::Snapshot) -> Self {
        Self {
            name: names::name_of(&snapshot.snapshot_id).to_owned(),
            id: snapshot.snapshot_id,
            volume: names::name_of(&snapshot.source_volume_id).to_owned(),
            volume_id: snapshot.source_volume_id,
            size_bytes: u64::try_from(snapshot.size_bytes).unwrap_or_default(),
            allocated_bytes: None,
            changed_bytes: None,
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
        let row = Row { allocated_bytes: Some(1 << 20), ..row };
        let expected = "\
NAME  ID                       VOLUME  SIZE  ALLOCATED  CHANGED  CREATED                   READY
a     snap-a-0123456789abcdef  v        1Gi        1Mi        -  2025-11-20T21:15:03.000Z  yes";
        assert_eq!(table(&[row]), expected);
    }

    #[test]
    fn an_offset_is_a_size_or_a_negative_number() {
        assert_eq!((offset("1Mi"), offset("4096"), offset("-1")), (Ok(1 << 20), Ok(4096), Ok(-1)));
        for wrong in ["", "-", "-1x", "banana", "16384Pi"] {
            assert!(offset(wrong).is_err(), "{wrong}");
        }
    }
}
