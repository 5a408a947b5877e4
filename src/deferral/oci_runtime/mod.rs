//! The mode `oci-runtime`: an OCI runtime that mounts the deferred volumes that crust_ops has
//! staged ([`crate::crust`]), visible only to the container, and passes everything else to the next
//! runtime, runc by default (KEP-2857). Its command line is that of the next runtime and is passed
//! on unchanged. If no deferred volume is involved, the next runtime replaces this process.
//!
//! It fails closed: while the node has deferred volumes, what it does not know (an option, a
//! command, an entry, the state of a container) is an error and never taken for absent.

mod attach;
mod bundle;
mod claim;
mod command_line;
mod config;
mod create;
mod crust_commands;
mod deferred;
mod delete;
mod handover;
mod next_runtime;
mod options;
mod process;
mod report;
mod sub_path;
mod volume;

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};

use command_line::{Command, Invocation};
use config::Config;
use next_runtime::NextRuntime;
use options::Dialect;

/// The file name of the program that selects this mode.
pub const PROGRAM: &str = "csi-loopback-runc";

/// The arguments for the next runtime, unchanged.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    pub arguments: Vec<OsString>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    // An environment variable, because the command line is the next runtime's.
    #[cfg(feature = "failpoints")]
    if let Some(directory) = std::env::var_os("CSI_LOOPBACK_RUNC_FAIL_POINTS") {
        storage::fail_point::watch(directory.into());
    }
    // Reported here and not by main, because the caller also reads the runtime's log file.
    if let Some(result) = attach::run(&args.arguments) {
        return Ok(result);
    }
    let (invocation, result) = match Config::read() {
        Ok(config) => {
            let invocation = Invocation::parse(&args.arguments, Dialect::of(&config.runtime));
            let result = handle(&args, &config, &invocation);
            (invocation, result)
        }
        Err(error) => (Invocation::parse(&args.arguments, Dialect::Unknown), Err(error)),
    };
    Ok(result.unwrap_or_else(|error| {
        report::error(&invocation, &format!("{error:#}"));
        ExitCode::FAILURE
    }))
}

fn handle(args: &Args, config: &Config, invocation: &Invocation) -> Result<ExitCode> {
    let next = NextRuntime { program: &config.runtime, arguments: &args.arguments };
    match &invocation.command {
        Command::Create(create) => {
            if let Some((spec, found)) = create::find_deferred(config, create)? {
                return create::create(config, &next, invocation, create, spec, &found);
            }
        }
        Command::Restore(restore) => {
            if let Some((_, found)) = create::find_deferred(config, restore)? {
                let target = found.first().map(|deferred| deferred.target.to_string());
                bail!(
                    "a container with a deferred volume ({}) cannot be restored from a checkpoint; create it again",
                    target.unwrap_or_default()
                );
            }
        }
        Command::Delete { container } => {
            if let Ok(container) = claim::container(invocation.root.as_deref(), container) {
                let claimed = delete::claimed(config, &container);
                if !claimed.is_empty() {
                    return delete::delete(config, &next, &container, &claimed);
                }
            }
        }
        Command::Crust(arguments) => return Ok(crust_commands::run(config, arguments)),
        Command::Unknown(why) => ensure!(
            deferred::none_exist(config)?,
            "{why}; it may create a container, and this node has deferred volumes, which would be missing in it ({})",
            config.crust_dir.display()
        ),
        Command::Other => {}
    }
    next.exec()
}

/// The path of this program, by which crust_ops calls it. Links are not followed, because the file
/// name selects the mode.
fn own_program() -> Result<PathBuf> {
    let called = std::env::args_os().next().map(PathBuf::from).unwrap_or_default();
    ensure!(
        called.file_name().is_some_and(|name| name == PROGRAM),
        "the program must be called {PROGRAM}, because crust_ops calls it by that name; create a link"
    );
    if called.components().count() > 1 || called.is_absolute() {
        return std::path::absolute(&called).context("finding the path of this program");
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let executable = |path: &Path| {
        path.metadata()
            .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(&path)
        .map(|directory| directory.join(&called))
        .find(|path| path.is_absolute() && executable(path))
        .with_context(|| format!("{PROGRAM} is not in PATH"))
}
