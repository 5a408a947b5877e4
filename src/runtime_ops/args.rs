//! The flags of the mode.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;

use crate::crust;
use crate::grpc::SocketPath;
use crate::grpc::socket::octal_mode;
use crate::quantity::some_time;
use crate::telemetry::role::RoleArgs;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Socket to serve the Runtime API on: unix:///path, unix:/path or /path.
    #[arg(long, default_value = "unix:///run/csi-loopback/crust.sock", value_name = "SOCKET")]
    pub endpoint: SocketPath,

    /// Access mode of the socket, in octal.
    #[arg(long, default_value = "0600", value_parser = octal_mode, value_name = "MODE")]
    pub socket_mode: u32,

    /// Group that owns the socket, by name or number; by default this process's own.
    #[arg(long, value_name = "GROUP")]
    pub socket_group: Option<String>,

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

    /// Directories in which each running sandbox of Kata has one called after it, in the layout kata.
    #[arg(long, default_values = ["/run/vc/sbs", "/run/kata"], value_name = "DIR")]
    pub kata_sandbox_dir: Vec<PathBuf>,

    /// How long a runtime's program may take.
    #[arg(long, default_value = "20s", value_parser = some_time, value_name = "TIME")]
    pub cli_timeout: Duration,

    /// What a runtime's program finds in its environment besides PATH; may be repeated.
    #[arg(long, value_parser = variable, value_name = "NAME=VALUE")]
    pub cli_env: Vec<(String, String)>,

    /// Time between two looks for entries whose target is gone; what was changed since the last one is not looked at.
    #[arg(long, default_value = "60s", value_parser = some_time, value_name = "TIME")]
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

/// A time above none, and no longer than a day.
fn variable(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("is not NAME=VALUE")?;
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    if name.is_empty() || !name.bytes().all(is_name) || value.contains('\0') {
        return Err("is not NAME=VALUE with a name of letters, digits and _".into());
    }
    Ok((name.to_owned(), value.to_owned()))
}
