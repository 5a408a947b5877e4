//! The flags of the mode.

use std::path::PathBuf;
use std::time::Duration;

use common::quantity::nonzero_duration;
use grpc::SocketPath;
use grpc::socket::octal_mode;
use kubernetes::client;
use telemetry::role::RoleArgs;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub cluster: client::Args,

    /// Unix socket for CSI, which node-driver-registrar registers with kubelet: unix:///path,
    /// unix:/path or /path.
    #[arg(
        long,
        env = "CSI_ENDPOINT",
        default_value = "unix:///csi/proxy.sock",
        value_name = "SOCKET"
    )]
    pub endpoint: SocketPath,

    /// Access mode of the socket, in octal.
    #[arg(long, default_value = "0600", value_parser = octal_mode, value_name = "MODE")]
    pub socket_mode: u32,

    /// Unix socket of the CSI driver.
    #[arg(long, default_value = "unix:///csi/csi.sock", value_name = "SOCKET")]
    pub driver_endpoint: SocketPath,

    /// Name of the node whose pods are watched.
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    pub node_name: String,

    /// Directory that stores the deferred volumes; it must survive restarts of the node.
    #[arg(long, default_value = "/var/lib/csi-loopback-node-proxy", value_name = "DIR")]
    pub state_dir: PathBuf,

    /// Maximum time that a publish waits for the API server to report its pod.
    #[arg(long, default_value = "5s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub pod_timeout: Duration,

    /// Interval of checking deferred volumes; those whose target is gone twice are removed.
    #[arg(long, default_value = "60s", value_parser = nonzero_duration, value_name = "TIME")]
    pub collect_every: Duration,

    #[command(flatten)]
    pub role: RoleArgs,
}

#[cfg(test)]
mod tests {
    use clap::Args as _;

    use super::*;

    #[test]
    fn invalid_collection_intervals_are_refused() {
        let parse = |every: &str| {
            let command = Args::augment_args(clap::Command::new("node-proxy"));
            command.try_get_matches_from(["node-proxy", "--node-name=n", "--collect-every", every])
        };
        assert!(parse("1ms").is_ok());
        for every in ["0s", "2days"] {
            let refused = parse(every).unwrap_err().to_string();
            assert!(refused.contains("--collect-every") && refused.contains("1ms"), "{refused}");
        }
    }
}
