//! `base`: which snapshots can be the base of a delta, deleted ones included, and how long each stays one.

use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use clap::{Args, Subcommand};
use prost_types::Timestamp;
use serde::Serialize;

use super::connection::{Connection, refused};
use super::{Options, Output, bounded, format, names};
use crate::proto::admin::v1 as admin;
use admin::base::Retention;
use admin::set_base_retention_request::Retention as Asked;

/// Entries to ask for in one page of a list.
const PAGE: i32 = 1000;

#[derive(Debug, Args)]
pub struct BaseArgs {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    command: BaseCommand,
}

#[derive(Debug, Subcommand)]
enum BaseCommand {
    /// Show the snapshots that can be the base of a delta, newest first, and when each of them ceases to be one
    List {
        /// All of this volume, by name or id
        #[arg(long, required_unless_present = "target", conflicts_with = "target")]
        volume: Option<String>,
        /// Those from which the changes to this snapshot are known, by name or id
        #[arg(long)]
        target: Option<String>,
    },
    /// Say how long a snapshot stays a base after its deletion
    #[command(group(clap::ArgGroup::new("retention").required(true).args(["until", "duration", "default"])))]
    Keep {
        /// The snapshot, by name or id; a deleted one by id
        snapshot: String,
        /// Until this time (UTC): 2027-01-31T12:00:00Z, or 2027-01-31
        #[arg(long, value_parser = time, value_name = "TIME")]
        until: Option<SystemTime>,
        /// For so long after its deletion, such as 30days
        #[arg(long = "for", value_parser = humantime::parse_duration, value_name = "TIME")]
        duration: Option<Duration>,
        /// As long as the driver's --change-record-retention
        #[arg(long)]
        default: bool,
    },
    /// Give up a base: a deleted snapshot at once, another with its deletion
    Release {
        /// The snapshot, by name or id; a deleted one by id
        snapshot: String,
    },
}

pub async fn run(args: BaseArgs) -> Result<ExitCode> {
    let BaseArgs { options, command } = args;
    let output = options.output;
    bounded(&options, async move |connection| {
        let connection = &connection;
        match command {
            BaseCommand::List { volume, target } => list(connection, volume, target, output).await,
            BaseCommand::Keep { snapshot, until, duration, default: _ } => {
                let retention = match (until, duration) {
                    (Some(time), _) => Asked::Until(time.into()),
                    (None, Some(time)) => Asked::ForSeconds(time.as_secs()),
                    (None, None) => Asked::ByDefault(true),
                };
                set(connection, &snapshot, retention, output).await
            }
            BaseCommand::Release { snapshot } => {
                set(connection, &snapshot, Asked::ForSeconds(0), output).await
            }
        }
    })
    .await
}

fn time(text: &str) -> Result<SystemTime, String> {
    let day = format!("{text}T00:00:00Z");
    let parsed = humantime::parse_rfc3339(text).or_else(|_| humantime::parse_rfc3339(&day));
    parsed.map_err(|_| "is not a time such as 2027-01-31T12:00:00Z or 2027-01-31".to_owned())
}

async fn list(
    connection: &Connection,
    volume: Option<String>,
    target: Option<String>,
    output: Output,
) -> Result<ExitCode> {
    let mut request = admin::ListBasesRequest { max_entries: PAGE, ..Default::default() };
    if let Some(volume) = volume {
        request.volume_id = names::volume(connection, &volume).await?.volume_id;
    }
    if let Some(target) = target {
        request.target_snapshot_id = names::snapshot_id(connection, &target).await?;
    }
    let mut rows = Vec::new();
    loop {
        let page = connection.base_admin().list_bases(request.clone()).await;
        let page = page.map_err(refused)?.into_inner();
        rows.extend(page.bases.iter().map(Row::new));
        if page.next_token.is_empty() {
            break;
        }
        request.starting_token = page.next_token;
    }
    format::print_rows(output, &rows, table)?;
    Ok(ExitCode::SUCCESS)
}

async fn set(
    connection: &Connection,
    snapshot: &str,
    retention: Asked,
    output: Output,
) -> Result<ExitCode> {
    let snapshot_id = names::snapshot_id(connection, snapshot).await?;
    let request = admin::SetBaseRetentionRequest { snapshot_id, retention: Some(retention) };
    let answer = connection.base_admin().set_base_retention(request).await;
    let base = answer.map_err(refused)?.into_inner().base.unwrap_or_default();
    format::print_rows(output, &[Row::new(&base)], table)?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Serialize)]
struct Row {
    snapshot_id: String,
    volume_id: String,
    created: Option<String>,
    /// Nothing for a snapshot that exists.
    deleted: Option<String>,
    /// Nothing where its time has not begun.
    expires: Option<String>,
    /// Its own retention.
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
                format!("for {}", humantime::format_duration(Duration::from_secs(seconds)))
            }
            (None, Some(time)) => format!("until {time}"),
            (None, None) => "by default".to_owned(),
        }
    }
}

/// A time to the second.
fn whole(time: Option<&Timestamp>) -> Option<String> {
    format::time(time.map(|time| Timestamp { nanos: 0, ..*time }).as_ref())
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
