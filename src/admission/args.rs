//! The flags of the mode.

use clap::{ArgAction, ValueEnum};
use serde::Deserialize;

use common::quantity;
use kubernetes::tls::{ClientArgs, identity};
use kubernetes::{client, name};
use telemetry::role::{self, RoleArgs};

/// Replaces the shorter help that this flag has in other modes.
const SERVICE_ADDRESS: &str = "Address at which the API server calls the webhooks, as host:port of their Service. \
    --self-signed issues the certificate for this host";

#[derive(Debug, clap::Args)]
#[command(mut_arg("service_address", |arg| arg.help(SERVICE_ADDRESS)))]
#[command(mut_arg("http_endpoint", role::http_by_default))]
pub struct Args {
    #[command(flatten)]
    pub kubernetes: client::Args,

    /// Name of the CSIDriver whose inline volumes are validated.
    #[arg(long, default_value = "loopback.csi.local", value_parser = name::object, value_name = "NAME")]
    pub driver_name: String,

    /// TCP port for the webhooks, on all addresses; 0 selects a free port.
    #[arg(long, default_value_t = 9443, value_name = "PORT")]
    pub port: u16,

    #[command(flatten)]
    pub tls: identity::Args,

    #[command(flatten)]
    pub clients: ClientArgs,

    /// Name of the webhook configurations whose caBundle --self-signed maintains.
    #[arg(long, default_value = NAME, value_parser = name::object, value_name = "NAME")]
    pub webhook_configuration: String,

    #[command(flatten)]
    pub policy: PolicyArgs,

    #[command(flatten)]
    pub role: RoleArgs,
}

/// Rules for namespaces that the ConfigMap does not mention.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Policy defaults, which the ConfigMap overrides")]
pub struct PolicyArgs {
    /// ConfigMap with the policy (key policy.yaml) in the namespace of the webhooks.
    #[arg(long, default_value = NAME, value_parser = name::object, value_name = "NAME")]
    pub config_map: String,

    /// Allow inline volumes.
    #[arg(long, default_value_t = true, action = ArgAction::Set, value_name = "BOOL")]
    pub inline_allowed: bool,

    /// Maximum size of an inline volume; without it the driver's limit applies.
    #[arg(long, value_parser = quantity::parse, value_name = "SIZE")]
    pub max_size: Option<u64>,

    /// Pod Security level that a namespace must have for inline volumes; without it the label
    /// security.openshift.io/csi-ephemeral-volume-profile of the CSIDriver applies, else
    /// privileged.
    #[arg(long, value_enum, value_name = "LEVEL")]
    pub volume_profile: Option<Level>,

    /// Pod Security level of namespaces without the label pod-security.kubernetes.io/enforce.
    #[arg(long, value_enum, default_value_t = Level::Privileged, value_name = "LEVEL")]
    pub default_pod_security: Level,
}

/// Pod Security levels, in order from the strictest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Level {
    Restricted,
    Baseline,
    Privileged,
}

impl Level {
    const ALL: [(Self, &'static str); 3] = [
        (Self::Restricted, "restricted"),
        (Self::Baseline, "baseline"),
        (Self::Privileged, "privileged"),
    ];

    /// Parses the value of a Pod Security label.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == name).map(|(level, _)| *level)
    }

    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(level, _)| *level == self).map_or("", |(_, name)| name)
    }
}

/// Default name of the ConfigMap and the webhook configurations.
const NAME: &str = "csi-loopback-admission";

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
    fn invalid_flag_values_are_command_line_errors() {
        let args = parse(
            "x --self-signed --service-address a:1 --namespace n --inline-allowed false \
             --volume-profile baseline --max-size 1Gi",
        );
        let policy = args.unwrap().policy;
        assert!(!policy.inline_allowed && policy.volume_profile < Some(Level::Privileged));
        for (bad, named) in [
            ("x --self-signed", "--service-address"),
            ("x --volume-profile open", "baseline"),
            ("x --max-size much", "size"),
            ("x --inline-allowed perhaps", "true"),
            ("x --driver-name A_b", "a-z"),
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains(named), "{bad}: {error}");
        }
    }
}
