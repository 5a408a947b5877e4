//! The Kubernetes way to `snapshot allocated` and `snapshot delta`: what a backup application does (KEP-3314). Either,
//! as it is released ([`metadata`]): from the name of a VolumeSnapshot it finds the driver and the
//! SnapshotMetadataService of that driver, takes a ServiceAccount's token for its audience, and asks the driver's sidecar
//! over TLS. Or, as in the session design ([`session`]): it makes a SnapshotSessionRequest and is told all of this, with the
//! token of a session, which it ends. Or ([`aggregated`]) it makes VolumeSnapshotDeltas, which the API server answers itself,
//! page by page, through the aggregated API server.
//!
//! An answer that is interrupted goes on where it broke, until `--timeout`: see [`resume`]. A token is
//! written nowhere but into a request.

mod aggregated;
mod failure;
mod find;
mod metadata;
mod request;
mod resume;
mod session;
mod token;
mod wire;

#[cfg(test)]
mod aggregated_tests;
#[cfg(test)]
mod fake_sidecar;
#[cfg(test)]
mod session_tests;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use tokio::time::Instant;

use super::block_map::{BlockMap, Query, Window};
use super::stop::Stop;
use super::{Options, in_time, print_map};
use crate::kubernetes::client::{self, Rate};
use crate::kubernetes::name;
use crate::kubernetes::session::SnapshotSessionRequestSpec;
use aggregated::{Aggregated, Paging};
use find::Finder;
use metadata::Metadata;
use request::{Requests, Which};
use resume::Resuming;
use session::{Portion, Session};
use token::Tokens;

/// Where `--help` shows these flags.
const HEADING: &str = "Through Kubernetes";

/// For a handful of calls: it never waits.
const RATE: Rate = Rate { per_second: 20.0, burst: 20 };

/// For pages, one after the other: whoever answers them says when it is too much.
const PAGES: Rate = Rate { per_second: 1000.0, burst: 100 };

/// How long a token is good for by default: the least that the API server grants.
const TOKEN_EXPIRY: Duration = Duration::from_secs(600);

/// The longest session that can be asked for, in seconds: ten years.
const MAX_LIFETIME: i64 = 315_360_000;

/// How to ask through Kubernetes. All of it follows from `--namespace`.
#[derive(Debug, Args)]
pub struct ClusterArgs {
    /// Ask through Kubernetes: the namespace of the VolumeSnapshots, which then go by name
    #[arg(long, value_parser = name::object, help_heading = HEADING)]
    namespace: Option<String>,
    /// The cluster, as for kubectl [env: KUBECONFIG] [default: ~/.kube/config, else that of the pod]
    #[arg(long, requires = "namespace", value_name = "PATH", help_heading = HEADING)]
    kubeconfig: Option<PathBuf>,
    /// Which API to ask
    #[arg(long, requires = "namespace", value_enum, default_value_t = Api::Metadata, help_heading = HEADING)]
    api: Api,
    /// With --api metadata: ServiceAccount to ask as, for which a token is requested [default: the caller, if it is one]
    #[arg(long, requires = "namespace", conflicts_with = "token_file", value_parser = name::object, value_name = "NAME", help_heading = HEADING)]
    service_account: Option<String>,
    /// With --api metadata: namespace of the ServiceAccount [default: that of the VolumeSnapshots]
    #[arg(long, requires = "service_account", value_parser = name::object, value_name = "NAMESPACE", help_heading = HEADING)]
    service_account_namespace: Option<String>,
    /// With --api metadata: how long a requested token is good for, from 10min on [default: 10min]
    #[arg(long, requires = "namespace", conflicts_with = "token_file", value_parser = token_expiry, help_heading = HEADING)]
    token_expiry: Option<Duration>,
    /// With --api metadata: file with the token to ask with, as a projected volume has it; read again for every attempt
    #[arg(long, requires = "namespace", value_name = "PATH", help_heading = HEADING)]
    token_file: Option<PathBuf>,
    /// With --api session: how long the session is wanted [default: the session manager's]
    #[arg(long, requires = "namespace", conflicts_with = "session", value_parser = lifetime, help_heading = HEADING)]
    lifetime: Option<i64>,
    /// With --api session: a SnapshotSessionRequest that is there already; it is left as it is
    #[arg(long, requires = "namespace", value_parser = name::object, value_name = "NAME", help_heading = HEADING)]
    session: Option<String>,
    /// With --api aggregated: blocks of a page, at most [default: the server's, 256]
    #[arg(long, requires = "namespace", value_parser = clap::value_parser!(u64).range(1..), value_name = "N", help_heading = HEADING)]
    page_size: Option<u64>,
    /// With --api aggregated: a Secret of the namespace that the driver needs
    #[arg(long, requires = "namespace", value_parser = name::object, value_name = "NAME", help_heading = HEADING)]
    secret: Option<String>,
    /// With --api metadata and session: connect to this address instead of the one that the cluster names (port-forward)
    #[arg(long, requires = "namespace", value_name = "HOST:PORT", help_heading = HEADING)]
    address: Option<String>,
    /// Whether the base of a delta is given by its CSI handle (--base-id, which only deltas have).
    #[arg(skip)]
    base_is_handle: bool,
}

/// An API that tells blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Api {
    /// The released one of the driver's sidecar, with a ServiceAccount's token. --base-id names a base that is gone
    Metadata,
    /// The sidecar's for snapshot sessions: makes a SnapshotSessionRequest, waits until it is Ready, and deletes it at the end.
    /// The base goes by name, too, not by handle
    Session,
    /// VolumeSnapshotDelta of the aggregated API server, page by page: the API server is asked and nobody else. The base
    /// goes by name, too
    Aggregated,
}

impl Api {
    fn name(self) -> &'static str {
        match self {
            Self::Metadata => "metadata",
            Self::Session => "session",
            Self::Aggregated => "aggregated",
        }
    }
}

impl ClusterArgs {
    /// Whether it is a cluster that is asked.
    pub fn asked(&self) -> bool {
        self.namespace.is_some()
    }

    /// The same for a base that goes by its CSI handle.
    pub fn base_by_handle(self, base_is_handle: bool) -> Self {
        Self { base_is_handle, ..self }
    }

    /// # Errors
    /// A flag that says nothing to the API that is asked.
    fn check(&self) -> Result<()> {
        const METADATA: &[Api] = &[Api::Metadata];
        const SESSION: &[Api] = &[Api::Session];
        const SIDECAR: &[Api] = &[Api::Metadata, Api::Session];
        const AGGREGATED: &[Api] = &[Api::Aggregated];
        let flags = [
            ("--service-account", self.service_account.is_some(), METADATA),
            ("--token-expiry", self.token_expiry.is_some(), METADATA),
            ("--token-file", self.token_file.is_some(), METADATA),
            ("--base-id", self.base_is_handle, METADATA),
            ("--lifetime", self.lifetime.is_some(), SESSION),
            ("--session", self.session.is_some(), SESSION),
            ("--address", self.address.is_some(), SIDECAR),
            ("--page-size", self.page_size.is_some(), AGGREGATED),
            ("--secret", self.secret.is_some(), AGGREGATED),
        ];
        let other = flags.iter().find(|(_, given, apis)| *given && !apis.contains(&self.api));
        let Some((flag, _, apis)) = other else { return Ok(()) };
        let apis: Vec<_> = apis.iter().map(|api| api.name()).collect();
        let because = match self.api {
            Api::Metadata => "",
            _ if *flag == "--base-id" => ": there the base is a VolumeSnapshot and goes by name",
            Api::Session => {
                ": a session has a token of its own, which the session manager gives to the caller"
            }
            Api::Aggregated => ": the API server is asked, as the kubeconfig's user",
        };
        bail!("{flag} goes with --api {}{because}", apis.join(" or "))
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
    args.check()?;
    let Some(namespace) = args.namespace.clone() else { bail!("--namespace is missing") };
    if options.endpoint.is_some() {
        bail!("--endpoint asks a driver and --namespace asks through Kubernetes: give one of them");
    }
    let listing = Listing { namespace: &namespace, query, window, limit_rows };
    match args.api {
        Api::Metadata => ask_metadata(options, args, listing).await,
        Api::Session => ask_session(options, args, listing).await,
        Api::Aggregated => ask_aggregated(options, args, listing).await,
    }
}

/// What to list.
struct Listing<'a> {
    namespace: &'a str,
    query: Query,
    window: Window,
    limit_rows: Option<u64>,
}

async fn ask_metadata(options: &Options, args: ClusterArgs, listing: Listing<'_>) -> Result<()> {
    let Listing { namespace, query, window, limit_rows } = listing;
    let open = async |query, deadline| {
        let client = client::connect_as_user(args.kubeconfig.as_deref(), RATE).await?;
        let tokens = match args.token_file {
            Some(path) => Tokens::file(path),
            None => {
                let home = args.service_account_namespace.unwrap_or_else(|| namespace.to_owned());
                let account = args.service_account.map(|name| (home, name));
                let expiry = args.token_expiry.unwrap_or(TOKEN_EXPIRY);
                Tokens::requested(client.clone(), account, expiry)
            }
        };
        let finder = Finder::new(client, namespace, args.address);
        let limits = Limits { deadline, timeout: options.timeout };
        let metadata = Metadata::new(finder, tokens, query, window, deadline)
            .base_by_handle(args.base_is_handle);
        Ok(BlockMap::new(Resuming::new(metadata, limits)))
    };
    in_time(options, async |deadline| {
        let open = async |query| open(query, deadline).await;
        print_map::run(query, Some(namespace), options.output, limit_rows, open).await
    })
    .await
}

async fn ask_session(options: &Options, args: ClusterArgs, listing: Listing<'_>) -> Result<()> {
    let Listing { namespace, query, window, limit_rows } = listing;
    let portion = Portion::try_from(window)?;
    let snapshots = session::snapshots(&query)?;
    let which = match args.session {
        Some(name) => Which::Given(name),
        None => {
            Which::Ours(SnapshotSessionRequestSpec { snapshots, lifetime_seconds: args.lifetime })
        }
    };
    let stop = Stop::listen(options.timeout)?;
    let client = client::connect_as_user(args.kubeconfig.as_deref(), RATE).await?;
    let limits = Limits { deadline: stop.deadline(), timeout: options.timeout };
    let requests = Requests::new(client, namespace, which, args.address, limits);
    within(&stop, requests, async |requests: &mut Requests| {
        let session = Session::new(requests, query.clone(), portion);
        let open = async |_| Ok(BlockMap::new(Resuming::new(session, limits)));
        print_map::run(query, Some(namespace), options.output, limit_rows, open).await
    })
    .await
}

async fn ask_aggregated(options: &Options, args: ClusterArgs, listing: Listing<'_>) -> Result<()> {
    let Listing { namespace, query, window, limit_rows } = listing;
    let paging = Paging { size: args.page_size.unwrap_or(0), secret: args.secret };
    in_time(options, async |deadline| {
        let limits = Limits { deadline, timeout: options.timeout };
        let open = async |query: Query| {
            // It minds itself when to ask again, and says so.
            let client = client::connect_as_user_once(args.kubeconfig.as_deref(), PAGES).await?;
            let asked = Aggregated::new(client, namespace, &query, window, paging)?;
            Ok(BlockMap::new(Resuming::new(asked, limits)))
        };
        print_map::run(query, Some(namespace), options.output, limit_rows, open).await
    })
    .await
}

/// The VolumeSnapshots that a question names, the base first. `how`: what makes it that they go by name.
///
/// # Errors
/// What cannot be the name of one.
fn named<'a>(query: &'a Query, how: &str) -> Result<Vec<&'a String>> {
    let names = match query {
        Query::Allocated { snapshot } => vec![snapshot],
        Query::Delta { base, target } => vec![base, target],
    };
    match names.iter().find(|one| !name::is_object(one)) {
        Some(other) => bail!(
            "{other:?} cannot be the name of a VolumeSnapshot: {how} snapshots go by that, the base too; --api \
             metadata --base-id takes the CSI handle of a base"
        ),
        None => Ok(names),
    }
}

/// Does `work`, cut off by a stop, and ends the session in any case.
async fn within<T>(
    stop: &Stop,
    mut requests: Requests,
    work: impl AsyncFnOnce(&mut Requests) -> Result<T>,
) -> Result<T> {
    let outcome = stop.wait(work(&mut requests)).await;
    if let Err(left) = requests.end().await {
        eprintln!("csi-loopback: {left:#}");
    }
    outcome
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

/// In whole seconds, as the definition of SnapshotSessionRequest allows them.
fn lifetime(text: &str) -> Result<i64, String> {
    let lifetime = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    match i64::try_from(lifetime.as_secs()) {
        Ok(seconds @ 1..=MAX_LIFETIME) if lifetime.subsec_nanos() == 0 => Ok(seconds),
        _ => Err("in whole seconds, at least 1s, and at most 3650days".to_owned()),
    }
}
