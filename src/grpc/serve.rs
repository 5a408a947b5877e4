//! Runs a gRPC server on a unix socket until shutdown.

use std::convert::Infallible;
use std::io;
use std::pin::pin;

use anyhow::Context as _;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::transport::server::Router;

use super::authority::AnyAuthority;
use super::call::Calls;
use telemetry::accept::BackoffAcceptor;
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// Maximum concurrent calls of a connection, and the window of each in bytes. The connection's
/// window covers all calls, so that a call whose response is not read blocks no other.
const STREAMS: u32 = 200;
const WINDOW: u32 = 64 << 10;

/// Serves until shutdown begins and the running calls are done or the drain timeout ends.
pub async fn until_shutdown(
    router: Router,
    listener: UnixListener,
    calls: &Calls,
    shutdown: &Shutdown,
) -> anyhow::Result<()> {
    let incoming = incoming(listener, shutdown.clone());
    let served = router.serve_with_incoming_shutdown(incoming, drained(shutdown.clone()));
    tokio::select! {
        served = served => served.context("serving")?,
        () = shutdown.overdue() => tracing::warn!("closing connections that did not end within the drain timeout"),
    }
    wait_for_calls(calls, shutdown).await;
    Ok(())
}

/// Accepts connections until draining begins. (tonic itself retries a failing listener without a
/// pause.)
fn incoming(
    listener: UnixListener,
    shutdown: Shutdown,
) -> ReceiverStream<io::Result<AnyAuthority<UnixStream>>> {
    let (ready, connections) = mpsc::channel(1);
    task::spawn(async move {
        let mut acceptor = BackoffAcceptor::default();
        loop {
            let next = tokio::select! {
                next = acceptor.next(&listener) => next,
                () = shutdown.draining() => return,
                () = ready.closed() => return,
            };
            if ready.send(Ok(AnyAuthority::new(next))).await.is_err() {
                return;
            }
        }
    });
    ReceiverStream::new(connections)
}

/// Waits for calls whose client disconnected: they continue without a connection.
async fn wait_for_calls(calls: &Calls, shutdown: &Shutdown) {
    tokio::select! {
        () = calls.idle() => tracing::info!("stopped"),
        () = shutdown.overdue() => tracing::warn!("stopped while calls were still running after the drain timeout"),
    }
}

/// The same for a service that receives each request unchanged and whose responses are sent
/// unchanged: without added headers, and with no deadline except its own.
pub async fn raw_until_shutdown<F>(
    service: impl Fn(Request<Body>) -> F + Clone + Send + 'static,
    listener: UnixListener,
    calls: &Calls,
    shutdown: &Shutdown,
) -> anyhow::Result<()>
where
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let mut connections = JoinSet::new();
    let mut acceptor = BackoffAcceptor::default();
    loop {
        tokio::select! {
            stream = acceptor.next(&listener) => {
                connections.spawn(serve_connection(stream, service.clone(), shutdown.clone()));
            }
            Some(_) = connections.join_next() => {}
            () = shutdown.draining() => break,
        }
    }
    drop(listener);
    tokio::select! {
        () = async { while connections.join_next().await.is_some() {} } => {}
        () = shutdown.overdue() => tracing::warn!("closing connections that did not end within the drain timeout"),
    }
    wait_for_calls(calls, shutdown).await;
    Ok(())
}

/// Serves one connection until it ends.
async fn serve_connection<F>(
    stream: UnixStream,
    service: impl Fn(Request<Body>) -> F + Send + 'static,
    shutdown: Shutdown,
) where
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let handler = service_fn(move |request: Request<Incoming>| {
        let response = service(request.map(Body::new));
        async move { Ok::<_, Infallible>(response.await) }
    });
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.auto_date_header(false).max_concurrent_streams(STREAMS);
    builder.initial_stream_window_size(WINDOW).initial_connection_window_size(STREAMS * WINDOW);
    let mut served =
        pin!(builder.serve_connection(TokioIo::new(AnyAuthority::new(stream)), handler));
    tokio::select! {
        result = served.as_mut() => return log_result(result),
        () = shutdown.draining() => {}
    }
    served.as_mut().graceful_shutdown();
    log_result(served.await);
}

fn log_result(result: hyper::Result<()>) {
    if let Err(error) = result {
        tracing::debug!(%error, "connection failed");
    }
}

async fn drained(shutdown: Shutdown) {
    shutdown.draining().await;
}
