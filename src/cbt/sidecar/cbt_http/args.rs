//! The flags of cbt-http.

use std::time::Duration;

use grpc::fingerprint;
use kubernetes::leader::lease_duration;
use kubernetes::metadata_service::Address;
use kubernetes::name;
use telemetry::klog;

#[derive(Debug, Clone, clap::Args)]
// The default name, `Args`, would collide with the group of the struct that flattens this one.
#[group(skip)]
pub struct Args {
    /// Serve pages of changed blocks to the aggregated API server over HTTPS
    #[arg(long = "cbt-http", id = "cbt_http", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, action = clap::ArgAction::Set, value_parser = klog::boolean, value_name = "BOOL")]
    pub enabled: bool,

    /// TCP port of cbt-http, on all addresses (0: any free port)
    #[arg(
        long = "cbt-http-port",
        id = "cbt_http_port",
        default_value_t = 8443,
        value_name = "PORT"
    )]
    pub port: u16,

    /// Address of cbt-http for the aggregated API server (host:port, e.g. name.namespace.svc:8443);
    /// --manage-service publishes it in the driver's DriverDiscovery, and the certificate of
    /// --self-signed is valid for it
    #[arg(
        long = "cbt-http-service-address",
        id = "cbt_http_service_address",
        value_name = "ADDRESS"
    )]
    pub service_address: Option<Address>,

    /// Name of the Lease for leader election; otherwise a name derived from the driver's name is
    /// used
    #[arg(long = "cbt-http-lease", id = "cbt_http_lease", value_parser = name::object, value_name = "NAME")]
    pub lease: Option<String>,

    /// Time after which an unrenewed lease expires, the maximum failover delay
    #[arg(long = "cbt-http-lease-duration", id = "cbt_http_lease_duration", default_value = "15s",
        value_parser = lease_duration, value_name = "TIME")]
    pub lease_duration: Duration,
}

impl Args {
    /// Name of the Lease: the same for all replicas, different for each driver.
    pub fn lease(&self, driver: &str) -> String {
        let own = || {
            let own = format!("csi-loopback-cbt-http-{driver}");
            if name::is_object(&own) {
                own
            } else {
                format!("csi-loopback-cbt-http-{}", fingerprint(driver))
            }
        };
        self.lease.clone().unwrap_or_else(own)
    }
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
        let args = parse("x --cbt-http --cbt-http-lease-duration 2s").unwrap();
        assert!(args.enabled && !parse("x --cbt-http=false").unwrap().enabled);
        for (bad, named) in [
            ("x --cbt-http-lease-duration 0s", "1h"),
            ("x --cbt-http-lease A_b", "a-z"),
            ("x --cbt-http-service-address https://a", "host:port"),
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains(named), "{bad}: {error}");
        }
    }

    #[test]
    fn each_driver_has_its_own_lease_with_a_valid_name() {
        let args = parse("x").unwrap();
        assert_eq!(args.lease("a.example"), "csi-loopback-cbt-http-a.example");
        for odd in ["A.example", "a_b", ""] {
            assert!(name::is_object(&args.lease(odd)), "{odd}");
        }
        assert_ne!(args.lease("A.example"), args.lease("a_b"));
        assert_eq!(parse("x --cbt-http-lease one").unwrap().lease("a"), "one");
    }
}
