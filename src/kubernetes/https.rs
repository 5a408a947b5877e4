//! HTTPS for what the API server calls: webhooks, aggregated APIs. Whoever reaches the port may speak to it, so everything has
//! a bound: a request's head, body and time, the bytes of all bodies together, and how long a connection may say nothing.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_stream::{Stream, StreamExt};

use super::tls::Connection;
use crate::telemetry::shutdown::Shutdown;

/// How long a client may take for the head of a request. A connection on which none was sent whole is closed then.
const HEAD: Duration = Duration::from_secs(10);
/// A connection over which nothing was asked for so long is closed. The API server closes its own sooner.
const IDLE: Duration = Duration::from_secs(180);
/// Bytes of a request's head.
const MAX_HEAD: usize = 16 << 10;
/// Requests at once over one connection (HTTP/2); the API server opens another one for more.
const MAX_STREAMS: u32 = 128;
/// Bytes of all bodies together; what would be more waits.
const MAX_BODIES: usize = 64 << 20;
/// A client that says nothing for so long is asked whether it is there, and has so long to answer (HTTP/2).
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(20));
/// How long answers have to reach their clients when a connection is closed.
const GRACE: Duration = Duration::from_secs(1);

/// The bounds that depend on what is served.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of a request's body, at most 64 MiB.
    pub body: usize,
    /// How long a request may take from the end of its head to its answer.
    pub request: Duration,
}

/// Serves `routes` until draining begins and what runs then has ended, or is cut off when everything ends.
pub async fn serve(
    mut incoming: impl Stream<Item = io::Result<Connection>> + Unpin,
    routes: Router,
    limits: Limits,
    shutdown: Shutdown,
) {
    let bodies = Arc::new(Semaphore::new(MAX_BODIES));
    // axum's own bound would be a second one.
    let routes = routes
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn_with_state(Bounds { limits, bodies }, within_bounds));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            next = incoming.next() => match next {
                Some(Ok(connection)) => {
                    connections.spawn(attend(connection, routes.clone(), limits, shutdown.clone()));
                }
                Some(Err(error)) => tracing::debug!(%error, "a connection could not be taken"),
                None => break,
            },
            Some(_) = connections.join_next() => {}
        }
    }
    while connections.join_next().await.is_some() {}
}

/// Serves one connection to its end.
async fn attend(connection: Connection, routes: Router, limits: Limits, shutdown: Shutdown) {
    let (activity, seen) = watch::channel(Activity::default());
    let routes = routes.layer(from_fn_with_state(activity, counted));
    let served = builder();
    let served = served.serve_connection(
        TokioIo::new(connection),
        TowerToHyperService::new(routes.into_service()),
    );
    let mut served = pin!(served);
    tokio::select! {
        ended = served.as_mut() => return told(ended),
        () = idle(seen) => {}
        () = shutdown.draining() => {}
    }
    served.as_mut().graceful_shutdown();
    tokio::select! {
        ended = served => told(ended),
        () = sleep(limits.request + GRACE) => {}
        () = overdue(&shutdown) => {}
    }
}

fn builder() -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(MAX_HEAD);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(MAX_HEAD as u32)
        .max_concurrent_streams(MAX_STREAMS)
        .keep_alive_interval(KEEPALIVE.0)
        .keep_alive_timeout(KEEPALIVE.1);
    builder
}

fn told(ended: Result<(), Box<dyn std::error::Error + Send + Sync>>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke");
    }
}

async fn overdue(shutdown: &Shutdown) {
    shutdown.ending().await;
    sleep(GRACE).await;
}

/// What a connection is used for.
#[derive(Debug, Default, Clone, Copy)]
struct Activity {
    /// Requests that are being answered.
    running: usize,
    /// Whether there was any.
    any: bool,
}

/// One request of a connection, until it is answered.
struct Running(watch::Sender<Activity>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|activity| activity.running = activity.running.saturating_sub(1));
    }
}

async fn counted(
    State(activity): State<watch::Sender<Activity>>,
    request: Request,
    next: Next,
) -> Response {
    activity.send_modify(|now| *now = Activity { running: now.running + 1, any: true });
    let _running = Running(activity);
    next.run(request).await
}

/// Waits until a connection is used no more.
async fn idle(mut activity: watch::Receiver<Activity>) {
    loop {
        let now = *activity.borrow_and_update();
        let patience = if now.any { IDLE } else { HEAD };
        tokio::select! {
            () = sleep(patience), if now.running == 0 => return,
            // An error means that nobody counts any more; the connection then ends by itself.
            changed = activity.changed() => if changed.is_err() { std::future::pending().await },
        }
    }
}

#[derive(Debug, Clone)]
struct Bounds {
    limits: Limits,
    bodies: Arc<Semaphore>,
}

/// Takes the body in before anybody looks at it, and answers in time.
async fn within_bounds(State(bounds): State<Bounds>, request: Request, next: Next) -> Response {
    let limits = bounds.limits;
    let answered = async {
        let (head, body) = request.into_parts();
        match collect(body, &bounds).await {
            // What it takes in memory is given back when it is answered.
            Ok((body, _taken)) => next.run(Request::from_parts(head, body.into())).await,
            Err(response) => response,
        }
    };
    match timeout(limits.request, answered).await {
        Ok(response) => response,
        Err(_) => refused(
            StatusCode::REQUEST_TIMEOUT,
            format!("the request was not through within {:?}", limits.request),
        ),
    }
}

type Taken = Option<OwnedSemaphorePermit>;

async fn collect(body: Body, bounds: &Bounds) -> Result<(Bytes, Taken), Response> {
    let most = bounds.limits.body;
    let mut pieces = body.into_data_stream();
    let (mut whole, mut taken): (Vec<u8>, Taken) = (Vec::new(), None);
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| {
            refused(StatusCode::BAD_REQUEST, format!("the body broke off: {error}"))
        })?;
        let room = most.saturating_sub(whole.len());
        let (true, Ok(bytes)) = (piece.len() <= room, u32::try_from(piece.len())) else {
            let message = format!("the body has more than {most} bytes");
            return Err(refused(StatusCode::PAYLOAD_TOO_LARGE, message));
        };
        // Nobody closes it.
        if let Ok(more) = bounds.bodies.clone().acquire_many_owned(bytes).await {
            match &mut taken {
                Some(taken) => taken.merge(more),
                None => taken = Some(more),
            }
        }
        whole.extend_from_slice(&piece);
    }
    Ok((whole.into(), taken))
}

fn refused(code: StatusCode, message: String) -> Response {
    (code, format!("{message}\n")).into_response()
}
