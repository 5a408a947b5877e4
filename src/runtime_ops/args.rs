//! The flags of the mode.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;

use crate::crust;
use crate::grpc::SocketPath;
use crate::telemetry::{http, logs};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Socket to serve the Runtime API on: unix:///path, unix:/path or /path.
    #[arg(long, default_value = "unix:///run/csi-loopback/crust.sock", value_name = "SOCKET")]
    pub endpoint: SocketPath,

    /// How volumes are handed over: crust (the proposal's layout) or kata (Kata's direct volumes).
    #[arg(long, value_enum, default_value_t = Layout::Crust, value_name = "LAYOUT")]
    pub layout: Layout,

    /// Directory of the entries in the layout crust.
    #[arg(long, default_value = crust::DEFAULT_DIRECTORY, value_name = "DIR")]
    pub crust_dir: PathBuf,

    /// Directory of the entries in the layout kata.
    #[arg(long, default_value = "/run/kata-containers/shared/direct-volumes", value_name = "DIR")]
    pub kata_dir: PathBuf,

    /// Program that asks Kata, in the layout kata.
    #[arg(long, default_value = "/usr/bin/kata-runtime", value_name = "FILE")]
    pub kata_runtime: PathBuf,

    /// How long a runtime's program may take.
    #[arg(long, default_value = "20s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub cli_timeout: Duration,

    /// Serve /healthz and /metrics on host:port or :port; by default not at all.
    #[arg(long, value_name = "ADDRESS")]
    pub http_endpoint: Option<http::Endpoint>,

    #[command(flatten)]
    pub log: logs::Args,
}

/// `--layout`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Layout {
    Crust,
    Kata,
}
