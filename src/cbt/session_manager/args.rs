//! The flags of the session manager.

use std::time::Duration;

use common::quantity::duration;
use kubernetes::leader::lease_duration;
use kubernetes::tls::{ClientArgs, identity};
use kubernetes::{client, name};
use telemetry::role::{self, RoleArgs};

/// Help texts that differ from the shared flags'.
const SERVICE_ADDRESS: &str = "Address of the webhook for the API server, as host:port of a Service; \
    the certificate of --self-signed is valid for it";
const KUBE_API_QPS: &str =
    "Maximum requests per second to the API server, for the controller and the webhook each";

#[derive(Debug, clap::Args)]
#[command(mut_arg("service_address", |arg| arg.help(SERVICE_ADDRESS)))]
#[command(mut_arg("kube_api_qps", |arg| arg.help(KUBE_API_QPS)))]
#[command(mut_arg("http_endpoint", role::http_by_default))]
pub struct Args {
    #[command(flatten)]
    pub kubernetes: client::Args,

    /// TCP port of the webhook, on all addresses (0: any free port)
    #[arg(long, default_value_t = 9443, value_name = "PORT")]
    pub port: u16,

    #[command(flatten)]
    pub tls: identity::Args,

    #[command(flatten)]
    pub clients: ClientArgs,

    /// ValidatingWebhookConfiguration whose caBundle is updated with --self-signed
    #[arg(long, default_value = NAME, value_parser = name::object, value_name = "NAME")]
    pub webhook_configuration: String,

    /// ConfigMap with the lifetimes of sessions: defaultLifetime and maximumLifetime, e.g. 90m
    #[arg(long, default_value = NAME, value_parser = name::object, value_name = "NAME")]
    pub config_map: String,

    /// Maximum SnapshotSessionRequests of a namespace (0: no maximum)
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=10_000), value_name = "N")]
    pub max_sessions_per_namespace: u32,

    /// Lease for leader election
    #[arg(long, default_value = NAME, value_parser = name::object, value_name = "NAME")]
    pub lease: String,

    /// Time after which an unrenewed lease expires, the maximum failover delay
    #[arg(long, default_value = "15s", value_parser = lease_duration, value_name = "TIME")]
    pub lease_duration: Duration,

    /// Unique name of this replica; otherwise a random name is used
    #[arg(long, env = "POD_NAME", value_parser = name::object, value_name = "NAME")]
    pub identity: Option<String>,

    /// Time for the snapshots of a request to become ready before the request fails
    #[arg(long, default_value = "10m", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub ready_timeout: Duration,

    /// Interval at which each request is reconciled even without a change
    #[arg(long, default_value = "60s", value_parser = resync, value_name = "TIME")]
    pub resync: Duration,

    /// Delete all sessions of the cluster and exit, before uninstalling; only --kubeconfig and the
    /// log flags apply
    #[arg(long)]
    pub clean_up: bool,

    #[command(flatten)]
    pub role: RoleArgs,
}

/// Default name of the objects of a deployment.
const NAME: &str = "csi-loopback-session-manager";

fn resync(text: &str) -> Result<Duration, String> {
    duration(text, Duration::from_secs(1)..=Duration::from_secs(24 * 3600), "from 1s to 24h")
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command, FromArgMatches};

    use super::*;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        let command = Args::augment_args(Command::new("x"));
        command.clone().debug_assert();
        Args::from_arg_matches(&command.try_get_matches_from(line.split_whitespace())?)
    }

    #[test]
    fn flags_out_of_range_are_command_line_errors() {
        parse("x --self-signed --service-address a:1 --namespace n").unwrap();
        parse("x --clean-up").unwrap();
        for (bad, named) in [
            ("x --self-signed", "--service-address"),
            ("x --lease-duration 0s", "1s"),
            ("x --resync 0s", "1s"),
            ("x --kube-api-qps 0", "0.001"),
            ("x --kube-api-qps NaN", "0.001"),
            ("x --kube-api-burst 0", "1.."),
            ("x --max-sessions-per-namespace 10001", "0..=10000"),
            ("x --config-map A_b", "a-z"),
            ("x --service-address https://a", "host:port"),
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains(named), "{bad}: {error}");
        }
    }
}
