//! `base`: the snapshots that can be the base of a delta, deleted ones included, and their
//! retention.

use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use clap::{Args, Subcommand};
use prost_types::Timestamp;
use serde::Serialize;
use tonic::Status;

use super::connection::{Connection, refused};
use super::{Options, Output, bounded, format, names};
use admin::base::Retention;
use admin::set_base_retention_request::Retention as NewRetention;
use common::quantity;
use grpc::proto::admin::v1 as admin;

#[derive(Debug, Args)]
pub struct BaseArgs {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    command: BaseCommand,
}

#[derive(Debug, Subcommand)]
enum BaseCommand {
    /// List the bases of a volume or of a target, newest first, with expiry
    #[command(after_help = "Examples:
  csi-loopback base list --volume data
  csi-loopback base list --target tuesday")]
    List {
        /// Bases of this volume, by name or id
        #[arg(long, required_unless_present = "target", conflicts_with = "target")]
        volume: Option<String>,
        /// Bases of deltas to this snapshot, by name or id
        #[arg(long)]
        target: Option<String>,
    },
    /// Set how long a snapshot remains a base after its deletion
    #[command(
        group(clap::ArgGroup::new("retention").required(true).args(["until", "duration", "default"])),
        after_help = "Examples:
  csi-loopback base keep monday --for 180days
  csi-loopback base keep snap-monday-d6c160afa2a7f59a --until 2027-01-31"
    )]
    Keep {
        /// Snapshot, by name or id; a deleted one by id
        snapshot: String,
        /// Until this time (UTC): 2027-01-31T12:00:00Z or 2027-01-31
        #[arg(long, value_parser = time, value_name = "TIME")]
        until: Option<SystemTime>,
        /// This long after the deletion, such as 30days
        #[arg(long = "for", value_parser = humantime::parse_duration, value_name = "TIME")]
        duration: Option<Duration>,
        /// As long as the driver's --change-record-retention
        #[arg(long)]
        default: bool,
    },
    /// Release a base: a deleted snapshot now, another at its deletion
    #[command(after_help = "Example:
  csi-loopback base release snap-monday-d6c160afa2a7f59a")]
    Release {
        /// Snapshot, by name or id; a deleted one by id
        snapshot: String,
    },
}

pub async fn run(args: BaseArgs) -> Result<ExitCode> {
    let BaseArgs { options, command } = args;
    let output = options.print.output;
    bounded(&options, async move |connection| {
        let connection = &connection;
        match command {
            BaseCommand::List { volume, target } => list(connection, volume, target, output).await,
            BaseCommand::Keep { snapshot, until, duration, default: _ } => {
                let retention = match (until, duration) {
                    (Some(time), _) => NewRetention::Until(time.into()),
                    (None, Some(time)) => NewRetention::ForSeconds(time.as_secs()),
                    (None, None) => NewRetention::ByDefault(true),
                };
                set(connection, &snapshot, retention, output).await
            }
            BaseCommand::Release { snapshot } => {
                set(connection, &snapshot, NewRetention::ForSeconds(0), output).await
            }
        }
    })
    .await?;
    Ok(ExitCode::SUCCESS)
}

fn time(text: &str) -> Result<SystemTime, String> {
    let day = format!("{text}T00:00:00Z");
    let parsed = humantime::parse_rfc3339(text).or_else(|_| humantime::parse_rfc3339(&day));
    parsed.map_err(|_| "must be a time such as 2027-01-31T12:00:00Z or 2027-01-31".to_owned())
}

async fn list(
    connection: &Connection,
    volume: Option<String>,
    target: Option<String>,
    output: Output,
) -> Result<()> {
    let mut request = admin::ListBasesRequest::default();
    if let Some(volume) = volume {
        request.volume_id = names::volume(connection, &volume).await?.volume_id;
    }
    if let Some(target) = target {
        request.target_snapshot_id = names::snapshot_id(connection, &target).await?;
    }
    format::print_rows(output, &pages(connection, request).await?, table)
}

/// Prints the bases of several volumes.
pub async fn print_of_volumes(
    connection: &Connection,
    volume_ids: Vec<String>,
    output: Output,
) -> Result<()> {
    let mut rows = Vec::new();
    for volume_id in volume_ids {
        let request = admin::ListBasesRequest { volume_id, ..Default::default() };
        rows.extend(pages(connection, request).await?);
    }
    format::print_rows(output, &rows, table)
}

async fn pages(connection: &Connection, request: admin::ListBasesRequest) -> Result<Vec<Row>> {
    let bases = list_all(connection, request).await.map_err(refused)?;
    Ok(bases.iter().map(Row::new).collect())
}

/// The ids of a volume's snapshots in the driver's order, oldest first, including deleted ones.
/// Empty for a driver without the service.
pub async fn chain_order(connection: &Connection, volume_id: &str) -> Vec<String> {
    let request = admin::ListBasesRequest { volume_id: volume_id.to_owned(), ..Default::default() };
    let bases = list_all(connection, request).await.unwrap_or_default();
    bases.into_iter().rev().map(|base| base.snapshot_id).collect()
}

/// All pages of a list of bases.
pub async fn list_all(
    connection: &Connection,
    request: admin::ListBasesRequest,
) -> Result<Vec<admin::Base>, Status> {
    let mut bases = Vec::new();
    names::pages(async |starting_token| {
        let request =
            admin::ListBasesRequest { max_entries: names::PAGE, starting_token, ..request.clone() };
        let page = connection.base_admin().list_bases(request).await?.into_inner();
        bases.extend(page.bases);
        Ok(page.next_token)
    })
    .await?;
    Ok(bases)
}

async fn set(
    connection: &Connection,
    snapshot: &str,
    retention: NewRetention,
    output: Output,
) -> Result<()> {
    let snapshot_id = names::snapshot_id(connection, snapshot).await?;
    let request = admin::SetBaseRetentionRequest { snapshot_id, retention: Some(retention) };
    let response = connection.base_admin().set_base_retention(request).await;
    let base = response.map_err(refused)?.into_inner().base.unwrap_or_default();
    format::print_rows(output, &[Row::new(&base)], table)
}

#[derive(Debug, Serialize)]
struct Row {
    snapshot_id: String,
    volume_id: String,
    created: Option<String>,
    /// `None` for a snapshot that exists.
    deleted: Option<String>,
    /// `None` while the retention has not begun.
    expires: Option<String>,
    /// The snapshot's own retention, if it has one.
    kept_for_seconds: Option<u64>,
    kept_until: Option<String>,
}

impl Row {
    fn new(base: &admin::Base) -> Self {
        let (kept_for_seconds, kept_until) = match &base.retention {
            Some(Retention::ForSeconds(seconds)) => (Some(*seconds), None),
            Some(Retention::Until(time)) => (None, whole(Some(time))),
            None => (None, None),
        };
        Self {
            snapshot_id: base.snapshot_id.clone(),
            volume_id: base.volume_id.clone(),
            created: whole(base.created_at.as_ref()),
            deleted: whole(base.deleted_at.as_ref()),
            expires: whole(base.expires_at.as_ref()),
            kept_for_seconds,
            kept_until,
        }
    }

    fn kept(&self) -> String {
        match (self.kept_for_seconds, &self.kept_until) {
            (Some(seconds), _) => {
                format!("for {}", quantity::duration_text(Duration::from_secs(seconds)))
            }
            (None, Some(time)) => format!("until {time}"),
            (None, None) => "driver's default".to_owned(),
        }
    }
}

/// A time in whole seconds.
pub fn whole(time: Option<&Timestamp>) -> Option<String> {
    let time = format::time(time.map(|time| Timestamp { nanos: 0, ..*time }).as_ref())?;
    Some(time.replace(".000Z", "Z"))
}

fn table(rows: &[Row]) -> String {
    let or_dash = |time: &Option<String>| time.clone().unwrap_or_else(|| "-".to_owned());
    let shown: Vec<_> = rows
        .iter()
        .map(|row| {
            [
                row.snapshot_id.clone(),
                or_dash(&row.created),
                or_dash(&row.deleted),
                or_dash(&row.expires),
                row.kept(),
            ]
        })
        .collect();
    format::table(["SNAPSHOT", "CREATED", "DELETED", "EXPIRES", "KEPT"], &[], &shown)
}
