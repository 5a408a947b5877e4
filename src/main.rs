//! The `csi-loopback` binary: parse, run, exit code. Everything else is in the library; a role
//! starts its own telemetry, for only it knows its flags.

use std::process::ExitCode;

use csi_loopback::cli::Cli;
use csi_loopback::kubernetes::tls;

fn main() -> ExitCode {
    tls::install_provider();
    match Cli::parse_or_exit(std::env::args_os()).run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("csi-loopback: {error:#}");
            ExitCode::FAILURE
        }
    }
}
