//! `pool status` and `pool grow`, of a running driver; `pool check`: verifies a pool on disk, with no
//! driver running on it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};
use serde_json::json;

use super::connection::{Connection, refused};
use super::{Options, Output, bounded, format, on_runtime};
use crate::backend::check::{self, Report};
use crate::proto::admin::v1 as admin;
use crate::quantity;

#[derive(Debug, Args)]
pub struct PoolArgs {
    #[command(subcommand)]
    command: PoolCommand,
}

#[derive(Debug, Subcommand)]
enum PoolCommand {
    /// Show the pool of a running driver: its kind, its room, and what it stands on
    Status {
        #[command(flatten)]
        options: Options,
    },
    /// Grow the image of an image pool while volumes are in use
    Grow {
        /// Size of the image afterwards
        #[arg(long, value_parser = size, value_name = "SIZE")]
        size: u64,
        #[command(flatten)]
        options: Options,
    },
    /// Verify every file of a pool; exits with 1 when something is wrong, 2 when it cannot tell
    Check {
        /// Data directory of a driver that is not running
        #[arg(long, default_value = "/var/lib/csi-loopback", value_name = "PATH")]
        data_dir: PathBuf,
        /// Form of the answer
        #[arg(long, value_enum, default_value_t = Output::Table)]
        output: Output,
    },
}

/// Exit code for a pool that could not be checked.
const UNCHECKED: u8 = 2;

pub fn run(args: PoolArgs) -> Result<ExitCode> {
    match args.command {
        PoolCommand::Status { options } => on_runtime(status(options)),
        PoolCommand::Grow { size, options } => on_runtime(grow(size, options)),
        PoolCommand::Check { data_dir, output } => check(&data_dir, output),
    }
}

fn size(text: &str) -> Result<u64, String> {
    match quantity::parse(text)? {
        0 => Err("must be more than 0".to_owned()),
        size => Ok(size),
    }
}

async fn status(options: Options) -> Result<ExitCode> {
    let pool = bounded(&options, async |connection: Connection| {
        let answer = connection.pool_admin().get_pool(admin::GetPoolRequest {}).await;
        Ok(answer.map_err(refused)?.into_inner().pool)
    });
    print_status(&pool.await?.unwrap_or_default(), options.output)
}

async fn grow(size_bytes: u64, options: Options) -> Result<ExitCode> {
    let pool = bounded(&options, async |connection: Connection| {
        let answer = connection.pool_admin().grow_pool(admin::GrowPoolRequest { size_bytes }).await;
        Ok(answer.map_err(refused)?.into_inner().pool)
    });
    print_status(&pool.await?.unwrap_or_default(), options.output)
}

fn print_status(pool: &admin::Pool, output: Output) -> Result<ExitCode> {
    match output {
        Output::Json => format::print_json(&json!({
            "kind": pool.kind,
            "reason": pool.reason,
            "total_bytes": pool.total_bytes,
            "available_bytes": pool.available_bytes,
            "block_size_bytes": pool.block_size_bytes,
            "image": pool.image.map(|image| json!({
                "size_bytes": image.size_bytes,
                "allocated": image.allocated,
                "available_below_bytes": image.available_below_bytes,
            })),
        }))?,
        Output::Table => {
            let mut facts = vec![
                ("pool", format!("{}: {}", pool.kind, pool.reason)),
                ("total", format::bytes(pool.total_bytes)),
                ("available", format::bytes(pool.available_bytes)),
                ("block size", format::bytes(pool.block_size_bytes)),
            ];
            if let Some(image) = &pool.image {
                let kind = if image.allocated { "allocated" } else { "sparse" };
                facts.push(("image", format!("{}, {kind}", format::bytes(image.size_bytes))));
                facts.push(("available below", format::bytes(image.available_below_bytes)));
            }
            format::print(&format::facts(&facts))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn check(data_dir: &Path, output: Output) -> Result<ExitCode> {
    let report = match check::check(data_dir) {
        Ok(report) => report,
        Err(error) => {
            eprintln!("csi-loopback: {} cannot be checked: {error}", data_dir.display());
            return Ok(ExitCode::from(UNCHECKED));
        }
    };
    match output {
        Output::Json => format::print_json(&document(&report))?,
        Output::Table => format::print(&shown(&report))?,
    }
    Ok(if report.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn shown(report: &Report) -> String {
    let mut text = format::facts(&[
        ("pool", report.description.clone()),
        ("volumes", report.volumes.to_string()),
        ("inline volumes", report.inline_volumes.to_string()),
        ("snapshots", report.snapshots.to_string()),
        ("change records", report.records.to_string()),
        (
            "findings",
            match report.findings.len() {
                0 => "none".to_owned(),
                count => count.to_string(),
            },
        ),
    ]);
    if !report.findings.is_empty() {
        let rows: Vec<_> = report
            .findings
            .iter()
            .map(|finding| {
                [finding.kind.to_string(), finding.object.clone(), finding.message.clone()]
            })
            .collect();
        text.push_str("\n\n");
        text.push_str(&format::table(["FINDING", "OBJECT", "MESSAGE"], &[], &rows));
    }
    text
}

fn document(report: &Report) -> serde_json::Value {
    let findings: Vec<_> = report
        .findings
        .iter()
        .map(|finding| {
            json!({
                "kind": finding.kind.to_string(),
                "object": finding.object,
                "message": finding.message,
            })
        })
        .collect();
    json!({
        "pool": report.description,
        "volumes": report.volumes,
        "inline_volumes": report.inline_volumes,
        "snapshots": report.snapshots,
        "change_records": report.records,
        "findings": findings,
    })
}
