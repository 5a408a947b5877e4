//! Listings of blocks through Kubernetes, as a backup application gets them (KEP-3314), by one of
//! three APIs. The released API ([`metadata`]): from the name of a VolumeSnapshot to its driver and
//! the driver's SnapshotMetadataService, then, with a ServiceAccount's token, to the driver's
//! sidecar over TLS. The session API ([`session`]): a SnapshotSessionRequest provides address and
//! token, and is deleted at the end. The aggregated API ([`aggregated`]): VolumeSnapshotDeltas,
//! which the API server answers page by page.
//!
//! An interrupted listing resumes until `--timeout` ([`resume`]). A token is written only into
//! requests.

mod aggregated;
mod failure;
mod find;
mod group;
mod metadata;
pub mod pods;
pub mod removal;
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
use kube::Client;
use tokio::time::Instant;

use super::block_map::{BlockMap, Consumer, Query, Window};
use super::stop::Stop;
use super::{Options, in_time, progress};
use aggregated::{Aggregated, Paging};
pub use failure::{Failure, Retry};
pub use find::{ALLOW_MODE_CHANGE, Finder, Service, Snapshot, call, capacity};
use group::GroupSnapshot;
use kubernetes::client::{self, Rate};
use kubernetes::name;
use kubernetes::session::SnapshotSessionRequestSpec;
use metadata::Metadata;
use request::{Requests, Which};
use resume::Resuming;
use session::{Portion, Session};
pub use token::Tokens;
pub use wire::{LONGEST_MESSAGE, Place, connect as dial};

/// Heading of these flags in `--help`.
const HEADING: &str = "Through Kubernetes";

/// For a few calls: the limit is never reached.
const RATE: Rate = Rate { per_second: 20.0, burst: 20 };

/// For pages, one after the other: the server limits the rate.
const PAGES: Rate = Rate { per_second: 1000.0, burst: 100 };

/// Default lifetime of a token: the API server's minimum.
const TOKEN_EXPIRY: Duration = Duration::from_secs(600);

/// Maximum lifetime of a session, in seconds: ten years.
const MAX_LIFETIME: i64 = 315_360_000;

/// How to list through Kubernetes; every other flag requires `--namespace`.
#[derive(Debug, Clone, Default, Args)]
pub struct ClusterArgs {
    /// Namespace of the VolumeSnapshots, which are then identified by name
    #[arg(long, short, value_parser = name::object, help_heading = HEADING)]
    namespace: Option<String>,
    /// Configuration of the client [env: KUBECONFIG] [default: ~/.kube/config, else the pod's]
    #[arg(long, requires = "namespace", value_name = "PATH", help_heading = HEADING)]
    kubeconfig: Option<PathBuf>,
    /// Context of the configuration [default: the current one]
    #[arg(long, requires = "namespace", value_name = "NAME", help_heading = HEADING)]
    context: Option<String>,
    /// API to use
    #[arg(long, requires = "namespace", value_enum, default_value_t = Api::Metadata, help_heading = HEADING)]
    api: Api,
    /// metadata: ServiceAccount to request a token for [default: the caller]
    #[arg(long, requires = "namespace", conflicts_with = "token_file", value_parser = name::object, value_name = "NAME", help_heading = HEADING)]
    service_account: Option<String>,
    /// metadata: namespace of the ServiceAccount [default: --namespace]
    #[arg(long, requires = "service_account", value_parser = name::object, value_name = "NAMESPACE", help_heading = HEADING)]
    service_account_namespace: Option<String>,
    /// metadata: lifetime of a requested token, at least 10min [default: 10min]
    #[arg(long, requires = "namespace", conflicts_with = "token_file", value_parser = token_expiry, value_name = "TIME", help_heading = HEADING)]
    token_expiry: Option<Duration>,
    /// metadata: file with a token, read again for each attempt
    #[arg(long, requires = "namespace", value_name = "PATH", help_heading = HEADING)]
    token_file: Option<PathBuf>,
    /// session: lifetime of the session [default: the session manager's]
    #[arg(long, requires = "namespace", conflicts_with = "session", value_parser = lifetime, value_name = "TIME", help_heading = HEADING)]
    lifetime: Option<i64>,
    /// session: existing SnapshotSessionRequest, which is not changed
    #[arg(long, requires = "namespace", value_parser = name::object, value_name = "NAME", help_heading = HEADING)]
    session: Option<String>,
    /// aggregated: maximum number of blocks per page [default: the server's, 256]
    #[arg(long, requires = "namespace", value_parser = clap::value_parser!(u64).range(1..), value_name = "N", help_heading = HEADING)]
    page_size: Option<u64>,
    /// aggregated: Secret of the namespace that the driver needs
    #[arg(long, requires = "namespace", value_parser = name::object, value_name = "NAME", help_heading = HEADING)]
    secret: Option<String>,
    /// metadata, session: address to connect to, for port-forwarding
    #[arg(long, requires = "namespace", value_name = "HOST:PORT", help_heading = HEADING)]
    address: Option<String>,
    /// Whether the base of a delta is a CSI handle (`--base-id`).
    #[arg(skip)]
    base_is_handle: bool,
}

/// An API that lists blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Api {
    /// The driver's sidecar, with a ServiceAccount's token; alone supports --base-id
    #[default]
    Metadata,
    /// The driver's sidecar, with the token of a snapshot session
    Session,
    /// VolumeSnapshotDeltas of the API server, page by page
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
    /// Whether to list through Kubernetes.
    pub fn is_requested(&self) -> bool {
        self.namespace.is_some()
    }

    /// The released API, for the VolumeSnapshots of a namespace, with the token in a file or else
    /// one of the caller's ServiceAccount.
    pub fn metadata(
        namespace: String,
        kubeconfig: Option<PathBuf>,
        token_file: Option<PathBuf>,
    ) -> Self {
        Self { namespace: Some(namespace), kubeconfig, token_file, ..Self::default() }
    }

    fn user(&self) -> client::User<'_> {
        client::User { kubeconfig: self.kubeconfig.as_deref(), context: self.context.as_deref() }
    }

    pub fn namespace(&self) -> Option<&str> {
        self.namespace.as_deref()
    }

    /// The same for a base that is identified by its CSI handle.
    pub fn base_by_handle(self, base_is_handle: bool) -> Self {
        Self { base_is_handle, ..self }
    }

    /// # Errors
    /// A flag has no meaning for the chosen API.
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
            _ if *flag == "--base-id" => {
                ": the other APIs identify the base by VolumeSnapshot name"
            }
            Api::Session => ": the session manager provides the token of a session",
            Api::Aggregated => ": the API server authenticates the kubeconfig's user",
        };
        bail!("{flag} requires --api {}{because}", apis.join(" or "))
    }
}

/// A client with the user's credentials.
///
/// # Errors
/// No usable configuration.
pub async fn connect(user: impl Into<client::User<'_>>) -> Result<Client> {
    client::connect_as_user(user, RATE).await
}

/// A VolumeSnapshot that is ready to use.
///
/// # Errors
/// It does not exist, is not ready, or cannot be read.
pub async fn snapshot(client: &Client, namespace: &str, name: &str) -> Result<Snapshot> {
    let finder = Finder::new(client.clone(), namespace, None);
    finder.snapshot(name).await.map_err(|failure| failure.error)
}

/// A VolumeGroupSnapshot that is ready to use.
///
/// # Errors
/// It does not exist, is not ready, or it or a member cannot be read.
pub async fn group(client: &Client, namespace: &str, name: &str) -> Result<GroupSnapshot> {
    let finder = Finder::new(client.clone(), namespace, None);
    finder.group(name).await.map_err(|failure| failure.error)
}

/// The audience of tokens for a driver's sidecar.
///
/// # Errors
/// The driver has no SnapshotMetadataService, or it cannot be read.
pub async fn audience(client: &Client, namespace: &str, driver: &str) -> Result<String> {
    let finder = Finder::new(client.clone(), namespace, None);
    Ok(finder.service(driver).await.map_err(|failure| failure.error)?.audience)
}

/// Lists blocks through Kubernetes for `consumer`.
///
/// # Errors
/// The cluster or the sidecar refuses, with the next step; the consumer fails; `--timeout` is over.
pub async fn list<C: Consumer>(
    options: &Options,
    args: ClusterArgs,
    query: Query,
    window: Window,
    consumer: C,
) -> Result<C::Output> {
    args.check()?;
    let Some(namespace) = args.namespace.clone() else { bail!("--namespace is missing") };
    if options.endpoint.is_some() {
        bail!(
            "--endpoint selects a driver and --namespace selects Kubernetes: set only one of them"
        );
    }
    let listing = Listing { namespace: &namespace, query, window, consumer };
    match args.api {
        Api::Metadata => listing.by_metadata(options, args).await,
        Api::Session => listing.in_session(options, args).await,
        Api::Aggregated => listing.aggregated(options, args).await,
    }
}

/// What to list, for whom.
struct Listing<'a, C> {
    namespace: &'a str,
    query: Query,
    window: Window,
    consumer: C,
}

impl<C: Consumer> Listing<'_, C> {
    async fn by_metadata(self, options: &Options, args: ClusterArgs) -> Result<C::Output> {
        let Self { namespace, query, window, consumer } = self;
        in_time(options, async |deadline| {
            let client = connect(args.user()).await?;
            let tokens = match args.token_file {
                Some(path) => Tokens::file(path),
                None => {
                    let home =
                        args.service_account_namespace.unwrap_or_else(|| namespace.to_owned());
                    let account = args.service_account.map(|name| (home, name));
                    let expiry = args.token_expiry.unwrap_or(TOKEN_EXPIRY);
                    Tokens::requested(client.clone(), account, expiry)
                }
            };
            let finder = Finder::new(client, namespace, args.address);
            let limits = Limits { deadline, timeout: options.timeout };
            let metadata = Metadata::new(finder, tokens, query, window, deadline)
                .base_by_handle(args.base_is_handle);
            consumer.consume(BlockMap::new(Resuming::new(metadata, limits))).await
        })
        .await
    }

    async fn in_session(self, options: &Options, args: ClusterArgs) -> Result<C::Output> {
        let Self { namespace, query, window, consumer } = self;
        let portion = Portion::try_from(window)?;
        let snapshots = session::snapshots(&query)?;
        let which = match args.session.clone() {
            Some(name) => Which::Existing(name),
            None => Which::Own(SnapshotSessionRequestSpec {
                snapshots,
                lifetime_seconds: args.lifetime,
            }),
        };
        let stop = Stop::listen(options)?;
        let _shown = progress::start("waiting for the session", options.print.quiet);
        let client = connect(args.user()).await?;
        let limits = Limits { deadline: stop.deadline(), timeout: options.timeout };
        let requests = Requests::new(client, namespace, which, args.address, limits);
        within(&stop, requests, async |requests: &mut Requests| {
            let session = Session::new(requests, query, portion);
            consumer.consume(BlockMap::new(Resuming::new(session, limits))).await
        })
        .await
    }

    async fn aggregated(self, options: &Options, args: ClusterArgs) -> Result<C::Output> {
        let Self { namespace, query, window, consumer } = self;
        let paging = Paging { size: args.page_size.unwrap_or(0), secret: args.secret.clone() };
        in_time(options, async |deadline| {
            let limits = Limits { deadline, timeout: options.timeout };
            // The listing retries by itself and reports that.
            let client = client::connect_as_user_once(args.user(), PAGES).await?;
            let source = Aggregated::new(client, namespace, &query, window, paging)?;
            consumer.consume(BlockMap::new(Resuming::new(source, limits))).await
        })
        .await
    }
}

/// The VolumeSnapshots that a query names, the base first. `context`: why they are identified by
/// name.
///
/// # Errors
/// A text cannot be the name of one.
fn named<'a>(query: &'a Query, context: &str) -> Result<Vec<&'a String>> {
    let names = match query {
        Query::Allocated { snapshot } => vec![snapshot],
        Query::Delta { base, target } => vec![base, target],
    };
    match names.iter().find(|one| !name::is_object(one)) {
        Some(other) => bail!(
            "{other:?} cannot be the name of a VolumeSnapshot: {context} snapshots and bases are identified by name; \
             --api metadata --base-id accepts the CSI handle of a base"
        ),
        None => Ok(names),
    }
}

/// Runs `work` until a stop, and ends the session in any case.
async fn within<T>(
    stop: &Stop,
    mut requests: Requests,
    work: impl AsyncFnOnce(&mut Requests) -> Result<T>,
) -> Result<T> {
    let outcome = stop.whole(work(&mut requests)).await;
    if let Err(remaining) = requests.end().await {
        progress::suspend(|| eprintln!("csi-loopback: {remaining:#}"));
    }
    outcome
}

/// When to give up.
#[derive(Debug, Clone, Copy)]
struct Limits {
    deadline: Instant,
    /// `--timeout`, which also limits the time without progress.
    timeout: Duration,
}

/// From ten minutes, the API server's minimum, to 2^32 seconds, its maximum.
fn token_expiry(text: &str) -> Result<Duration, String> {
    let expiry = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if expiry < Duration::from_secs(600) || expiry > Duration::from_secs(1 << 32) {
        return Err("at least 10min, and at most 2^32 seconds".to_owned());
    }
    Ok(expiry)
}

/// In whole seconds, as SnapshotSessionRequest defines it.
fn lifetime(text: &str) -> Result<i64, String> {
    let lifetime = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    match i64::try_from(lifetime.as_secs()) {
        Ok(seconds @ 1..=MAX_LIFETIME) if lifetime.subsec_nanos() == 0 => Ok(seconds),
        _ => Err("in whole seconds, at least 1s, and at most 3650days".to_owned()),
    }
}
