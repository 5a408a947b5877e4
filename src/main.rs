//! The `csi-loopback` binary: parse, run, exit code. Everything else is in the library; a mode
//! starts its own telemetry, because only it knows its flags.

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
