//! A gRPC server on a unix socket from its first call to its last.

use anyhow::Context as _;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::server::Router;

use super::call::Calls;
use crate::telemetry::shutdown::Shutdown;

/// Serves until a signal has come and the running calls are done, or out of time.
pub async fn until_told(
    router: Router,
    listener: UnixListener,
    calls: &Calls,
    shutdown: &Shutdown,
) -> anyhow::Result<()> {
    let incoming = UnixListenerStream::new(listener);
    let served = router.serve_with_incoming_shutdown(incoming, drained(shutdown.clone()));
    tokio::select! {
        served = served => served.context("serving")?,
        () = shutdown.overdue() => tracing::warn!("closing connections that did not end in time"),
    }
    // Calls whose client has gone run on without a connection.
    tokio::select! {
        () = calls.idle() => tracing::info!("stopped"),
        () = shutdown.overdue() => tracing::warn!("stopped with calls that did not end in time"),
    }
    Ok(())
}

async fn drained(shutdown: Shutdown) {
    shutdown.draining().await;
}
