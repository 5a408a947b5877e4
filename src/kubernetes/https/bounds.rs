//! Limits of the requests of one listener: size and time of a body, and the memory of all bodies.
//! A role receives bodies after it has authenticated the request, where the head suffices for that.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use hyper::body::Body as _;
use tokio::time::{Instant, timeout_at};
use tokio_stream::StreamExt;

use telemetry::fair_limit::{FairLimit, Labels, Share};
use telemetry::peer::Peer;

/// Maximum bytes of all bodies in memory, and of what handlers make of them.
const MAX_BODIES: usize = 64 << 20;

/// Limits that depend on the service.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum bytes of a request's body, at most 64 MiB.
    pub body: usize,
    /// Maximum time from the end of a request's head to its response.
    pub request: Duration,
}

/// Why a request is refused: 413 for a body that is too large, 400 for an incomplete body, 408 for
/// a request that takes too long, 503 if other requests need the memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub code: StatusCode,
    pub message: String,
}

/// Creates the response to a request that exceeds the limits.
pub type Refuse = fn(StatusCode, String) -> Response;

/// The limits of a listener's requests. Clones share the memory of bodies.
#[derive(Debug, Clone)]
pub struct Bounds {
    limits: Limits,
    memory: FairLimit<Peer>,
}

/// The memory that a request holds. Its handler adds what it makes of the body.
#[derive(Debug, Clone)]
pub struct Memory(Arc<Share<Peer>>);

impl Memory {
    /// Adds bytes until the end of the request. The request ends if others need the memory more.
    pub fn add(&self, bytes: usize) {
        self.0.grow(bytes);
    }
}

/// A complete body. Its memory is released when it is dropped.
#[derive(Debug)]
pub struct Received {
    pub bytes: Bytes,
    share: Arc<Share<Peer>>,
}

impl Received {
    /// Waits until other requests need the memory. The request must then be refused with
    /// [`Refused::no_memory`].
    pub async fn revoked(&self) {
        self.share.revoked().await;
    }
}

impl Bounds {
    /// `listener` is its name in metrics.
    pub fn new(limits: Limits, listener: &'static str) -> Self {
        let labels = Labels { listener, share: "body" };
        Self { limits, memory: FairLimit::new(labels, MAX_BODIES) }
    }

    /// Limits body and time of the requests of `routes`. Authentication belongs in layers around
    /// the result.
    pub fn around(self, routes: Router, refuse: Refuse) -> Router {
        self.layer(routes, refuse, true)
    }

    /// The same, but the time is limited only until the body is complete.
    pub fn around_streams(self, routes: Router, refuse: Refuse) -> Router {
        self.layer(routes, refuse, false)
    }

    fn layer(self, routes: Router, refuse: Refuse, whole: bool) -> Router {
        let bounded = Bounded { bounds: self, refuse, whole };
        // axum's own limit would be a second one.
        routes
            .layer(DefaultBodyLimit::disable())
            .layer(from_fn_with_state(bounded, bounded_request))
    }

    /// Receives the body of a request until `deadline`. Memory is reserved first: the request's
    /// Content-Length, or the maximum.
    ///
    /// # Errors
    /// The request exceeds a limit.
    pub async fn receive(
        &self,
        request: Request,
        deadline: Instant,
    ) -> Result<(Parts, Received), Refused> {
        let (head, body) = request.into_parts();
        let most = self.limits.body;
        let expected = body.size_hint();
        if usize::try_from(expected.lower()).is_ok_and(|least| least > most) {
            return Err(Refused::too_large(most));
        }
        let exact = expected.exact().and_then(|length| usize::try_from(length).ok());
        let peer = head.extensions.get().copied().unwrap_or_else(Peer::unknown);
        let share = self.memory.take(peer, exact.unwrap_or(most));
        let whole = tokio::select! {
            whole = timeout_at(deadline, collect(body, most)) => {
                whole.map_err(|_| self.too_long())??
            }
            () = share.revoked() => return Err(Refused::no_memory()),
        };
        share.shrink(whole.len());
        share.set_in_use(true);
        Ok((head, Received { bytes: whole.into(), share: Arc::new(share) }))
    }

    fn too_long(&self) -> Refused {
        let time = self.limits.request;
        let message = format!("the request did not complete within {time:?}");
        Refused { code: StatusCode::REQUEST_TIMEOUT, message }
    }
}

impl Refused {
    pub fn no_memory() -> Self {
        let message = "too many large requests at once; retry later".to_owned();
        Self { code: StatusCode::SERVICE_UNAVAILABLE, message }
    }

    fn too_large(most: usize) -> Self {
        let message = format!("the body is larger than {most} bytes");
        Self { code: StatusCode::PAYLOAD_TOO_LARGE, message }
    }
}

/// A plain text response.
pub fn refuse_in_text(code: StatusCode, message: String) -> Response {
    (code, format!("{message}\n")).into_response()
}

#[derive(Debug, Clone)]
struct Bounded {
    bounds: Bounds,
    refuse: Refuse,
    /// Whether the time includes the handler's.
    whole: bool,
}

async fn bounded_request(State(bounded): State<Bounded>, request: Request, next: Next) -> Response {
    let Bounded { bounds, refuse, whole } = bounded;
    let refused = |refused: Refused| {
        let mut response = refuse(refused.code, refused.message);
        if refused.code == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    };
    let deadline = Instant::now() + bounds.limits.request;
    let (head, received) = match bounds.receive(request, deadline).await {
        Ok(received) => received,
        Err(error) => return refused(error),
    };
    let mut request = Request::from_parts(head, received.bytes.clone().into());
    request.extensions_mut().insert(Memory(received.share.clone()));
    let handled = next.run(request);
    let handled = async {
        match whole {
            true => timeout_at(deadline, handled).await.map_err(|_| bounds.too_long()),
            false => Ok(handled.await),
        }
    };
    tokio::select! {
        response = handled => response.unwrap_or_else(refused),
        () = received.revoked() => refused(Refused::no_memory()),
    }
}

async fn collect(body: Body, most: usize) -> Result<Vec<u8>, Refused> {
    let mut pieces = body.into_data_stream();
    let mut whole = Vec::new();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| {
            let message = format!("the body is incomplete: {error}");
            Refused { code: StatusCode::BAD_REQUEST, message }
        })?;
        if piece.len() > most.saturating_sub(whole.len()) {
            return Err(Refused::too_large(most));
        }
        whole.extend_from_slice(&piece);
    }
    Ok(whole)
}
