//! `snapshot group`: snapshots of several volumes at one point in time (CSI GroupController).

use std::collections::BTreeSet;

use anyhow::Result;
use clap::Subcommand;
use serde::Serialize;

use super::connection::{Connection, refused};
use super::names::{self, Search};
use super::snapshot::{self, Row};
use super::volume::changed;
use super::{Output, format};
use grpc::proto::csi::v1 as csi;

#[derive(Debug, Subcommand)]
pub enum GroupCommand {
    /// Take a snapshot of several volumes at one point in time
    #[command(after_help = "Example:
  csi-loopback snapshot group create nightly --volume data --volume wal")]
    Create {
        /// Name of the new group snapshot
        name: String,
        /// Volume, by name or id; repeatable
        #[arg(long, required = true)]
        volume: Vec<String>,
    },
    /// List the snapshots of a group, or all that belong to a group
    #[command(after_help = "Example:
  csi-loopback snapshot group list nightly")]
    List {
        /// Name or id of a group snapshot
        group: Option<String>,
    },
    /// Delete a group snapshot with all its snapshots
    #[command(after_help = "Example:
  csi-loopback snapshot group delete nightly")]
    Delete {
        /// Name or id of the group snapshot
        group: String,
        /// Exit with 0 if the group snapshot does not exist
        #[arg(long)]
        if_exists: bool,
    },
}

pub async fn run(connection: &Connection, command: GroupCommand, output: Output) -> Result<()> {
    match command {
        GroupCommand::Create { name, volume } => create(connection, name, &volume, output).await,
        GroupCommand::List { group } => {
            let mut rows = members(connection).await?;
            if let Some(reference) = group {
                let id = group_id(&rows, &reference)?;
                rows.retain(|row| Some(&row.group_snapshot_id) == id.as_ref());
                anyhow::ensure!(!rows.is_empty(), "{}", missing(&reference));
            }
            format::print_rows(output, &rows, snapshot::table)
        }
        GroupCommand::Delete { group, if_exists } => {
            delete(connection, &group, if_exists, output).await
        }
    }
}

async fn create(
    connection: &Connection,
    name: String,
    volumes: &[String],
    output: Output,
) -> Result<()> {
    let mut source_volume_ids = Vec::with_capacity(volumes.len());
    for reference in volumes {
        source_volume_ids.push(names::volume(connection, reference).await?.volume_id);
    }
    let previous = group_id(&members(connection).await?, &name)?;
    let request = csi::CreateVolumeGroupSnapshotRequest {
        secrets: connection.secrets(),
        name,
        source_volume_ids,
        ..csi::CreateVolumeGroupSnapshotRequest::default()
    };
    let response = connection.group_controller().create_volume_group_snapshot(request).await;
    let group = response.map_err(refused)?.into_inner().group_snapshot.unwrap_or_default();
    let created = Created {
        changed: previous.as_ref() != Some(&group.group_snapshot_id),
        name: names::name_of(&group.group_snapshot_id).to_owned(),
        id: group.group_snapshot_id,
        created: format::time(group.creation_time.as_ref()),
        snapshots: group.snapshots.into_iter().map(Row::from).collect(),
    };
    format::print_one(output, &created, |created| {
        let state = if created.changed { "created" } else { "exists already" };
        let table = snapshot::table(&created.snapshots);
        format!("group snapshot {} {state}\n\n{table}", created.id)
    })
}

#[derive(Debug, Serialize)]
struct Created {
    name: String,
    id: String,
    created: Option<String>,
    snapshots: Vec<Row>,
    changed: bool,
}

async fn delete(
    connection: &Connection,
    reference: &str,
    if_exists: bool,
    output: Output,
) -> Result<()> {
    const KIND: &str = "group snapshot";
    let rows = members(connection).await?;
    let Some(id) = group_id(&rows, reference)? else {
        anyhow::ensure!(if_exists, "{}", missing(reference));
        return changed(output, KIND, reference, "deleted", false);
    };
    let of_group = rows.into_iter().filter(|row| row.group_snapshot_id == id);
    let request = csi::DeleteVolumeGroupSnapshotRequest {
        secrets: connection.secrets(),
        group_snapshot_id: id.clone(),
        snapshot_ids: of_group.map(|row| row.id).collect(),
    };
    connection.group_controller().delete_volume_group_snapshot(request).await.map_err(refused)?;
    changed(output, KIND, &id, "deleted", true)
}

/// The snapshots that belong to a group, in the order of group and volume.
async fn members(connection: &Connection) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    names::each_snapshot(connection, "", |snapshot| {
        if !snapshot.group_snapshot_id.is_empty() {
            rows.push(Row::from(snapshot));
        }
    })
    .await?;
    rows.sort_by(|a, b| {
        (&a.group_snapshot_id, &a.volume_id).cmp(&(&b.group_snapshot_id, &b.volume_id))
    });
    Ok(rows)
}

/// The id of the group with this name or id, if a snapshot belongs to it.
///
/// # Errors
/// Several groups have that name.
fn group_id(rows: &[Row], reference: &str) -> Result<Option<String>> {
    if reference.is_empty() {
        return Ok(None);
    }
    let mut search = Search::new("group snapshot", reference)?;
    let ids: BTreeSet<&String> = rows.iter().map(|row| &row.group_snapshot_id).collect();
    ids.into_iter().for_each(|id| search.offer(id.clone(), id.clone()));
    search.finish()
}

fn missing(reference: &str) -> String {
    format!(
        "no group snapshot named {reference:?}; `csi-loopback snapshot group list` lists their snapshots"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(group: &str) -> Row {
        Row::from(csi::Snapshot { group_snapshot_id: group.to_owned(), ..csi::Snapshot::default() })
    }

    #[test]
    fn a_group_is_found_by_name_or_id() {
        const A: &str = "group-a-0123456789abcdef";
        const OTHER: &str = "group-a-fedcba9876543210";
        let rows = [row(A), row(A), row("group-b-0123456789abcdef")];
        assert_eq!(group_id(&rows, "a").unwrap().as_deref(), Some(A));
        assert_eq!(group_id(&rows, A).unwrap().as_deref(), Some(A));
        assert_eq!(group_id(&rows, "c").unwrap(), None);
        let error = group_id(&[row(A), row(OTHER)], "a").unwrap_err().to_string();
        assert!(error.contains(A) && error.contains(OTHER), "{error}");
    }
}
