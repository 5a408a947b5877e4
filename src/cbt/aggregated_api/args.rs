//! The flags of the aggregated API server.

use std::time::Duration;

use common::quantity::duration;
use kubernetes::client::{self, Rate, per_second};
use kubernetes::leader::lease_duration;
use kubernetes::snapshot_delta::{DEFAULT_LIMIT, GROUP, VERSION};
use kubernetes::tls::identity;
use kubernetes::{cbt_http, name};
use telemetry::role::{self, RoleArgs};

/// Help texts that differ from the shared flags'.
const SERVICE_ADDRESS: &str = "Address of this server for the API server, as NAME.NAMESPACE.svc:PORT of a Service; \
    the certificate of --self-signed is valid for it";
const KUBE_API_QPS: &str = "Maximum requests per second to the API server, for permission reviews and for all other calls each";

#[derive(Debug, clap::Args)]
#[command(mut_arg("service_address", |arg| arg.help(SERVICE_ADDRESS)))]
#[command(mut_arg("kube_api_qps", |arg| arg.help(KUBE_API_QPS)))]
#[command(mut_arg("http_endpoint", role::http_by_default))]
#[command(mut_arg("drain_timeout", |flag| flag.default_value("40s")))]
pub struct Args {
    #[command(flatten)]
    pub kubernetes: client::Args,

    /// TCP port of the API, on all addresses (0: any free port)
    #[arg(long, default_value_t = 6443, value_name = "PORT")]
    pub port: u16,

    #[command(flatten)]
    pub tls: identity::Args,

    /// APIService whose caBundle is updated with --self-signed
    #[arg(long, default_value_t = format!("{VERSION}.{GROUP}"), value_parser = name::object, value_name = "NAME")]
    pub api_service: String,

    /// Maximum number of blocks in a response, an upper bound for spec.limit
    #[arg(long, default_value_t = cbt_http::MAX_LIMIT, value_parser = clap::value_parser!(u32).range(1..=i64::from(cbt_http::MAX_LIMIT)), value_name = "N")]
    pub max_limit: u32,

    /// Maximum requests per second of one user
    #[arg(long, default_value_t = 10.0, value_parser = per_second, value_name = "N")]
    pub user_qps: f64,

    /// Maximum burst of requests of one user
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    pub user_burst: u32,

    /// Maximum requests per second of all users
    #[arg(long, default_value_t = 100.0, value_parser = per_second, value_name = "N")]
    pub qps: f64,

    /// Maximum burst of requests of all users
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    pub burst: u32,

    /// Time to cache a granted permission review (0s: do not cache)
    #[arg(long, default_value = "10s", value_parser = review_ttl, value_name = "TIME")]
    pub review_cache_ttl: Duration,

    /// Lease for leader election
    #[arg(long, default_value = NAME, value_parser = name::object, value_name = "NAME")]
    pub lease: String,

    /// Time after which an unrenewed lease expires, the maximum failover delay
    #[arg(long, default_value = "15s", value_parser = lease_duration, value_name = "TIME")]
    pub lease_duration: Duration,

    /// Unique name of this replica; otherwise a random name is used
    #[arg(long, env = "POD_NAME", value_parser = name::object, value_name = "NAME")]
    pub identity: Option<String>,

    /// ServiceAccount of this server in its namespace, used to call drivers' endpoints
    #[arg(long, env = "POD_SERVICE_ACCOUNT", default_value = NAME, value_parser = name::object, value_name = "NAME")]
    pub service_account: String,

    #[command(flatten)]
    pub role: RoleArgs,
}

/// Default name of the objects of a deployment.
const NAME: &str = "csi-loopback-aggregated-api";

impl Args {
    /// Rate limit of one user.
    pub fn user_rate(&self) -> Rate {
        Rate { per_second: self.user_qps, burst: self.user_burst }
    }

    /// Rate limit of all users.
    pub fn total_rate(&self) -> Rate {
        Rate { per_second: self.qps, burst: self.burst }
    }
}

/// A request without a limit must not be truncated by the maximum.
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
    fn flags_out_of_range_are_command_line_errors() {
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
