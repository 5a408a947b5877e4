//! Handles a request: authentication, authorization, leadership, response. Each request is counted
//! and logged in one line with names and numbers, never a token or a secret.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json, Router};
use k8s_openapi::api::authentication::v1::UserInfo;
use tokio::sync::watch;

use super::metrics::Metrics;
use super::pages::{self, PageCall};
use super::problem::{self, problem, unavailable};
use crate::sidecar::call::ConcurrencyLimit;
use crate::sidecar::driver_link::DriverLink;
use crate::sidecar::nodes::Remote;
use crate::sidecar::request;
use common::text::truncate;
use kubernetes::bounded;
use kubernetes::cbt_http::{self, PATH, Page, PageRequest, Problem, ProblemKind, SUBRESOURCE};
use kubernetes::https::{Bounds, Limits, Refused};
use kubernetes::review::{Action, Denied, Reviewer};
use kubernetes::snapshot_delta::GROUP;
use telemetry::log_budget::LogBudget;
use telemetry::peer::Peer;
use telemetry::shutdown::Shutdown;

/// Maximum bytes of a request: a Secret (at most 1 MiB) as JSON, and some.
const MAX_BODY: usize = 3 << 20;
/// Maximum bytes of a name in the log.
const MAX_LOGGED: usize = 253;

/// State shared by all requests.
pub struct PageServer {
    pub driver: DriverLink,
    /// The drivers of many nodes, instead.
    pub remote: Option<Remote>,
    pub reviewer: Reviewer,
    /// Set once the driver's name is known.
    pub known: OnceLock<KnownDriver>,
    /// Limits of all requests, and of authorized ones: unauthorized requests take no place from
    /// others.
    pub requests: ConcurrencyLimit,
    pub pages: ConcurrencyLimit,
    pub metrics: Metrics,
    /// Limits the log lines of invalid tokens, which any client can send.
    pub invalid_tokens: LogBudget,
    /// Timeout of a request, from its head to its response.
    pub timeout: Duration,
    /// Limits of bodies, which are received after the request is authorized.
    pub bounds: Bounds,
    pub shutdown: Shutdown,
}

/// What the server must know before it can authorize a request.
pub struct KnownDriver {
    /// Name of the CSI driver, which does not change.
    pub driver: String,
    /// Whether this replica leads.
    pub leads: watch::Receiver<bool>,
}

pub fn limits(page: Duration) -> Limits {
    Limits { body: MAX_BODY, request: page }
}

pub fn routes(server: Arc<PageServer>) -> Router {
    Router::new()
        .route(PATH, get(info).post(page))
        .method_not_allowed_fallback(async || {
            let problem = problem(ProblemKind::Invalid, "method not allowed; use GET or POST");
            problem::response_with(StatusCode::METHOD_NOT_ALLOWED, &problem)
        })
        .fallback(async || {
            let words = format!("path not found; use {PATH}");
            problem::response_with(StatusCode::NOT_FOUND, &problem(ProblemKind::Invalid, words))
        })
        .with_state(server)
}

async fn info(
    State(server): State<Arc<PageServer>>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
) -> Response {
    let mut log = RequestLog::begin(&server, "info");
    let result = server.run_limited(async {
        let (_, user) = server.authorize(peer, &headers).await?;
        log.user = name_of(&user);
        pages::info(&server.driver)
    });
    match result.await {
        Ok(info) => {
            log.end("ok", None);
            Json(info).into_response()
        }
        Err(problem) => log.refused(&problem),
    }
}

async fn page(
    State(server): State<Arc<PageServer>>,
    Extension(peer): Extension<Peer>,
    request: Request,
) -> Response {
    let mut log = RequestLog::begin(&server, "page");
    let result = server.run_limited(server.page(peer, request, &mut log)).await;
    match result {
        Ok(page) => {
            log.blocks = page.changed_blocks.len();
            server.metrics.returned(log.blocks);
            log.end("ok", None);
            Json(page).into_response()
        }
        Err(problem) => log.refused(&problem),
    }
}

impl PageServer {
    /// Runs `work` within the limits of requests, time and shutdown.
    async fn run_limited<T>(
        &self,
        work: impl Future<Output = Result<T, Problem>>,
    ) -> Result<T, Problem> {
        let _permit = self.requests.try_acquire().ok_or_else(busy)?;
        tokio::select! {
            done = tokio::time::timeout(self.timeout, work) => done.unwrap_or_else(|_| Err(problem::too_long())),
            () = self.shutdown.ending() => Err(unavailable("the sidecar is exiting; retry with another replica")),
        }
    }

    async fn page(
        &self,
        peer: Peer,
        request: Request,
        log: &mut RequestLog,
    ) -> Result<Page, Problem> {
        let deadline = tokio::time::Instant::now() + self.timeout;
        let (known, user) = self.authorize(peer, request.headers()).await?;
        log.user = name_of(&user);
        let received = self.bounds.receive(request, deadline).await;
        let (_, body) = received.map_err(|refused| log.not_received(&refused))?;
        let page = self.page_of(known, &body.bytes, deadline, log);
        tokio::select! {
            page = page => page,
            () = body.revoked() => Err(busy()),
        }
    }

    async fn page_of(
        &self,
        known: &KnownDriver,
        body: &[u8],
        deadline: tokio::time::Instant,
        log: &mut RequestLog,
    ) -> Result<Page, Problem> {
        let request = decode(body)?;
        log.set_request(&request);
        pages::check(&request, &known.driver)?;
        if !*known.leads.borrow() {
            let words = "another replica leads; route requests by the readiness probe, and retry";
            return Err(unavailable(words));
        }
        let _permit = self.pages.try_acquire().ok_or_else(busy)?;
        let (driver, remote) = (&self.driver, self.remote.as_ref());
        pages::page(&PageCall { driver, remote, request: &request, deadline }).await
    }

    /// Whether requests can be routed to this replica.
    pub fn is_ready(&self) -> Result<(), String> {
        let known = self.known.get().ok_or("the CSI driver's name is not known yet")?;
        if !*known.leads.borrow() {
            return Err("another replica leads".into());
        }
        pages::info(&self.driver).map(drop).map_err(|problem| problem.message)
    }

    /// Authenticates and authorizes the caller.
    async fn authorize(
        &self,
        peer: Peer,
        headers: &HeaderMap,
    ) -> Result<(&KnownDriver, Arc<UserInfo>), Problem> {
        let unknown = || unavailable("the CSI driver's name is not known yet; retry later");
        let known = self.known.get().ok_or_else(unknown)?;
        let driver = &known.driver;
        let audience = cbt_http::audience(driver);
        let user = match self.reviewer.authenticate(bearer(headers)?, &audience, peer).await {
            Ok(user) => user,
            Err(Denied::Refused(reason)) => {
                let words = format!("the bearer token: {reason}; its audience must be {audience}");
                return Err(problem(ProblemKind::Unauthenticated, words));
            }
            Err(Denied::Unknown(error)) => {
                return Err(problem::of_api_server("create TokenReviews", &error));
            }
        };
        let action = Action {
            verb: "create",
            group: GROUP,
            resource: "driverdiscoveries",
            subresource: Some(SUBRESOURCE),
            namespace: "",
            name: Some(driver),
        };
        match self.reviewer.authorize(&user, action).await {
            Ok(()) => Ok((known, user)),
            Err(Denied::Refused(_)) => {
                let words = format!(
                    "{} may not create driverdiscoveries/{SUBRESOURCE}.{GROUP} of {driver}; grant the permission with a ClusterRole",
                    name_of(&user).as_deref().unwrap_or("the user")
                );
                Err(problem(ProblemKind::NotAllowed, words))
            }
            Err(Denied::Unknown(error)) => {
                Err(problem::of_api_server("create SubjectAccessReviews", &error))
            }
        }
    }
}

fn name_of(user: &UserInfo) -> Option<String> {
    user.username.as_deref().map(|name| truncate(name, MAX_LOGGED))
}

fn busy() -> Problem {
    let words = "too many concurrent requests; retry later, or increase --max-streams";
    problem(ProblemKind::Busy, words)
}

fn bearer(headers: &HeaderMap) -> Result<&str, Problem> {
    request::bearer(headers).ok_or_else(|| {
        problem(ProblemKind::Unauthenticated, "send exactly one header Authorization: Bearer TOKEN")
    })
}

/// Parses the body. The parser's message may quote secrets, so the error reports only the position.
fn decode(body: &[u8]) -> Result<PageRequest, Problem> {
    bounded::parse(body).map(|parsed| parsed.value).map_err(|error| {
        let error = error.error;
        let what = match error.classify() {
            serde_json::error::Category::Data => "is not a page request",
            _ => "is not JSON",
        };
        let words = format!("the body {what} (line {}, column {})", error.line(), error.column());
        problem(ProblemKind::Invalid, words)
    })
}

/// A request in progress. If it is dropped before its end, it is recorded as cancelled.
struct RequestLog {
    server: Arc<PageServer>,
    what: &'static str,
    started: Instant,
    user: Option<String>,
    target: String,
    base: String,
    offset: u64,
    limit: u32,
    blocks: usize,
    /// Status of a refusal, if not that of its kind.
    status: Option<StatusCode>,
    ended: bool,
}

impl RequestLog {
    fn begin(server: &Arc<PageServer>, what: &'static str) -> Self {
        Self {
            server: server.clone(),
            what,
            started: Instant::now(),
            user: None,
            target: String::new(),
            base: String::new(),
            offset: 0,
            limit: 0,
            blocks: 0,
            status: None,
            ended: false,
        }
    }

    fn set_request(&mut self, request: &PageRequest) {
        self.target = truncate(&request.target_snapshot_id, MAX_LOGGED);
        self.base = truncate(&request.base_snapshot_id, MAX_LOGGED);
        (self.offset, self.limit) = (request.offset, request.limit);
    }

    /// The problem of a body that exceeds a limit.
    fn not_received(&mut self, refused: &Refused) -> Problem {
        let kind = match refused.code {
            StatusCode::REQUEST_TIMEOUT => ProblemKind::TimedOut,
            StatusCode::SERVICE_UNAVAILABLE => ProblemKind::Busy,
            code => {
                self.status = Some(code);
                ProblemKind::Invalid
            }
        };
        problem(kind, &*refused.message)
    }

    fn refused(&mut self, problem: &Problem) -> Response {
        self.end(problem::label(problem.kind), Some(problem));
        match self.status {
            Some(status) => problem::response_with(status, problem),
            None => problem::response(problem),
        }
    }

    fn end(&mut self, outcome: &'static str, problem: Option<&Problem>) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let duration = self.started.elapsed();
        self.server.metrics.ended(outcome, duration);
        let omitted = match problem {
            Some(problem) if problem.kind == ProblemKind::Unauthenticated => {
                let Some(omitted) = self.server.invalid_tokens.line() else { return };
                omitted
            }
            _ => 0,
        };
        tracing::info!(
            cbt_http = self.what,
            outcome,
            user = self.user,
            snapshot_id = self.target,
            base_snapshot_id = self.base,
            offset = self.offset,
            limit = self.limit,
            blocks = self.blocks,
            code = problem.and_then(|problem| problem.code.as_deref()),
            error = problem.map(|problem| problem.message.as_str()),
            omitted = (omitted > 0).then_some(omitted),
            ?duration,
        );
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        self.end("cancelled", None);
    }
}
