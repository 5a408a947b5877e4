//! `pool status` and `pool grow` for a running driver; `pool check` verifies a pool on disk that no
//! driver uses.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};
use serde::Serialize;

use super::connection::{Connection, refused};
use super::{Options, Print, bounded, format, on_runtime, progress};
use common::quantity;
use grpc::proto::admin::v1 as admin;
use storage::check::{self, Report};

#[derive(Debug, Args)]
pub struct PoolArgs {
    #[command(subcommand)]
    command: PoolCommand,
}

#[derive(Debug, Subcommand)]
enum PoolCommand {
    /// Show kind, space, overcommit and health of a running driver's pool
    #[command(after_help = "Example:
  csi-loopback pool status")]
    Status {
        #[command(flatten)]
        options: Options,
    },
    /// Grow the image of an image pool while volumes are in use
    #[command(after_help = "Example:
  csi-loopback pool grow --size 20Gi")]
    Grow {
        /// New size of the image
        #[arg(long, value_parser = size, value_name = "SIZE")]
        size: u64,
        #[command(flatten)]
        options: Options,
    },
    /// Verify every file of a pool that no driver uses
    #[command(after_help = "Example:
  csi-loopback pool check --data-dir /var/lib/csi-loopback")]
    Check {
        /// Data directory of a stopped driver
        #[arg(long, default_value = "/var/lib/csi-loopback", value_name = "PATH")]
        data_dir: PathBuf,
        #[command(flatten)]
        print: Print,
    },
}

/// Exit code for a pool that cannot be checked.
const UNCHECKED: u8 = 2;

pub fn run(args: PoolArgs) -> Result<ExitCode> {
    match args.command {
        PoolCommand::Status { options } => on_runtime(status(options, None)),
        PoolCommand::Grow { size, options } => on_runtime(status(options, Some(size))),
        PoolCommand::Check { data_dir, print } => check(&data_dir, print),
    }
}

fn size(text: &str) -> Result<u64, String> {
    match quantity::parse(text)? {
        0 => Err("must be more than 0".to_owned()),
        size => Ok(size),
    }
}

/// Prints the status of a pool, after it has grown to `size`.
async fn status(options: Options, size: Option<u64>) -> Result<ExitCode> {
    let pool = bounded(&options, async |connection: Connection| {
        let mut client = connection.pool_admin();
        let pool = match size {
            Some(size_bytes) => {
                let request = admin::GrowPoolRequest { size_bytes };
                client.grow_pool(request).await.map(|grown| grown.into_inner().pool)
            }
            None => {
                let response = client.get_pool(admin::GetPoolRequest {}).await;
                response.map(|found| found.into_inner().pool)
            }
        };
        pool.map_err(refused)
    });
    let status = Status::from(pool.await?.unwrap_or_default());
    format::print_one(options.print.output, &status, facts)?;
    Ok(ExitCode::SUCCESS)
}

/// A pool as it is printed.
#[derive(Debug, Serialize)]
struct Status {
    kind: String,
    reason: String,
    total_bytes: u64,
    available_bytes: u64,
    block_size_bytes: u64,
    /// Capacities of all volumes together; `None` from a driver that does not report it.
    provisioned_bytes: Option<u64>,
    overcommit: Option<f64>,
    maximum_volume_bytes: Option<u64>,
    abnormal: bool,
    message: String,
    image: Option<Image>,
}

#[derive(Debug, Serialize)]
struct Image {
    size_bytes: u64,
    allocated: bool,
    shared_bytes: u64,
    available_below_bytes: u64,
}

impl From<admin::Pool> for Status {
    fn from(pool: admin::Pool) -> Self {
        // An earlier driver reports none of the newer fields.
        let is_new = !pool.message.is_empty();
        Self {
            kind: pool.kind,
            reason: pool.reason,
            total_bytes: pool.total_bytes,
            available_bytes: pool.available_bytes,
            block_size_bytes: pool.block_size_bytes,
            provisioned_bytes: is_new.then_some(pool.provisioned_bytes),
            overcommit: is_new.then_some(pool.overcommit),
            maximum_volume_bytes: is_new.then_some(pool.maximum_volume_bytes),
            abnormal: pool.abnormal,
            message: pool.message,
            image: pool.image.map(|image| Image {
                size_bytes: image.size_bytes,
                allocated: image.allocated,
                shared_bytes: image.shared_bytes,
                available_below_bytes: image.available_below_bytes,
            }),
        }
    }
}

fn facts(pool: &Status) -> String {
    let available = format::bytes(pool.available_bytes);
    let share = format::percent(pool.available_bytes, pool.total_bytes);
    let mut facts = vec![
        ("kind", pool.kind.clone()),
        ("reason", pool.reason.clone()),
        ("total", format::bytes(pool.total_bytes)),
        ("available", format!("{available}, {share}")),
    ];
    if let (Some(provisioned), Some(overcommit)) = (pool.provisioned_bytes, pool.overcommit) {
        let provisioned = format::bytes(provisioned);
        facts.push(("provisioned", format!("{provisioned}, overcommit up to factor {overcommit}")));
    }
    if let Some(bytes) = pool.maximum_volume_bytes {
        facts.push(("largest new volume", format::bytes(bytes)));
    }
    facts.push(("block size", format::bytes(pool.block_size_bytes)));
    if let Some(image) = &pool.image {
        let kind = match (image.allocated, image.shared_bytes) {
            (true, _) => "allocated".to_owned(),
            (false, 0) => "sparse".to_owned(),
            (false, shared) => format!("{} shared with another file", format::bytes(shared)),
        };
        facts.push(("image", format!("{}, {kind}", format::bytes(image.size_bytes))));
        facts.push(("available below", format::bytes(image.available_below_bytes)));
    }
    if !pool.message.is_empty() {
        let problem = if pool.abnormal { "abnormal: " } else { "" };
        facts.push(("health", format!("{problem}{}", pool.message)));
    }
    format::facts(&facts)
}

fn check(data_dir: &Path, print: Print) -> Result<ExitCode> {
    let shown = progress::start("checking the pool", print.quiet);
    let report = match check::check(data_dir) {
        Ok(report) => report,
        Err(error) => {
            drop(shown);
            eprintln!("csi-loopback: {} cannot be checked: {error}", data_dir.display());
            return Ok(ExitCode::from(UNCHECKED));
        }
    };
    drop(shown);
    format::print_one(print.output, &Checked::from(&report), |_| text(&report))?;
    Ok(if report.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn text(report: &Report) -> String {
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

/// The result of a check as it is printed.
#[derive(Debug, Serialize)]
struct Checked {
    pool: String,
    volumes: u64,
    inline_volumes: u64,
    snapshots: u64,
    change_records: u64,
    findings: Vec<Finding>,
}

#[derive(Debug, Serialize)]
struct Finding {
    kind: String,
    object: String,
    message: String,
}

impl From<&Report> for Checked {
    fn from(report: &Report) -> Self {
        let findings = report.findings.iter().map(|finding| Finding {
            kind: finding.kind.to_string(),
            object: finding.object.clone(),
            message: finding.message.clone(),
        });
        Self {
            pool: report.description.clone(),
            volumes: report.volumes,
            inline_volumes: report.inline_volumes,
            snapshots: report.snapshots,
            change_records: report.records,
            findings: findings.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_shown_with_overcommit_and_health() {
        let pool = admin::Pool {
            kind: "copy".to_owned(),
            reason: "requested".to_owned(),
            total_bytes: 4 << 30,
            available_bytes: 1 << 30,
            block_size_bytes: 4096,
            provisioned_bytes: 6 << 30,
            overcommit: 10.0,
            maximum_volume_bytes: 2 << 30,
            abnormal: true,
            message: "the pool is nearly full".to_owned(),
            image: None,
        };
        let expected = "\
kind                copy
reason              requested
total               4Gi (4,294,967,296 bytes)
available           1Gi (1,073,741,824 bytes), 25.0 %
provisioned         6Gi (6,442,450,944 bytes), overcommit up to factor 10
largest new volume  2Gi (2,147,483,648 bytes)
block size          4Ki (4,096 bytes)
health              abnormal: the pool is nearly full";
        assert_eq!(facts(&Status::from(pool)), expected);
        let earlier = admin::Pool { kind: "copy".to_owned(), ..admin::Pool::default() };
        assert!(!facts(&Status::from(earlier)).contains("overcommit"));
    }
}
