//! The `csi-loopback` binary: parses the command line and runs the mode. Everything else is in the
//! library. A role starts its own telemetry, because only the role knows its flags.

use std::process::ExitCode;

use csi_loopback::cli::Cli;
use csi_loopback::kubernetes::tls;

fn main() -> ExitCode {
    tls::install_provider();
    match Cli::parse_or_exit(std::env::args_os()).run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("csi-loopback: {}", csi_loopback::client::describe(&error));
            ExitCode::FAILURE
        }
    }
}
