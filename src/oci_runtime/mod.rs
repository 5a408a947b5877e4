//! The mode `oci-runtime`: an OCI runtime that mounts what crust_ops has left word of ([`crate::crust`]) where only the container
//! sees it, and leaves all the rest to another runtime, runc unless configured otherwise (KEP-2857). Its command line is that
//! other runtime's, so all of it is passed on: only `create`, `run`, `delete` and `crust` are looked at.

use std::ffi::OsString;
use std::process::ExitCode;

/// All that the other runtime gets, as it was given.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    pub arguments: Vec<OsString>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let _ = args;
    anyhow::bail!("not there yet")
}
