//! The TLS server of all roles: webhooks, aggregated APIs and gRPC. Any process that reaches the port
//! can connect, so everything is limited: the time of a request's head, the idle time and the age of
//! a connection, its requests, and the memory of all bodies ([`Bounds`]). A client that exceeds a
//! limit takes nothing from other clients.

mod bounds;

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::{Extension, Router};
use hyper::body::{Frame, SizeHint};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_stream::{Stream, StreamExt};

pub use self::bounds::{Bounds, Limits, Memory, Received, Refuse, Refused, refuse_in_text};
use super::tls::Connection;
use telemetry::fair_limit::Share;
use telemetry::peer::Peer;
use telemetry::shutdown::Shutdown;

/// Time to receive the head of a request. The connection is closed when it expires.
const HEAD: Duration = Duration::from_secs(10);
/// Idle time after which a connection is closed. The API server closes its connections earlier.
const IDLE: Duration = Duration::from_secs(180);
/// Age after which a connection is closed, once its requests are complete.
const MAX_AGE: Duration = Duration::from_secs(3600);
/// Maximum bytes and headers of a request's head: the API server forwards all groups of a user,
/// which may be hundreds.
const MAX_HEAD: usize = 64 << 10;
const MAX_HEADERS: usize = 1000;
/// Maximum concurrent requests of one HTTP/2 connection; clients open another connection for more.
const MAX_STREAMS: u32 = 100;
/// Maximum bytes that an HTTP/2 client may send ahead, of one request and of all requests of a
/// connection.
const WINDOWS: (u32, u32) = (64 << 10, 1 << 20);
/// Interval of keepalive pings to an idle HTTP/2 client, and time for its response.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(20));
/// Time to deliver responses when a connection is closed.
const GRACE: Duration = Duration::from_secs(1);

/// Serves `routes` until draining begins and the running requests are complete, or until the
/// process ends. `longest` is the maximum duration of a request. Each request has the extensions
/// [`ClientChain`](super::tls::ClientChain) and [`Peer`](telemetry::peer::Peer).
pub async fn serve(
    mut incoming: impl Stream<Item = io::Result<Connection>> + Unpin,
    routes: Router,
    longest: Duration,
    shutdown: Shutdown,
) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            next = incoming.next() => match next {
                Some(Ok(connection)) => {
                    connections.spawn(serve_connection(connection, routes.clone(), longest, shutdown.clone()));
                }
                Some(Err(error)) => tracing::debug!(%error, "failed to accept a connection"),
                None => break,
            },
            Some(_) = connections.join_next() => {}
        }
    }
    while connections.join_next().await.is_some() {}
}

/// Serves one connection until it ends.
async fn serve_connection(
    connection: Connection,
    routes: Router,
    longest: Duration,
    shutdown: Shutdown,
) {
    let (activity, seen) = watch::channel(Activity::default());
    let (peer, share) = (connection.peer(), connection.share());
    let routes = routes
        .layer(Extension(connection.client_chain()))
        .layer(Extension(peer))
        .layer(from_fn_with_state(Usage { activity, share: share.clone() }, track));
    let builder = builder();
    let served = builder.serve_connection(
        TokioIo::new(connection),
        TowerToHyperService::new(routes.into_service()),
    );
    let mut served = pin!(served);
    let mut revoked = pin!(share.revoked());
    tokio::select! {
        ended = served.as_mut() => return log_end(ended),
        () = revoked.as_mut() => return log_revoked(peer),
        () = idle(seen.clone()) => {}
        () = sleep(MAX_AGE) => {}
        () = shutdown.draining() => {}
    }
    served.as_mut().graceful_shutdown();
    tokio::select! {
        ended = served => log_end(ended),
        () = revoked => log_revoked(peer),
        () = quiet(seen) => {}
        () = sleep(longest + GRACE) => {}
        () = shutdown.overdue() => {}
    }
}

fn builder() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(MAX_HEAD as u32)
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(WINDOWS.0)
        .initial_connection_window_size(WINDOWS.1)
        .keep_alive_interval(KEEPALIVE.0)
        .keep_alive_timeout(KEEPALIVE.1);
    builder
}

fn log_end(ended: Result<(), Box<dyn std::error::Error + Send + Sync>>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection failed");
    }
}

fn log_revoked(peer: Peer) {
    tracing::debug!(?peer, "closed a connection to make room for other clients");
}

/// The use of a connection.
#[derive(Debug, Default, Clone, Copy)]
struct Activity {
    /// Requests in progress, including their responses.
    running: usize,
    /// Whether there was any request.
    any: bool,
}

/// Records the use of a connection.
#[derive(Debug, Clone)]
struct Usage {
    activity: watch::Sender<Activity>,
    share: Arc<Share<Peer>>,
}

impl Usage {
    fn begin(self) -> Running {
        self.activity.send_modify(|now| *now = Activity { running: now.running + 1, any: true });
        self.share.set_in_use(true);
        Running(self)
    }
}

/// One request in progress.
#[derive(Debug)]
struct Running(Usage);

impl Drop for Running {
    fn drop(&mut self) {
        let Usage { activity, share } = &self.0;
        activity.send_modify(|now| now.running = now.running.saturating_sub(1));
        share.set_in_use(activity.borrow().running > 0);
    }
}

async fn track(State(usage): State<Usage>, request: Request, next: Next) -> Response {
    let running = usage.begin();
    next.run(request).await.map(|body| Body::new(Tracked { body, _running: running }))
}

/// The body of a response: the request is in progress until it is sent.
#[derive(Debug)]
struct Tracked {
    body: Body,
    _running: Running,
}

impl HttpBody for Tracked {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Waits until a connection is idle.
async fn idle(mut activity: watch::Receiver<Activity>) {
    loop {
        let now = *activity.borrow_and_update();
        let patience = if now.any { IDLE } else { HEAD };
        tokio::select! {
            () = sleep(patience), if now.running == 0 => return,
            // An error means that the connection has ended.
            changed = activity.changed() => if changed.is_err() { std::future::pending().await },
        }
    }
}

/// Waits until no request has run for [`GRACE`].
async fn quiet(mut activity: watch::Receiver<Activity>) {
    loop {
        let running = activity.borrow_and_update().running;
        tokio::select! {
            () = sleep(GRACE), if running == 0 => return,
            changed = activity.changed() => if changed.is_err() { std::future::pending().await },
        }
    }
}

#[cfg(test)]
mod tests;
