//! The mode `oci-runtime`: an OCI runtime that mounts what crust_ops has left word of ([`crate::crust`]) where only the container
//! sees it, and leaves all the rest to another runtime, runc unless configured otherwise (KEP-2857). Its command line is that
//! other runtime's, so all of it is passed on: only `create`, `run`, `restore`, `delete` and `crust` are looked at, and where
//! no volume has been left to this one the other takes this process over.

mod answer;
mod behind;
mod bundle;
mod claim;
mod command_line;
mod config;
mod create;
mod deferred;
mod delete;
mod process;
mod report;
mod sub_path;
mod volume;

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};

use behind::Behind;
use command_line::{Command, Invocation};
use config::Config;

/// The name that this mode goes by.
pub const PROGRAM: &str = "csi-loopback-runc";

/// All that the other runtime gets, as it was given.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    pub arguments: Vec<OsString>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    // There is no flag for it: the command line is another's.
    #[cfg(feature = "failpoints")]
    if let Some(directory) = std::env::var_os("CSI_LOOPBACK_RUNC_FAIL_POINTS") {
        crate::backend::fail_point::watch(directory.into());
    }
    let invocation = Invocation::parse(&args.arguments);
    // Told here, and not by main: the caller looks for it elsewhere too.
    Ok(handle(&args, &invocation).unwrap_or_else(|error| {
        report::error(&invocation, &format!("{error:#}"));
        ExitCode::FAILURE
    }))
}

fn handle(args: &Args, invocation: &Invocation) -> Result<ExitCode> {
    let config = Config::read()?;
    let behind = Behind { program: &config.runtime, arguments: &args.arguments };
    match &invocation.command {
        Command::Create(create) => {
            if let Some((spec, found)) = create::deferred(&config, create)? {
                return create::create(&config, &behind, invocation, create, spec, &found);
            }
        }
        Command::Restore(restore) => {
            if let Some((_, found)) = create::deferred(&config, restore)? {
                let target = found.first().map(|deferred| deferred.target.to_string());
                bail!(
                    "a container with a volume whose mount is deferred ({}) cannot be restored from a checkpoint",
                    target.unwrap_or_default()
                );
            }
        }
        Command::Delete { container } => {
            if let Ok(container) = claim::container(invocation.root.as_deref(), container) {
                let claimed = delete::claimed(&config, &container);
                if !claimed.is_empty() {
                    return delete::delete(&behind, &container, &claimed);
                }
            }
        }
        Command::Crust(words) => return Ok(answer::answer(&config, words)),
        Command::Other => {}
    }
    behind.exec()
}

/// The path by which this program was called, by which crust_ops is to call it again. The name selects the mode, so links are
/// not followed.
fn own_program() -> Result<PathBuf> {
    let called = std::env::args_os().next().map(PathBuf::from).unwrap_or_default();
    ensure!(
        called.file_name().is_some_and(|name| name == PROGRAM),
        "has to be called by the name {PROGRAM} (a link is enough), by which crust_ops calls it again"
    );
    if called.components().count() > 1 || called.is_absolute() {
        return std::path::absolute(&called).context("finding this program");
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
