//! The mode `freeze-guard`: thaws filesystems that a driver froze for a snapshot and could not thaw
//! because it was killed ([`storage::freeze_guard`]). By default the driver starts a guard
//! as a child process, which serves the connection on its standard input. In a pod, a kill of the
//! driver's container also kills its child processes; there the guard runs in another container and
//! listens on a socket.

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::setsid;
use tokio::runtime;

use grpc::{SocketPath, socket};
use storage::freeze_guard::{listen, serve_connection};
use telemetry::{logs, notify};

/// Only the driver's user may connect: its messages are trusted.
const SOCKET_MODE: u32 = 0o600;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Socket to serve drivers on: unix:///path, unix:/path or /path [default: serve the connection
    /// on standard input, as a driver's child process]
    #[arg(long, value_name = "SOCKET")]
    pub endpoint: Option<SocketPath>,

    #[command(flatten)]
    pub log: logs::Args,
}

/// Without `--endpoint`, serves until the driver disconnects; otherwise until a signal arrives and
/// no driver is connected.
///
/// # Errors
/// The socket cannot be created.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    // A signal that ends the driver and its process group must not end the guard before the driver.
    // Signals that are blocked before other threads start are blocked in all of them.
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    signals.thread_block().context("failed to block signals")?;
    logs::init(args.log)?;
    match args.endpoint {
        Some(endpoint) => serve(endpoint.as_ref(), &signals)?,
        None => {
            // Fails if the process already leads a session.
            let _ = setsid();
            let connection = std::io::stdin().as_fd().try_clone_to_owned()?;
            serve_connection(&UnixStream::from(connection))
                .context("standard input must be a unix socket from a driver; to serve a socket, set --endpoint")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn serve(path: &Path, signals: &SigSet) -> anyhow::Result<()> {
    let (listener, _guard) = bind(path)?;
    let connections = listen(listener).context("failed to listen")?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), socket = %path.display(), "serving the freeze guard");
    notify::ready();
    let signal = signals.wait().context("failed to wait for a signal")?;
    tracing::info!(%signal, "exiting when no driver is connected");
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
