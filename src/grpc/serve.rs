//! A gRPC server on a unix socket from its first call to its last.

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

use super::call::Calls;
use crate::telemetry::accept::Accepting;
use crate::telemetry::shutdown::Shutdown;

/// Calls at once over one connection, and bytes under way of each. The connection has room for all of them: one that nobody reads
/// holds up no other.
const STREAMS: u32 = 200;
const WINDOW: u32 = 64 << 10;

/// Serves until a signal has come and the running calls are done, or out of time.
pub async fn until_told(
    router: Router,
    listener: UnixListener,
    calls: &Calls,
    shutdown: &Shutdown,
) -> anyhow::Result<()> {
    let incoming = incoming(listener, shutdown.clone());
    let served = router.serve_with_incoming_shutdown(incoming, drained(shutdown.clone()));
    tokio::select! {
        served = served => served.context("serving")?,
        () = shutdown.overdue() => tracing::warn!("closing connections that did not end in time"),
    }
    ended(calls, shutdown).await;
    Ok(())
}

/// The connections until draining begins. (tonic itself polls a listener that fails again at once.)
fn incoming(listener: UnixListener, shutdown: Shutdown) -> ReceiverStream<io::Result<UnixStream>> {
    let (ready, connections) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut accepting = Accepting::default();
        loop {
            let next = tokio::select! {
                next = accepting.next(&listener) => next,
                () = shutdown.draining() => return,
                () = ready.closed() => return,
            };
            if ready.send(Ok(next)).await.is_err() {
                return;
            }
        }
    });
    ReceiverStream::new(connections)
}

/// Calls whose client has gone run on without a connection.
async fn ended(calls: &Calls, shutdown: &Shutdown) {
    tokio::select! {
        () = calls.idle() => tracing::info!("stopped"),
        () = shutdown.overdue() => tracing::warn!("stopped with calls that did not end in time"),
    }
}

/// The same for a service that is handed each request as it is, and whose answers go out as they are: with no header more, and no
/// deadline but its own.
pub async fn each_until_told<F>(
    answer: impl Fn(Request<Body>) -> F + Clone + Send + 'static,
    listener: UnixListener,
    calls: &Calls,
    shutdown: &Shutdown,
) -> anyhow::Result<()>
where
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let mut connections = JoinSet::new();
    let mut accepting = Accepting::default();
    loop {
        tokio::select! {
            stream = accepting.next(&listener) => {
                connections.spawn(attend(stream, answer.clone(), shutdown.clone()));
            }
            Some(_) = connections.join_next() => {}
            () = shutdown.draining() => break,
        }
    }
    drop(listener);
    tokio::select! {
        () = async { while connections.join_next().await.is_some() {} } => {}
        () = shutdown.overdue() => tracing::warn!("closing connections that did not end in time"),
    }
    ended(calls, shutdown).await;
    Ok(())
}

/// Serves one connection to its end.
async fn attend<F>(
    stream: UnixStream,
    answer: impl Fn(Request<Body>) -> F + Send + 'static,
    shutdown: Shutdown,
) where
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let each = service_fn(move |request: Request<Incoming>| {
        let answered = answer(request.map(Body::new));
        async move { Ok::<_, Infallible>(answered.await) }
    });
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.auto_date_header(false).max_concurrent_streams(STREAMS);
    builder.initial_stream_window_size(WINDOW).initial_connection_window_size(STREAMS * WINDOW);
    let mut served = pin!(builder.serve_connection(TokioIo::new(stream), each));
    tokio::select! {
        ended = served.as_mut() => return told(ended),
        () = shutdown.draining() => {}
    }
    served.as_mut().graceful_shutdown();
    told(served.await);
}

fn told(ended: hyper::Result<()>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke");
    }
}

async fn drained(shutdown: Shutdown) {
    shutdown.draining().await;
}
