//! The flags of the mode.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;

use crate::crust;
use common::quantity::nonzero_duration;
use grpc::SocketPath;
use grpc::socket::octal_mode;
use telemetry::role::RoleArgs;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Unix socket for the Runtime API: unix:///path, unix:/path or /path.
    #[arg(long, default_value = "unix:///run/csi-loopback/crust.sock", value_name = "SOCKET")]
    pub endpoint: SocketPath,

    /// Access mode of the socket, in octal.
    #[arg(long, default_value = "0600", value_parser = octal_mode, value_name = "MODE")]
    pub socket_mode: u32,

    /// Group that owns the socket, by name or number; without it the group of the process.
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,

    /// File layout of the entries: crust (KEP-2857) or kata (Kata's direct volumes).
    #[arg(long, value_enum, default_value_t = Layout::Crust, value_name = "LAYOUT")]
    pub layout: Layout,

    /// Directory of the entries in layout crust.
    #[arg(long, default_value = crust::DEFAULT_DIRECTORY, value_name = "DIR")]
    pub crust_dir: PathBuf,

    /// Directory of the entries in layout kata.
    #[arg(long, default_value = "/run/kata-containers/shared/direct-volumes", value_name = "DIR")]
    pub kata_dir: PathBuf,

    /// Path of kata-runtime, for layout kata.
    #[arg(long, default_value = "/usr/bin/kata-runtime", value_name = "FILE")]
    pub kata_runtime: PathBuf,

    /// Directories with a subdirectory for each running Kata sandbox, for layout kata.
    #[arg(long, default_values = ["/run/vc/sbs", "/run/kata"], value_name = "DIR")]
    pub kata_sandbox_dir: Vec<PathBuf>,

    /// Timeout of a runtime's program.
    #[arg(long, default_value = "20s", value_parser = nonzero_duration, value_name = "TIME")]
    pub cli_timeout: Duration,

    /// Environment variable of a runtime's program, in addition to PATH; repeatable.
    #[arg(long, value_parser = variable, value_name = "NAME=VALUE")]
    pub cli_env: Vec<(String, String)>,

    /// Interval of removing entries whose target is gone; newer entries are skipped.
    #[arg(long, default_value = "60s", value_parser = nonzero_duration, value_name = "TIME")]
    pub collect_every: Duration,

    #[command(flatten)]
    pub role: RoleArgs,
}

/// `--layout`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Layout {
    Crust,
    Kata,
}

/// Parses NAME=VALUE.
fn variable(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("must be NAME=VALUE")?;
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    if name.is_empty() || !name.bytes().all(is_name) || value.contains('\0') {
        return Err("must be NAME=VALUE with a name of letters, digits and _".into());
    }
    Ok((name.to_owned(), value.to_owned()))
}
