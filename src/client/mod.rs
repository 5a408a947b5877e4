//! The commands for people: `volume`, `snapshot`, `base` and `pool`. They own what a person types and
//! reads; everything else they ask of a driver's socket over CSI, so they work with no cluster, and
//! as far as CSI goes with other drivers too (`base`, `pool status` and `pool grow` are this driver's own, and
//! `pool check` alone reads the disk, with no driver). Which
//! blocks a snapshot holds they also ask through Kubernetes, as a backup application does ([`cluster`]).
//!
//! Three promises: a name works wherever an id does, nothing waits longer than `--timeout`, and an
//! answer that was cut short never looks complete.

mod base;
pub(crate) mod block_map;
mod capability;
mod cluster;
mod compare;
pub(crate) mod connection;
#[cfg(test)]
mod fake_driver;
pub(crate) mod format;
mod inline;
pub(crate) mod names;
mod pool;
mod print_map;
pub(crate) mod scratch;
mod snapshot;
mod stats;
pub(crate) mod stop;
mod verify;
mod volume;

use std::future::Future;
use std::io;
use std::process::ExitCode;
use std::time::Duration;

use crate::grpc::SocketPath;
use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, Subcommand, ValueEnum};

use connection::Connection;
use tokio::time::Instant;

/// The commands for people, flattened into the binary's command line.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create, list, grow, mount and delete volumes
    Volume(volume::VolumeArgs),
    /// Cut snapshots and ask which blocks are allocated or changed
    Snapshot(snapshot::SnapshotArgs),
    /// Show which snapshots can be the base of a delta and for how long, deleted ones too
    Base(base::BaseArgs),
    /// Show, grow and check a pool
    Pool(pool::PoolArgs),
}

/// Where `--help` shows what all commands have in common.
const HEADING: &str = "Driver and output";

const ENDPOINT_VARIABLE: &str = "CSI_ENDPOINT";
const DEFAULT_ENDPOINT: &str = "unix:///run/csi-loopback/csi.sock";

/// How to reach a driver and how to print its answers.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Socket of the driver [env: CSI_ENDPOINT] [default: unix:///run/csi-loopback/csi.sock]
    #[arg(long, global = true, help_heading = HEADING, value_name = "unix://PATH")]
    endpoint: Option<SocketPath>,
    /// Form of the answer
    #[arg(long, value_enum, default_value_t = Output::Table, global = true, help_heading = HEADING)]
    pub(crate) output: Output,
    /// Longest time that the command may take
    #[arg(long, value_parser = parse_timeout, default_value = "10min", global = true, help_heading = HEADING)]
    pub(crate) timeout: Duration,
}

impl Options {
    /// The driver's socket: as the flag says, else the environment, else where a driver listens by itself.
    ///
    /// # Errors
    /// The environment says something else than a socket.
    pub(crate) fn endpoint(&self) -> Result<SocketPath> {
        if let Some(endpoint) = &self.endpoint {
            return Ok(endpoint.clone());
        }
        let text = std::env::var(ENDPOINT_VARIABLE).unwrap_or_else(|_| DEFAULT_ENDPOINT.to_owned());
        text.parse().map_err(|error: String| anyhow!("{ENDPOINT_VARIABLE}: {error}"))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// For people
    Table,
    /// For programs
    Json,
}

/// The exit code of a process that SIGPIPE ended, which is what became of the reader of ours.
pub(crate) const READER_GONE: u8 = 141;

/// Runs one command on a runtime of its own. Exit codes: 0 done; 1 a finding or a mismatch; 2 a
/// pool that cannot be checked at all.
///
/// # Errors
/// What the driver or the system refused, as text for people.
pub fn run(command: Command) -> Result<ExitCode> {
    let outcome = match command {
        Command::Volume(args) => on_runtime(volume::run(args)),
        Command::Snapshot(args) => on_runtime(snapshot::run(args)),
        Command::Base(args) => on_runtime(base::run(args)),
        Command::Pool(args) => pool::run(args),
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
    // A read of a device that hangs must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

/// Connects, runs `work`, and gives up on both when `--timeout` is over.
async fn bounded<T>(
    options: &Options,
    work: impl AsyncFnOnce(Connection) -> Result<T>,
) -> Result<T> {
    let endpoint = options.endpoint()?;
    in_time(options, async |deadline| work(Connection::open(&endpoint, deadline).await?).await)
        .await
}

/// Runs `work`, which is told the deadline, and gives up on it when `--timeout` is over.
async fn in_time<T>(options: &Options, work: impl AsyncFnOnce(Instant) -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + options.timeout;
    match tokio::time::timeout_at(deadline, work(deadline)).await {
        Ok(outcome) => outcome,
        Err(_) => bail!("{}", timed_out(options.timeout)),
    }
}

fn timed_out(timeout: Duration) -> String {
    let timeout = humantime::format_duration(timeout);
    format!("not done within {timeout}; --timeout allows more")
}

/// More than 0 and at most a year: beyond that, sums of times overflow.
fn parse_timeout(text: &str) -> Result<Duration, String> {
    let timeout = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    match timeout {
        Duration::ZERO => Err("must be more than 0".to_owned()),
        long if long > Duration::from_secs(365 * 86_400) => Err("at most 365 days".to_owned()),
        timeout => Ok(timeout),
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
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Line::command().debug_assert();
    }

    #[test]
    fn options_are_taken_before_and_after_the_verb() {
        for line in [
            "x volume --endpoint unix:///a --output json list",
            "x volume list --endpoint unix:///a --output json",
        ] {
            let Ok(Command::Volume(args)) = parse(line) else { panic!("{line}") };
            assert_eq!(args.options.endpoint().unwrap().to_string(), "unix:///a");
            assert_eq!(args.options.output, Output::Json);
            assert_eq!(args.options.timeout, Duration::from_secs(600));
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
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
            "x snapshot verify a",
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
    fn a_driver_and_a_cluster_are_not_asked_at_once() {
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
    fn a_reader_that_went_away_is_not_a_failure_of_ours() {
        let gone = anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe)).context("print");
        assert!(reader_gone(&gone));
        assert!(!reader_gone(&anyhow::anyhow!("UNAVAILABLE: broken pipe")));
    }
}
