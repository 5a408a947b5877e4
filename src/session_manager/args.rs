//! The flags of the mode.

use std::time::Duration;

use crate::kubernetes::leader::lease_duration;
use crate::kubernetes::tls::identity;
use crate::kubernetes::{client, name};
use crate::quantity::duration;
use crate::telemetry::role::{self, RoleArgs};

/// Help that says more than that of the flags that other roles have, too.
const SERVICE_ADDRESS: &str = "Where the API server reaches the webhook, as host:port: the name of a Service. \
    The certificate of --self-signed is for this host";
const KUBE_API_QPS: &str =
    "Calls to the API server a second, for requests and for the webhook each";

#[derive(Debug, clap::Args)]
#[command(mut_arg("service_address", |arg| arg.help(SERVICE_ADDRESS)))]
#[command(mut_arg("kube_api_qps", |arg| arg.help(KUBE_API_QPS)))]
#[command(mut_arg("http_endpoint", role::http_by_default))]
pub struct Args {
    #[command(flatten)]
    pub kubernetes: client::Args,

    /// TCP port to serve the webhook on, on every address; 0 for any that is free.
    #[arg(long, default_value_t = 9443, value_name = "PORT")]
    pub port: u16,

    #[command(flatten)]
    pub tls: identity::Args,

    /// ValidatingWebhookConfiguration whose caBundle is kept with --self-signed.
    #[arg(long, default_value = NAME, value_parser = name::object, value_name = "NAME")]
    pub webhook_configuration: String,

    /// ConfigMap with the lifetimes of sessions: defaultLifetime and maximumLifetime, such as 90m.
    #[arg(long, default_value = NAME, value_parser = name::object, value_name = "NAME")]
    pub config_map: String,

    /// Lease by which one of several replicas leads.
    #[arg(long, default_value = NAME, value_parser = name::object, value_name = "NAME")]
    pub lease: String,

    /// How long a lease lasts that nobody renews: so late at most another replica takes over.
    #[arg(long, default_value = "15s", value_parser = lease_duration, value_name = "TIME")]
    pub lease_duration: Duration,

    /// Name of this replica, unlike that of any other; by default a random one.
    #[arg(long, env = "POD_NAME", value_parser = name::object, value_name = "NAME")]
    pub identity: Option<String>,

    /// How long the snapshots of a request have to become ready before it is Failed.
    #[arg(long, default_value = "10m", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub ready_timeout: Duration,

    /// Each request is looked at as often even where no watch says anything.
    #[arg(long, default_value = "60s", value_parser = resync, value_name = "TIME")]
    pub resync: Duration,

    /// Delete every session of the cluster and exit: for uninstalling. The other flags do nothing then, except
    /// --kubeconfig and those of the log.
    #[arg(long)]
    pub clean_up: bool,

    #[command(flatten)]
    pub role: RoleArgs,
}

/// Of the objects that belong to a deployment.
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
    fn flags_out_of_their_range_are_errors_of_the_command_line() {
        parse("x --self-signed --service-address a:1 --namespace n").unwrap();
        parse("x --clean-up").unwrap();
        for (bad, named) in [
            ("x --self-signed", "--service-address"),
            ("x --lease-duration 0s", "1s"),
            ("x --resync 0s", "1s"),
            ("x --kube-api-qps 0", "0.001"),
            ("x --kube-api-qps NaN", "0.001"),
            ("x --kube-api-burst 0", "1.."),
            ("x --config-map A_b", "a-z"),
            ("x --service-address https://a", "host:port"),
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains(named), "{bad}: {error}");
        }
    }
}
