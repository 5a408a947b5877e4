//! The mode `dev`: a driver and its sidecar in one process, without a cluster, for tests of backup
//! clients. Everything is in one directory, listens on loopback addresses and unix sockets only, and
//! is removed at the end, volumes that are in use included.
//!
//! It combines two roles, as [`crate::cli`] does: they communicate over the driver's socket.

mod place;
mod release;

use std::ffi::OsString;
use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};

use crate::client::print_text;
use crate::driver::{self, Rule};
use crate::kubernetes::name;
use crate::sidecar::standalone::{self, StaticToken};
use crate::telemetry::logs;
use crate::telemetry::shutdown::{Phase, Shutdown};
use crate::{quantity, sidecar};
use place::{Place, Variables};
use release::InUse;

/// Maximum number of threads that calls block, as in the driver.
const BLOCKING_THREADS: usize = 64;
/// Interval of attempts to connect to a driver that starts.
const POLL: Duration = Duration::from_millis(10);
/// Time for running calls at the end.
const DRAIN: Duration = Duration::from_secs(2);
/// Bytes of a generated token.
const TOKEN_BYTES: usize = 24;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// File of shell variables to write when all is ready; removed at the end
    #[arg(long, value_name = "FILE")]
    pub env_file: Option<PathBuf>,

    /// Maximum size of the pool, which is sparse
    #[arg(long, default_value = "16Gi", value_parser = quantity::parse, value_name = "SIZE")]
    pub pool_size: u64,

    /// Name of the driver
    #[arg(long, default_value = "loopback.csi.local", value_name = "NAME")]
    pub driver_name: String,

    /// TCP port of the SnapshotMetadata API on 127.0.0.1 (0: any free port)
    #[arg(long, default_value_t = 0, value_name = "PORT")]
    pub port: u16,

    /// Namespace of VolumeSnapshots; repeat for more. Snapshots named NAMESPACE.NAME are NAME there,
    /// others are in the first
    #[arg(long = "namespace", default_value = "default", value_parser = name::object, value_name = "NAME")]
    pub namespaces: Vec<String>,

    /// Token, and the namespaces that it may read: TOKEN or TOKEN=NAMESPACE,…; repeat for more
    /// [default: a random one for all]
    #[arg(long = "token", value_name = "TOKEN")]
    pub tokens: Vec<StaticToken>,

    /// Inject a fault into the driver's responses (docs/reference/driver.md lists all kinds); repeat
    /// for more
    #[arg(long, value_name = "RULE")]
    pub fault: Vec<Rule>,

    #[command(flatten)]
    pub log: logs::Args,
}

/// Runs until a signal arrives.
///
/// # Errors
/// It cannot start, or not everything could be removed.
pub fn run(args: Args) -> Result<ExitCode> {
    let began = Instant::now();
    let variables = args.env_file.as_deref().map(Variables::new).transpose()?;
    let place = Place::new()?;
    let driver = driver_args(&place, &args)?;
    let mut role = driver.role.clone();
    (role.log, role.drain_timeout) = (args.log.clone(), DRAIN);
    let run = Run { args, place: &place, variables: variables.as_ref(), began };
    let ended = role.run_blocking(BLOCKING_THREADS, |shutdown| serve(run, driver, shutdown));
    if let Some(variables) = &variables {
        variables.remove()?;
    }
    if ended.as_ref().is_err_and(|error| error.is::<InUse>()) {
        return ended;
    }
    let removed = place.remove();
    let code = ended?;
    removed?;
    eprintln!("csi-loopback dev: no volume, mount, loop device or file is left");
    Ok(code)
}

/// A run of the command.
struct Run<'a> {
    args: Args,
    place: &'a Place,
    variables: Option<&'a Variables>,
    began: Instant,
}

async fn serve(run: Run<'_>, driver: driver::Args, shutdown: Shutdown) -> Result<()> {
    let Run { args, place, variables, began } = run;
    for old in Place::abandoned() {
        let path = old.path().display().to_string();
        tracing::info!(path, "removing what a killed process has left");
        let driver = driver_args(&old, &args)?;
        let released = with_driver(driver, &old, async { Ok(()) }).await;
        let removed = released.and_then(|()| old.remove());
        if let Err(error) = removed {
            tracing::warn!(path, error = format!("{error:#}"), "failed to remove");
        }
    }
    with_driver(driver, place, async {
        let (tokens, namespaces) = (tokens(&args)?, args.namespaces.clone());
        let sidecar = sidecar_args(place, &args)?;
        let started =
            standalone::start(sidecar, namespaces.clone(), tokens.clone(), shutdown).await?;
        let description = place.describe(&started, &namespaces, &tokens)?;
        let (seconds, text) = (began.elapsed().as_secs_f64(), description.text);
        let text = format!("ready after {seconds:.1} s; Ctrl-C removes everything\n\n{text}");
        print_text(text.as_bytes())?;
        if let Some(variables) = variables {
            variables.write(&description.variables)?;
        }
        started.served.await.context("the sidecar")
    })
    .await
}

/// Runs the driver during `work`, then releases all its volumes and stops it.
async fn with_driver(
    args: driver::Args,
    place: &Place,
    work: impl Future<Output = Result<()>>,
) -> Result<()> {
    let (phase, running) = Shutdown::manual();
    let mut served = pin!(driver::serve(args, running));
    let work = async {
        // A killed process leaves its socket.
        while UnixStream::connect(place.socket()).await.is_err() {
            sleep(POLL).await;
        }
        let worked = work.await;
        release::all(&place.endpoint()?).await.and(worked)
    };
    let worked = tokio::select! {
        ended = &mut served => {
            ended.context("the driver")?;
            bail!("the driver has stopped")
        }
        worked = work => worked,
    };
    phase.send_replace(Phase::Draining);
    let stopped = match timeout(DRAIN, &mut served).await {
        Ok(stopped) => stopped,
        Err(_) => {
            phase.send_replace(Phase::Ending);
            served.await
        }
    };
    worked.and(stopped)
}

fn driver_args(place: &Place, args: &Args) -> Result<driver::Args> {
    let (socket, pool) = (place.socket(), place.path().join("pool"));
    let size = args.pool_size.to_string();
    let mut driver: driver::Args = parse(&[
        "--endpoint".into(),
        socket.into(),
        "--data-dir".into(),
        pool.into(),
        "--pool=image".into(),
        "--pool-sparse".into(),
        "--pool-size".into(),
        size.into(),
        "--node-id=dev".into(),
        "--driver-name".into(),
        (&args.driver_name).into(),
    ])?;
    driver.faults.fault.clone_from(&args.fault);
    Ok(driver)
}

fn sidecar_args(place: &Place, args: &Args) -> Result<sidecar::Args> {
    let port = args.port.to_string();
    parse(&["--csi-address".into(), place.socket().into(), "--port".into(), port.into()])
}

/// The flags of a role, with its defaults.
fn parse<A: clap::Args>(flags: &[OsString]) -> Result<A> {
    let command = A::augment_args(clap::Command::new("dev").no_binary_name(true));
    Ok(A::from_arg_matches(&command.try_get_matches_from(flags)?)?)
}

fn tokens(args: &Args) -> Result<Vec<StaticToken>> {
    if !args.tokens.is_empty() {
        return Ok(args.tokens.clone());
    }
    let mut bytes = [0; TOKEN_BYTES];
    getrandom::fill(&mut bytes).map_err(|error| anyhow!("{error}"))?;
    let token = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(vec![StaticToken::for_all(token)])
}
