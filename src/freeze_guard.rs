//! The mode `freeze-guard`: thaws filesystems that a driver froze for a snapshot and, being killed, did not thaw
//! ([`crate::backend::freeze_guard`]). The driver starts one by itself, which serves the connection on its standard input; in a
//! pod, where a driver that is killed takes all processes of its container with it, one runs in a container of its own and
//! listens.

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::setsid;
use tokio::runtime;

use crate::backend::freeze_guard::{attend, listen};
use crate::grpc::{SocketPath, socket};
use crate::telemetry::logs;

/// For the one user that the driver is: what it sends is trusted.
const SOCKET_MODE: u32 = 0o600;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Socket to serve drivers on: unix:///path, unix:/path or /path; by default the connection on standard input is
    /// served, which is how a driver starts its own guard.
    #[arg(long, value_name = "SOCKET")]
    pub endpoint: Option<SocketPath>,

    #[command(flatten)]
    pub log: logs::Args,
}

/// Serves until the driver is gone, without `--endpoint`; else until a signal has come and no driver is connected.
///
/// # Errors
/// The socket cannot be had.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    // What ends a driver, and all of its process group, must not end the guard before the driver. Blocked before there is any
    // other thread, they are so for all.
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    signals.thread_block().context("blocking signals")?;
    logs::init(args.log)?;
    match args.endpoint {
        Some(endpoint) => serve(endpoint.as_ref(), &signals)?,
        None => {
            // Fails where it leads one already.
            let _ = setsid();
            let connection = std::io::stdin().as_fd().try_clone_to_owned()?;
            attend(&UnixStream::from(connection))
                .context("serving standard input, which has to be a unix socket: a driver starts it so; else give --endpoint")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn serve(path: &Path, signals: &SigSet) -> anyhow::Result<()> {
    let (listener, _guard) = bind(path)?;
    let connections = listen(listener).context("starting to listen")?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), socket = %path.display(), "guarding freezes");
    let signal = signals.wait().context("waiting for a signal")?;
    tracing::info!(%signal, "ending when no driver is connected");
    connections.wait_until_none();
    Ok(())
}

fn bind(path: &Path) -> anyhow::Result<(UnixListener, socket::Guard)> {
    let runtime = runtime::Builder::new_current_thread().enable_io().build()?;
    let _inside = runtime.enter();
    let (listener, guard) = socket::listen(path, SOCKET_MODE, None)?;
    let listener = listener.into_std()?;
    listener.set_nonblocking(false)?;
    Ok((listener, guard))
}
