//! The commands `volume`, `snapshot`, `base` and `pool`. This module owns what a user types and
//! reads. The commands call a driver's socket over CSI, so they need no cluster, and work with
//! other drivers as far as CSI goes. `base`, `volume show` and `pool` need this driver's own
//! services; `pool check` reads the disk without a driver. The listings of blocks can also go
//! through Kubernetes, as those of a backup application do ([`cluster`]).
//!
//! Promises: a name works wherever an id does, no call waits longer than `--timeout`, an incomplete
//! listing never looks complete, and a command that changes nothing reports that.

pub(crate) mod base;
pub(crate) mod block_map;
pub(crate) mod capability;
pub(crate) mod cluster;
mod compare;
pub mod connection;
#[cfg(test)]
mod fake_driver;
pub(crate) mod format;
mod group;
pub(crate) mod in_use;
mod inline;
mod map;
mod mount;
pub mod names;
pub mod node;
pub mod plugin;
mod pool;
mod print_map;
pub mod private_dir;
pub(crate) mod progress;
pub(crate) mod scratch;
mod secrets;
mod show;
mod snapshot;
mod stats;
pub(crate) mod stop;
mod verify;
mod volume;

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, Subcommand, ValueEnum};
use grpc::Endpoint;
use telemetry::on_demand::OnDemand;

pub use connection::describe;

use connection::Connection;
use tokio::time::Instant;

/// The client commands, flattened into the binary's command line.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create, list, show, grow, mount and delete volumes
    Volume(OnDemand<volume::VolumeArgs>),
    /// Take snapshots, list and draw their blocks, and verify them
    Snapshot(OnDemand<snapshot::SnapshotArgs>),
    /// Show which snapshots can be the base of a delta and for how long
    Base(OnDemand<base::BaseArgs>),
    /// Show, grow and check a pool
    Pool(OnDemand<pool::PoolArgs>),
}

/// Heading in `--help` of the flags that all commands have.
const HEADING: &str = "Driver and output";

const ENDPOINT_VARIABLE: &str = "CSI_ENDPOINT";
const DEFAULT_ENDPOINT: &str = "unix:///run/csi-loopback/csi.sock";

/// How to reach a driver and how to print results.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Socket of the driver [env: CSI_ENDPOINT] [default: unix:///run/csi-loopback/csi.sock]
    #[arg(long, global = true, help_heading = HEADING, value_name = "unix://PATH|tcp://HOST:PORT")]
    endpoint: Option<Endpoint>,
    /// Socket of the SnapshotMetadata service [default: that of the driver]
    #[arg(long, global = true, help_heading = HEADING, value_name = "unix://PATH|tcp://HOST:PORT")]
    metadata_endpoint: Option<Endpoint>,
    /// Directory with a file per secret that the driver requires in its calls
    #[arg(long, global = true, help_heading = HEADING, value_name = "DIR")]
    secrets: Option<PathBuf>,
    /// Time limit of the command; of each call for `snapshot verify`, `backup` and `restore`
    #[arg(long, value_parser = parse_timeout, default_value = "10min", global = true, help_heading = HEADING, value_name = "TIME")]
    pub(crate) timeout: Duration,
    #[command(flatten)]
    pub(crate) print: Print,
    /// `--timeout` limits each call and not the command.
    #[arg(skip)]
    limits_calls: bool,
}

/// How to print results.
#[derive(Debug, Clone, Copy, Args)]
pub struct Print {
    /// Format of the result
    #[arg(long, short, value_enum, default_value_t = Output::Table, global = true, help_heading = HEADING, value_name = "FORMAT")]
    pub(crate) output: Output,
    /// Show no progress and no notes on stderr
    #[arg(long, short, global = true, help_heading = HEADING)]
    pub(crate) quiet: bool,
}

/// Later than any command ends.
const NO_DEADLINE: Duration = Duration::from_secs(365 * 86_400);

impl Options {
    /// The same with `--timeout` as the limit of each call instead of the whole command.
    pub(crate) fn per_call(&self) -> Self {
        Self { limits_calls: true, ..self.clone() }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + if self.limits_calls { NO_DEADLINE } else { self.timeout }
    }

    /// The driver's socket: the flag, else the environment, else the driver's default.
    ///
    /// # Errors
    /// The environment variable is no socket path.
    pub(crate) fn endpoint(&self) -> Result<Endpoint> {
        if let Some(endpoint) = &self.endpoint {
            return Ok(endpoint.clone());
        }
        let text = std::env::var(ENDPOINT_VARIABLE).unwrap_or_else(|_| DEFAULT_ENDPOINT.to_owned());
        text.parse().map_err(|error: String| anyhow!("{ENDPOINT_VARIABLE}: {error}"))
    }

    /// Connects to the driver.
    ///
    /// # Errors
    /// It cannot be connected to, or its secrets cannot be read.
    pub(crate) async fn connect(&self, deadline: Instant) -> Result<Connection> {
        let mut connection = Connection::open(&self.endpoint()?, deadline).await?;
        if let Some(endpoint) = &self.metadata_endpoint {
            connection = connection.with_metadata_at(endpoint).await?;
        }
        match &self.secrets {
            Some(directory) => Ok(connection.with_secrets(secrets::read(directory)?)),
            None => Ok(connection),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// Text for people
    Table,
    /// One JSON document
    Json,
    /// One JSON document per line: an element of a list, or a block extent
    Ndjson,
}

impl Output {
    /// The value of `--output`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Table => "table",
            Self::Json => "json",
            Self::Ndjson => "ndjson",
        }
    }
}

/// Exit code of a process that SIGPIPE ends: the reader of the output is gone.
pub(crate) const READER_GONE: u8 = 141;

/// Runs one command. The exit codes are those of docs/reference/commands.md.
///
/// # Errors
/// The driver or the system refused; the text is for a user.
pub fn run(command: Command) -> Result<ExitCode> {
    let outcome = match command {
        Command::Volume(args) => on_runtime(volume::run(*args.0)),
        Command::Snapshot(args) => on_runtime(snapshot::run(*args.0)),
        Command::Base(args) => on_runtime(base::run(*args.0)),
        Command::Pool(args) => pool::run(*args.0),
    };
    match outcome {
        Err(error) if reader_gone(&error) => Ok(ExitCode::from(READER_GONE)),
        outcome => outcome,
    }
}

pub(crate) fn on_runtime<F: Future<Output = Result<ExitCode>>>(command: F) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    let outcome = runtime.block_on(command);
    // A blocked read of a device must not keep the process alive.
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

/// Connects and runs `work`; fails when `--timeout` is over.
async fn bounded<T>(
    options: &Options,
    work: impl AsyncFnOnce(Connection) -> Result<T>,
) -> Result<T> {
    in_time(options, async |deadline| work(options.connect(deadline).await?).await).await
}

/// Runs `work`, which gets the deadline; fails when `--timeout` is over.
async fn in_time<T>(options: &Options, work: impl AsyncFnOnce(Instant) -> Result<T>) -> Result<T> {
    let _shown = progress::start("waiting for the driver", options.print.quiet);
    let deadline = options.deadline();
    match tokio::time::timeout_at(deadline, work(deadline)).await {
        Ok(outcome) => outcome,
        Err(_) => bail!("{}", timed_out(options.timeout)),
    }
}

pub(crate) fn timed_out(timeout: Duration) -> String {
    let timeout = humantime::format_duration(timeout);
    format!("not done within {timeout}; set a longer --timeout")
}

/// More than 0 and at most a year: sums of longer times overflow.
pub(crate) fn parse_timeout(text: &str) -> Result<Duration, String> {
    let timeout = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    match timeout {
        Duration::ZERO => Err("must be more than 0".to_owned()),
        long if long > Duration::from_secs(365 * 86_400) => Err("at most 365 days".to_owned()),
        timeout => Ok(timeout),
    }
}

/// Prints prepared text; a reader that is gone is no error.
///
/// # Errors
/// Standard output cannot be written.
pub fn print_text(text: &[u8]) -> Result<ExitCode> {
    use std::io::Write as _;
    let mut out = io::stdout().lock();
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ExitCode::from(READER_GONE)),
        outcome => outcome.map(|()| ExitCode::SUCCESS).context("print"),
    }
}

pub(crate) fn reader_gone(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(subcommand)]
        command: Command,
    }

    fn parse(line: &str) -> Result<Command, clap::Error> {
        Line::try_parse_from(line.split(' ')).map(|line| line.command)
    }

    #[test]
    fn options_stand_before_or_after_the_verb() {
        for line in [
            "x volume --endpoint unix:///a --output json list",
            "x volume list --endpoint unix:///a --output json",
        ] {
            let Ok(Command::Volume(args)) = parse(line) else { panic!("{line}") };
            assert_eq!(args.0.options.endpoint().unwrap().to_string(), "unix:///a");
            assert_eq!(args.0.options.print.output, Output::Json);
            assert_eq!(args.0.options.timeout, Duration::from_secs(600));
        }
    }

    #[test]
    fn contradictory_and_invalid_flags_are_refused() {
        for line in [
            "x volume create v --block --fs ext4",
            "x volume create v --from-snapshot a --from-volume b",
            "x volume create v --size banana",
            "x volume create v --change-tracking maybe",
            "x volume list --timeout 0s",
            "x volume list --timeout 9999999years",
            "x volume stage v",
            "x volume expand v",
            "x volume inline publish h",
            "x volume inline publish h --target t --attribute size",
            "x snapshot allocated s --starting-offset=-1x",
            "x snapshot verify",
            "x snapshot verify a --sample 0",
            "x snapshot verify a --sample 101",
            "x snapshot verify a --source /dev/x",
            "x snapshot map",
            "x snapshot map a --volume v",
            "x snapshot map a --file map.png",
            "x snapshot map a --file map.svg --width 80",
            "x snapshot map a --last 3",
            "x snapshot group create g",
            "x snapshot list --bases --volume",
            "x volume create v --size 0",
            "x volume create v --limit 0",
            "x volume expand v --size 0",
            "x volume show",
            "x base list",
            "x base list --volume v --target s",
            "x base keep s",
            "x base keep s --for 1h --default",
            "x base keep s --until tomorrow",
            "x base keep s --for banana",
            "x base release",
            "x pool check --endpoint unix:///a",
            "x pool status --data-dir /a",
            "x pool grow",
            "x pool grow --size 0",
            "x pool grow --size banana",
            "x snapshot allocated s --kubeconfig k",
            "x snapshot allocated s --token-file f",
            "x snapshot allocated s --address h:1",
            "x snapshot allocated s --namespace a/b",
            "x snapshot allocated s --namespace n --token-expiry 1min",
            "x snapshot allocated s --namespace n --service-account-namespace m",
            "x snapshot delta a",
            "x snapshot delta --base-id h",
            "x snapshot delta a b --base-id h",
            "x snapshot allocated s --namespace n --base-id h",
            "x snapshot delta a b --namespace n --service-account s --token-file f",
            "x snapshot delta a b --namespace n --token-file f --token-expiry 20min",
            "x snapshot list --namespace n",
            "x snapshot allocated s --api session",
            "x snapshot allocated s --page-size 9",
            "x snapshot allocated s --namespace n --api aggregated --page-size 0",
            "x snapshot allocated s --namespace n --api aggregated --secret a/b",
            "x snapshot allocated s --namespace n --api sessions",
            "x snapshot allocated s --namespace n --api session --lifetime 1ms",
            "x snapshot allocated s --namespace n --api session --lifetime 4000days",
            "x snapshot allocated s --namespace n --api session --lifetime 1h --session r",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn endpoint_and_namespace_exclude_each_other() {
        for line in [
            "x snapshot allocated s --namespace n --endpoint unix:///a",
            "x snapshot --endpoint unix:///a delta a b --namespace n",
        ] {
            let error = run(parse(line).unwrap()).unwrap_err().to_string();
            assert!(error.contains("--endpoint") && error.contains("--namespace"), "{error}");
        }
    }

    #[test]
    fn a_flag_of_the_other_api_is_refused_by_name() {
        for (flags, flag) in [
            ("--api session --service-account a", "--service-account "),
            ("--api session --token-file f", "--token-file "),
            ("--api session --token-expiry 20min", "--token-expiry "),
            ("--lifetime 1h", "--lifetime "),
            ("--api metadata --session r", "--session "),
            ("--page-size 9", "--page-size "),
            ("--api session --secret s", "--secret "),
            ("--api aggregated --token-file f", "--token-file "),
            ("--api aggregated --lifetime 1h", "--lifetime "),
            ("--api aggregated --session r", "--session "),
            ("--api aggregated --address h:1", "--address "),
            ("--api session --base-id h", "--base-id "),
            ("--api aggregated --base-id h", "--base-id "),
        ] {
            let what = if flags.contains("--base-id") { "delta" } else { "allocated" };
            let line = format!("x snapshot {what} s --namespace n {flags}");
            let error = run(parse(&line).unwrap()).unwrap_err().to_string();
            assert!(error.starts_with(flag) && error.contains("--api"), "{error}");
        }
    }

    #[test]
    fn a_reader_that_is_gone_is_not_an_error() {
        let gone = anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe)).context("print");
        assert!(reader_gone(&gone));
        assert!(!reader_gone(&anyhow::anyhow!("UNAVAILABLE: broken pipe")));
    }
}
