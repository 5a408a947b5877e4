//! The flags of the mode.

use clap::{ArgAction, ValueEnum};
use serde::Deserialize;

use crate::kubernetes::tls::identity;
use crate::kubernetes::{client, name};
use crate::quantity;
use crate::telemetry::role::{self, RoleArgs};

/// Help that says more than that of the flags that other roles have, too.
const SERVICE_ADDRESS: &str = "Where the API server reaches the webhooks, as host:port: the name of a Service. \
    The certificate of --self-signed is for this host";

#[derive(Debug, clap::Args)]
#[command(mut_arg("service_address", |arg| arg.help(SERVICE_ADDRESS)))]
#[command(mut_arg("http_endpoint", role::http_by_default))]
pub struct Args {
    #[command(flatten)]
    pub kubernetes: client::Args,

    /// Driver whose inline volumes are judged, by the name of its CSIDriver object.
    #[arg(long, default_value = "loopback.csi.local", value_parser = name::object, value_name = "NAME")]
    pub driver_name: String,

    /// TCP port to serve the webhooks on, on every address; 0 for any that is free.
    #[arg(long, default_value_t = 9443, value_name = "PORT")]
    pub port: u16,

    #[command(flatten)]
    pub tls: identity::Args,

    /// MutatingWebhookConfiguration and ValidatingWebhookConfiguration whose caBundle is kept with --self-signed.
    #[arg(long, default_value = NAME, value_parser = name::object, value_name = "NAME")]
    pub webhook_configuration: String,

    #[command(flatten)]
    pub policy: PolicyArgs,

    #[command(flatten)]
    pub role: RoleArgs,
}

/// What holds for namespaces of which the ConfigMap says nothing else.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Policy, where the ConfigMap says nothing else")]
pub struct PolicyArgs {
    /// ConfigMap with the policy, key policy.yaml, in the webhooks' own namespace (docs/reference/inline-volumes.md).
    #[arg(long, default_value = NAME, value_parser = name::object, value_name = "NAME")]
    pub config_map: String,

    /// Whether pods may have inline volumes at all.
    #[arg(long, default_value_t = true, action = ArgAction::Set, value_name = "BOOL")]
    pub inline_allowed: bool,

    /// Largest size that pods may ask for; by default as large as the driver makes them.
    #[arg(long, value_parser = quantity::parse, value_name = "SIZE")]
    pub max_size: Option<u64>,

    /// What a namespace's Pod Security level has to allow (label pod-security.kubernetes.io/enforce); by default what the
    /// label security.openshift.io/csi-ephemeral-volume-profile of the CSIDriver object says, and without that privileged.
    #[arg(long, value_enum, value_name = "LEVEL")]
    pub volume_profile: Option<Level>,

    /// Level of namespaces without that label.
    #[arg(long, value_enum, default_value_t = Level::Privileged, value_name = "LEVEL")]
    pub default_pod_security: Level,
}

/// Pod Security levels, the strictest first.
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

    /// As labels have it.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == name).map(|(level, _)| *level)
    }

    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(level, _)| *level == self).map_or("", |(_, name)| name)
    }
}

/// Of the objects that belong to a deployment.
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
    fn flags_out_of_their_range_are_errors_of_the_command_line() {
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
