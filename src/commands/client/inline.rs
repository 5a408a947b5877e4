//! `volume inline`: inline ephemeral volumes (KEP-596), published as kubelet publishes them: the
//! caller chooses the handle, one call creates and mounts the volume, and another removes it.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use serde::Serialize;

use super::capability;
use super::connection::{Connection, refused};
use super::node::{check_defers, inline_volumes, make_parent, not_in_use};
use super::stats::stats;
use super::volume::{Change, absolute};
use super::{Output, format};
use common::quantity;
use csi::volume_capability::access_mode::Mode;
use grpc::proto::admin::v1 as admin;
use grpc::proto::csi::v1 as csi;

/// The attribute with which kubelet marks an inline volume (podInfoOnMount).
const EPHEMERAL: (&str, &str) = ("csi.storage.k8s.io/ephemeral", "true");

#[derive(Debug, Subcommand)]
pub enum InlineCommand {
    /// Create and mount an inline volume, or refresh its content
    #[command(after_help = "Examples:
  csi-loopback volume inline publish scratch --target /mnt/scratch --attribute size=64Mi
  csi-loopback volume inline publish motd --target /mnt/motd --attribute content/motd=hello --read-only")]
    Publish(PublishArgs),
    /// List the inline volumes of this node
    #[command(after_help = "Example:
  csi-loopback volume inline list")]
    List,
    /// Show usage and health of an inline volume
    #[command(after_help = "Example:
  csi-loopback volume inline stats scratch --target /mnt/scratch")]
    Stats {
        /// Handle of the volume
        handle: String,
        /// Path at which the volume is published
        #[arg(long, value_name = "PATH")]
        target: PathBuf,
    },
    /// Unmount and delete an inline volume
    #[command(after_help = "Example:
  csi-loopback volume inline unpublish scratch --target /mnt/scratch")]
    Unpublish {
        /// Handle of the volume
        handle: String,
        /// Path at which the volume is published
        #[arg(long, value_name = "PATH")]
        target: PathBuf,
        /// Exit with 0 if the volume is not published there
        #[arg(long)]
        if_published: bool,
    },
}

#[derive(Debug, Args)]
pub struct PublishArgs {
    /// Handle of the volume: letters, digits, '-', '_' and '.'
    handle: String,
    /// Directory to create and mount at
    #[arg(long, value_name = "PATH")]
    target: PathBuf,
    /// Attribute, such as size=64Mi or medium=Memory; repeatable
    #[arg(long, value_parser = pair, value_name = "KEY=VALUE")]
    attribute: Vec<(String, String)>,
    /// Key of a secret and the file with its value; repeatable
    #[arg(long, value_parser = pair, value_name = "KEY=FILE")]
    secret: Vec<(String, String)>,
    /// Publish read-only; required with content and secrets
    #[arg(long)]
    read_only: bool,
    /// Leave the mount to a container runtime
    #[arg(long)]
    defer_fs_ops: bool,
    /// Filesystem: ext4, xfs or btrfs [default: ext4]
    #[arg(long, value_name = "TYPE")]
    fs: Option<String>,
}

/// A key, and the text after the first '='.
fn pair(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let (key, value) = pair.ok_or_else(|| "must be KEY=VALUE".to_owned())?;
    Ok((key.to_owned(), value.to_owned()))
}

pub async fn run(connection: &Connection, command: InlineCommand, output: Output) -> Result<()> {
    let change = match command {
        InlineCommand::List => return list(connection, output).await,
        InlineCommand::Stats { handle, target } => {
            return stats(connection, handle, &target, false, output).await;
        }
        InlineCommand::Publish(args) => publish(connection, args).await?,
        InlineCommand::Unpublish { handle, target, if_published } => {
            let target = absolute(&target)?;
            unpublish(connection, handle, target, if_published).await?
        }
    };
    format::print_one(output, &change, Change::to_string)
}

async fn publish(connection: &Connection, args: PublishArgs) -> Result<Change> {
    let PublishArgs { handle, target, attribute, secret, read_only, defer_fs_ops, fs } = args;
    if defer_fs_ops {
        check_defers(connection).await?;
    }
    let previous = find(connection, &handle).await?.flatten();
    make_parent(&target)?;
    let ephemeral = (EPHEMERAL.0.to_owned(), EPHEMERAL.1.to_owned());
    let secrets = secret.into_iter().map(|(key, file)| {
        let value = fs::read_to_string(&file);
        Ok((key, value.with_context(|| format!("read {file}, which must be text"))?))
    });
    let request = csi::NodePublishVolumeRequest {
        volume_id: handle.clone(),
        target_path: absolute(&target)?,
        volume_capability: Some(capability::mounted(
            Mode::SingleNodeWriter,
            fs.unwrap_or_default(),
        )),
        readonly: read_only,
        volume_context: attribute.into_iter().chain([ephemeral]).collect(),
        secrets: secrets.collect::<Result<_>>()?,
        defer_fs_ops,
        ..csi::NodePublishVolumeRequest::default()
    };
    connection.node().node_publish_volume(request).await.map_err(refused)?;
    // The content is refreshed in any case.
    let state = if previous.is_some() { "refreshed" } else { "published" };
    Ok(Change::of(handle, state, true))
}

async fn unpublish(
    connection: &Connection,
    handle: String,
    target: String,
    if_published: bool,
) -> Result<Change> {
    const STATE: &str = "unpublished and deleted";
    let problem = match find(connection, &handle).await? {
        Some(Some(volume)) if volume.target_path != target => {
            Some(format!("not published at {target} but at {}", volume.target_path))
        }
        Some(None) => Some("not published".to_owned()),
        Some(Some(_)) | None => None,
    };
    if let Some(problem) = problem {
        return not_in_use(handle, STATE, &problem, if_published, "--if-published");
    }
    let request = csi::NodeUnpublishVolumeRequest {
        volume_id: handle.clone(),
        target_path: target,
        ..Default::default()
    };
    connection.node().node_unpublish_volume(request).await.map_err(refused)?;
    Ok(Change::of(handle, STATE, true))
}

/// The inline volume with this handle; `None` from a driver that does not list them.
async fn find(
    connection: &Connection,
    handle: &str,
) -> Result<Option<Option<admin::InlineVolume>>> {
    let volumes = inline_volumes(connection).await?;
    Ok(volumes.map(|all| all.into_iter().find(|volume| volume.handle == handle)))
}

async fn list(connection: &Connection, output: Output) -> Result<()> {
    let volumes = inline_volumes(connection).await?;
    let volumes =
        volumes.context("the driver has no VolumeAdmin service, so it lists no inline volumes")?;
    let rows: Vec<Row> = volumes.into_iter().map(Row::from).collect();
    format::print_rows(output, &rows, table)
}

/// An inline volume as it is printed.
#[derive(Debug, Serialize)]
struct Row {
    handle: String,
    capacity_bytes: u64,
    /// `pool` or `memory`.
    medium: &'static str,
    target_path: String,
    deferred: bool,
    abnormal: bool,
    message: String,
}

impl From<admin::InlineVolume> for Row {
    fn from(volume: admin::InlineVolume) -> Self {
        Self {
            handle: volume.handle,
            capacity_bytes: volume.capacity_bytes,
            medium: if volume.in_memory { "memory" } else { "pool" },
            target_path: volume.target_path,
            deferred: volume.deferred,
            abnormal: volume.abnormal,
            message: volume.message,
        }
    }
}

fn table(rows: &[Row]) -> String {
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            let condition = match row.abnormal {
                true => format!("abnormal: {}", row.message),
                false => "ok".to_owned(),
            };
            [
                row.handle.clone(),
                quantity::format(row.capacity_bytes),
                row.medium.to_owned(),
                row.target_path.clone(),
                condition,
            ]
        })
        .collect();
    format::table(["HANDLE", "CAPACITY", "MEDIUM", "TARGET", "CONDITION"], &["CAPACITY"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_may_contain_an_equals_sign() {
        let owned = |key: &str, value: &str| Ok((key.to_owned(), value.to_owned()));
        assert_eq!(pair("content/a=b=c"), owned("content/a", "b=c"));
        assert_eq!(pair("content/a="), owned("content/a", ""));
        assert!(pair("size").is_err() && pair("=x").is_err());
    }

    #[test]
    fn inline_volumes_are_listed_with_their_target() {
        let row = Row::from(admin::InlineVolume {
            handle: "pod-1".to_owned(),
            target_path: "/t".to_owned(),
            capacity_bytes: 64 << 20,
            ..admin::InlineVolume::default()
        });
        let expected = "\
HANDLE  CAPACITY  MEDIUM  TARGET  CONDITION
pod-1       64Mi  pool    /t      ok";
        assert_eq!(table(&[row]), expected);
    }
}
