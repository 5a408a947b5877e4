//! The flags of the mode.

use std::time::Duration;

use crate::kubernetes::client::{self, Rate, per_second};
use crate::kubernetes::leader::lease_duration;
use crate::kubernetes::snapshot_delta::{DEFAULT_LIMIT, GROUP, VERSION};
use crate::kubernetes::tls::identity;
use crate::kubernetes::{cbt_http, name};
use crate::quantity::duration;
use crate::telemetry::role::{self, RoleArgs};

/// Help that says more than that of the flags that other roles have, too.
const SERVICE_ADDRESS: &str = "Where the API server reaches it, as host:port: the name of a Service, NAME.NAMESPACE.svc. \
    The certificate of --self-signed is for this host";
const KUBE_API_QPS: &str = "Calls to the API server a second, for requests and for the rest each";

#[derive(Debug, clap::Args)]
#[command(mut_arg("service_address", |arg| arg.help(SERVICE_ADDRESS)))]
#[command(mut_arg("kube_api_qps", |arg| arg.help(KUBE_API_QPS)))]
#[command(mut_arg("http_endpoint", role::http_by_default))]
#[command(mut_arg("drain_timeout", |flag| flag.default_value("40s")))]
pub struct Args {
    #[command(flatten)]
    pub kubernetes: client::Args,

    /// TCP port to serve the API on, on every address; 0 for any that is free.
    #[arg(long, default_value_t = 6443, value_name = "PORT")]
    pub port: u16,

    #[command(flatten)]
    pub tls: identity::Args,

    /// APIService whose caBundle is kept with --self-signed.
    #[arg(long, default_value_t = format!("{VERSION}.{GROUP}"), value_parser = name::object, value_name = "NAME")]
    pub api_service: String,

    /// Entries of an answer, at most, whatever spec.limit asks for.
    #[arg(long, default_value_t = cbt_http::MAX_LIMIT, value_parser = clap::value_parser!(u32).range(1..=i64::from(cbt_http::MAX_LIMIT)), value_name = "N")]
    pub max_limit: u32,

    /// Requests of one user a second.
    #[arg(long, default_value_t = 10.0, value_parser = per_second, value_name = "N")]
    pub user_qps: f64,

    /// Requests of one user at once, after a pause.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    pub user_burst: u32,

    /// Requests of all users a second.
    #[arg(long, default_value_t = 100.0, value_parser = per_second, value_name = "N")]
    pub qps: f64,

    /// Requests of all users at once, after a pause.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    pub burst: u32,

    /// How long a permission that the API server has granted is remembered; 0s for not at all.
    #[arg(long, default_value = "10s", value_parser = review_ttl, value_name = "TIME")]
    pub review_cache_ttl: Duration,

    /// Lease by which one of several replicas leads.
    #[arg(long, default_value = NAME, value_parser = name::object, value_name = "NAME")]
    pub lease: String,

    /// How long a lease lasts that nobody renews: so late at most another replica takes over.
    #[arg(long, default_value = "15s", value_parser = lease_duration, value_name = "TIME")]
    pub lease_duration: Duration,

    /// Name of this replica, unlike that of any other; by default a random one.
    #[arg(long, env = "POD_NAME", value_parser = name::object, value_name = "NAME")]
    pub identity: Option<String>,

    /// ServiceAccount of the program, in its namespace: as it drivers' endpoints are called.
    #[arg(long, env = "POD_SERVICE_ACCOUNT", default_value = NAME, value_parser = name::object, value_name = "NAME")]
    pub service_account: String,

    #[command(flatten)]
    pub role: RoleArgs,
}

/// Of the objects that belong to a deployment.
const NAME: &str = "csi-loopback-aggregated-api";

impl Args {
    /// Of requests by one user.
    pub fn user_rate(&self) -> Rate {
        Rate { per_second: self.user_qps, burst: self.user_burst }
    }

    /// Of requests by all users.
    pub fn total_rate(&self) -> Rate {
        Rate { per_second: self.qps, burst: self.burst }
    }
}

/// No request that leaves the limit to the server is to be cut short without a reason.
const _: () = assert!(DEFAULT_LIMIT <= cbt_http::MAX_LIMIT as u64);

fn review_ttl(text: &str) -> Result<Duration, String> {
    duration(text, Duration::ZERO..=Duration::from_secs(3600), "from 0s to 1h")
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
        let args = parse("x --self-signed --service-address a.b.svc:443 --namespace n").unwrap();
        assert_eq!(args.api_service, "v1alpha1.cbt.storage.k8s.io");
        for (bad, named) in [
            ("x --self-signed", "--service-address"),
            ("x --max-limit 0", "1..=4096"),
            ("x --max-limit 4097", "1..=4096"),
            ("x --user-qps 0", "0.001"),
            ("x --qps NaN", "0.001"),
            ("x --burst 0", "1.."),
            ("x --lease-duration 0s", "1s"),
            ("x --review-cache-ttl 2h", "0s"),
            ("x --api-service A_b", "a-z"),
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains(named) || error.contains("unexpected"), "{bad}: {error}");
        }
    }
}
