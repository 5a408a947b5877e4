//! The Kubernetes way to `snapshot allocated` and `snapshot delta`: what a backup application does. From the
//! name of a VolumeSnapshot it finds the driver and the SnapshotMetadataService of that driver, takes a
//! ServiceAccount's token for its audience, and asks the driver's sidecar over TLS (KEP-3314).
//!
//! An answer that is interrupted goes on where it broke, until `--timeout`: see [`resume`]. A token is
//! written nowhere but into a request.

mod failure;
mod find;
mod resume;
mod token;
mod wire;

#[cfg(test)]
mod fake_sidecar;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use tokio::time::Instant;

use super::block_map::{BlockMap, Query, Window};
use super::{Options, in_time, print_map};
use crate::kubernetes::client::{self, Rate};
use crate::kubernetes::name;
use find::Finder;
use resume::Resuming;
use token::Tokens;

/// Where `--help` shows these flags.
const HEADING: &str = "Through Kubernetes";

/// For a handful of calls: it never waits.
const RATE: Rate = Rate { per_second: 20.0, burst: 20 };

/// How to ask through Kubernetes. All of it follows from `--namespace`.
#[derive(Debug, Args)]
pub struct ClusterArgs {
    /// Ask through Kubernetes: the namespace of the VolumeSnapshots, which then go by name
    #[arg(long, value_parser = name::object, help_heading = HEADING)]
    namespace: Option<String>,
    /// The cluster, as for kubectl [env: KUBECONFIG] [default: ~/.kube/config, else that of the pod]
    #[arg(long, requires = "namespace", value_name = "PATH", help_heading = HEADING)]
    kubeconfig: Option<PathBuf>,
    /// ServiceAccount to ask as, for which a token is requested [default: the caller, if it is one]
    #[arg(long, requires = "namespace", conflicts_with = "token_file", value_parser = name::object, value_name = "NAME", help_heading = HEADING)]
    service_account: Option<String>,
    /// Namespace of the ServiceAccount [default: that of the VolumeSnapshots]
    #[arg(long, requires = "service_account", value_parser = name::object, value_name = "NAMESPACE", help_heading = HEADING)]
    service_account_namespace: Option<String>,
    /// How long a requested token is good for, from 10min on
    #[arg(long, requires = "namespace", conflicts_with = "token_file", value_parser = token_expiry, default_value = "10min", help_heading = HEADING)]
    token_expiry: Duration,
    /// File with the token to ask with, as a projected volume has it; read again for every attempt
    #[arg(long, requires = "namespace", value_name = "PATH", help_heading = HEADING)]
    token_file: Option<PathBuf>,
    /// Connect to this address instead of the one that the SnapshotMetadataService names (port-forward)
    #[arg(long, requires = "namespace", value_name = "HOST:PORT", help_heading = HEADING)]
    address: Option<String>,
}

impl ClusterArgs {
    /// Whether it is a cluster that is asked.
    pub fn asked(&self) -> bool {
        self.namespace.is_some()
    }
}

/// Asks and prints.
///
/// # Errors
/// What the cluster or the sidecar refuses, with the next step; no answer within `--timeout`.
pub async fn ask(
    options: &Options,
    args: ClusterArgs,
    query: Query,
    window: Window,
    limit_rows: Option<u64>,
) -> Result<()> {
    let ClusterArgs {
        namespace,
        kubeconfig,
        service_account,
        service_account_namespace,
        token_expiry,
        token_file,
        address,
    } = args;
    let Some(namespace) = namespace else { bail!("--namespace is missing") };
    if options.endpoint.is_some() {
        bail!("--endpoint asks a driver and --namespace asks through Kubernetes: give one of them");
    }
    let open = async |query, deadline| {
        let client = client::connect_as_user(kubeconfig.as_deref(), RATE).await?;
        let tokens = match token_file {
            Some(path) => Tokens::file(path),
            None => {
                let home = service_account_namespace.unwrap_or_else(|| namespace.clone());
                let account = service_account.map(|name| (home, name));
                Tokens::requested(client.clone(), account, token_expiry)
            }
        };
        let finder = Finder::new(client, &namespace, address);
        let limits = Limits { deadline, timeout: options.timeout };
        Ok(BlockMap::new(Resuming::new(finder, tokens, query, window, limits)))
    };
    in_time(options, async |deadline| {
        let open = async |query| open(query, deadline).await;
        print_map::run(query, Some(&namespace), options.output, limit_rows, open).await
    })
    .await
}

/// How long to go on.
#[derive(Debug, Clone, Copy)]
struct Limits {
    deadline: Instant,
    /// The same as the user said it.
    timeout: Duration,
}

/// From ten minutes on, the least that the API server grants, to 2^32 seconds, the most.
fn token_expiry(text: &str) -> Result<Duration, String> {
    let expiry = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if expiry < Duration::from_secs(600) || expiry > Duration::from_secs(1 << 32) {
        return Err("at least 10min, and at most 2^32 seconds".to_owned());
    }
    Ok(expiry)
}
