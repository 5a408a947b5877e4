//! `pool check`: verifies a pool on disk, with no driver running on it.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};
use serde_json::json;

use super::{Output, format};
use crate::backend::check::{self, Report};

#[derive(Debug, Args)]
pub struct PoolArgs {
    #[command(subcommand)]
    command: PoolCommand,
}

#[derive(Debug, Subcommand)]
enum PoolCommand {
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
    let PoolCommand::Check { data_dir, output } = args.command;
    let report = match check::check(&data_dir) {
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
