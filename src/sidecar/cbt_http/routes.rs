//! A request from its head to its answer: who asks and may they, does this replica lead, what is asked. Each is counted and
//! logged in one line, which holds names and numbers, never a token or a secret.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::Json;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use k8s_openapi::api::authentication::v1::UserInfo;
use tokio::sync::watch;

use super::metrics::Metrics;
use super::pages::{self, Asking};
use super::problem::{self, problem, unavailable};
use crate::grpc::cut;
use crate::kubernetes::cbt_http::{
    self, PATH, Page, PageRequest, Problem, ProblemKind, SUBRESOURCE,
};
use crate::kubernetes::https::Limits;
use crate::kubernetes::review::{Action, Denied, Reviewer};
use crate::kubernetes::snapshot_delta::GROUP;
use crate::sidecar::call::Calls;
use crate::sidecar::driver_link::DriverLink;
use crate::telemetry::shutdown::Shutdown;

/// Bytes of a request: those of a Secret, which are 1 MiB at most, as JSON, and some.
const MAX_BODY: usize = 3 << 20;
/// A body of which nothing has come by then is not waited for.
const BODY: Duration = Duration::from_secs(10);
/// Bytes of a name that go into the log.
const MAX_LOGGED: usize = 253;

/// What the requests share.
pub struct Desk {
    pub driver: DriverLink,
    pub reviewer: Reviewer,
    /// Once the driver has said its name.
    pub known: OnceLock<Known>,
    /// Requests in all, and those that were let in and are being answered: who is not let in takes no place from the others.
    pub requests: Calls,
    pub pages: Calls,
    pub metrics: Metrics,
    /// How long a page may take.
    pub timeout: Duration,
    pub shutdown: Shutdown,
}

/// What there is to know before anybody can be let in.
pub struct Known {
    /// Name of the CSI driver, which does not change.
    pub driver: String,
    /// Whether this replica leads.
    pub leads: watch::Receiver<bool>,
}

/// The bounds for https::serve: behind those of a page, so that a caller learns what it was.
pub fn limits(page: Duration) -> Limits {
    Limits { body: MAX_BODY, request: page + BODY }
}

pub fn routes(desk: Arc<Desk>) -> Router {
    Router::new()
        .route(PATH, get(info).post(page))
        .method_not_allowed_fallback(async || {
            let problem = problem(ProblemKind::Invalid, "only GET and POST are answered here");
            problem::answer_with(StatusCode::METHOD_NOT_ALLOWED, &problem)
        })
        .fallback(async || {
            let words = format!("there is nothing at this path; what there is, is at {PATH}");
            problem::answer_with(StatusCode::NOT_FOUND, &problem(ProblemKind::Invalid, words))
        })
        .with_state(desk)
}

async fn info(State(desk): State<Arc<Desk>>, headers: HeaderMap) -> Response {
    let mut visit = Visit::begin(&desk.metrics, "info");
    let told = desk.attend(async {
        let (_, user) = desk.admitted(&headers).await?;
        visit.user = name_of(&user);
        pages::info(&desk.driver)
    });
    match told.await {
        Ok(info) => {
            visit.end("ok", None);
            Json(info).into_response()
        }
        Err(problem) => visit.refused(&problem),
    }
}

async fn page(State(desk): State<Arc<Desk>>, headers: HeaderMap, body: Bytes) -> Response {
    let mut visit = Visit::begin(&desk.metrics, "page");
    let told = desk.attend(desk.page(&headers, body, &mut visit)).await;
    match told {
        Ok(page) => {
            visit.blocks = page.changed_blocks.len();
            desk.metrics.told(visit.blocks);
            visit.end("ok", None);
            Json(page).into_response()
        }
        Err(problem) => visit.refused(&problem),
    }
}

impl Desk {
    /// Lets work go on for as long as it may.
    async fn attend<T>(
        &self,
        work: impl Future<Output = Result<T, Problem>>,
    ) -> Result<T, Problem> {
        let _running = self.requests.begin().ok_or_else(busy)?;
        tokio::select! {
            done = tokio::time::timeout(self.timeout, work) => done.unwrap_or_else(|_| Err(problem::too_long())),
            () = self.shutdown.ending() => Err(unavailable("the sidecar is exiting; another replica answers")),
        }
    }

    async fn page(
        &self,
        headers: &HeaderMap,
        body: Bytes,
        visit: &mut Visit,
    ) -> Result<Page, Problem> {
        let deadline = tokio::time::Instant::now() + self.timeout;
        let (known, user) = self.admitted(headers).await?;
        visit.user = name_of(&user);
        let asked = decode(&body)?;
        visit.about(&asked);
        pages::check(&asked, &known.driver)?;
        if !*known.leads.borrow() {
            let words =
                "another replica leads; route requests by the readiness probe, and try again";
            return Err(unavailable(words));
        }
        let _running = self.pages.begin().ok_or_else(busy)?;
        pages::page(&Asking { driver: &self.driver, asked: &asked, deadline }).await
    }

    /// Whether requests are to be routed here.
    pub fn is_ready(&self) -> Result<(), String> {
        let known = self.known.get().ok_or("the CSI driver's name is not known yet")?;
        if !*known.leads.borrow() {
            return Err("another replica leads".into());
        }
        pages::info(&self.driver).map(drop).map_err(|problem| problem.message)
    }

    /// A user who may ask.
    async fn admitted(&self, headers: &HeaderMap) -> Result<(&Known, Arc<UserInfo>), Problem> {
        let unknown = || unavailable("the CSI driver has not said its name yet; try again");
        let known = self.known.get().ok_or_else(unknown)?;
        let driver = &known.driver;
        let audience = cbt_http::audience(driver);
        let user = match self.reviewer.authenticate(bearer(headers)?, &audience).await {
            Ok(user) => user,
            Err(Denied::Refused(reason)) => {
                let words =
                    format!("the bearer token: {reason}; its audience has to be {audience}");
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
                    "{} may not create driverdiscoveries/{SUBRESOURCE}.{GROUP} of {driver}; a ClusterRole has to allow it",
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
    user.username.as_deref().map(|name| cut(name, MAX_LOGGED))
}

fn busy() -> Problem {
    let words = "too many requests at once; try again later, or raise --max-streams";
    problem(ProblemKind::Busy, words)
}

fn no_token() -> Problem {
    problem(ProblemKind::Unauthenticated, "one header Authorization: Bearer TOKEN is needed")
}

/// The token of the one header that there may be (RFC 6750, section 2.1).
fn bearer(headers: &HeaderMap) -> Result<&str, Problem> {
    let mut all = headers.get_all(header::AUTHORIZATION).iter();
    let (Some(one), None) = (all.next(), all.next()) else { return Err(no_token()) };
    let token = |one: &HeaderValue| {
        let (scheme, token) = one.to_str().ok()?.split_once(' ')?;
        let token = token.trim();
        (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token.len())
    };
    let length = token(one).ok_or_else(no_token)?;
    let text = one.to_str().map_err(|_| no_token())?.trim_end();
    Ok(&text[text.len() - length..])
}

/// What the parser says of a body may hold what is in it, secrets too: only where it stopped is told.
fn decode(body: &[u8]) -> Result<PageRequest, Problem> {
    serde_json::from_slice(body).map_err(|error| {
        let what = match error.classify() {
            serde_json::error::Category::Data => "is not a request for a page",
            _ => "is not JSON",
        };
        let words = format!("the body {what} (line {}, column {})", error.line(), error.column());
        problem(ProblemKind::Invalid, words)
    })
}

/// A request that is attended to. One that is dropped before its end counts as cancelled.
struct Visit {
    metrics: Metrics,
    what: &'static str,
    begun: Instant,
    user: Option<String>,
    target: String,
    base: String,
    offset: u64,
    limit: u32,
    blocks: usize,
    ended: bool,
}

impl Visit {
    fn begin(metrics: &Metrics, what: &'static str) -> Self {
        Self {
            metrics: metrics.clone(),
            what,
            begun: Instant::now(),
            user: None,
            target: String::new(),
            base: String::new(),
            offset: 0,
            limit: 0,
            blocks: 0,
            ended: false,
        }
    }

    fn about(&mut self, asked: &PageRequest) {
        self.target = cut(&asked.target_snapshot_id, MAX_LOGGED);
        self.base = cut(&asked.base_snapshot_id, MAX_LOGGED);
        (self.offset, self.limit) = (asked.offset, asked.limit);
    }

    fn refused(&mut self, problem: &Problem) -> Response {
        self.end(problem::label(problem.kind), Some(problem));
        problem::answer(problem)
    }

    fn end(&mut self, outcome: &'static str, problem: Option<&Problem>) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let duration = self.begun.elapsed();
        self.metrics.ended(outcome, duration);
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
            ?duration,
        );
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.end("cancelled", None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_bearer_token_or_none() {
        let headers = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::AUTHORIZATION, value.parse().unwrap());
            }
            bearer(&headers).map(str::to_owned)
        };
        for good in ["Bearer a.b", "bearer a.b", "BEARER  a.b "] {
            assert_eq!(headers(&[good]).unwrap(), "a.b");
        }
        for bad in
            [&[][..], &["Bearer"], &["Bearer "], &["Basic a"], &["a.b"], &["Bearer a", "Bearer a"]]
        {
            assert_eq!(headers(bad).unwrap_err().kind, ProblemKind::Unauthenticated, "{bad:?}");
        }
    }

    #[test]
    fn a_body_that_is_none_is_refused_without_a_word_of_what_is_in_it() {
        let good = r#"{"driver":"d","targetSnapshotId":"t","limit":1,"secrets":{"k":"hunter2"}}"#;
        let asked = decode(good.as_bytes()).unwrap();
        assert_eq!((asked.offset, asked.base_snapshot_id.as_str()), (0, ""));
        let deep = "[".repeat(100_000);
        for bad in [
            "",
            "{",
            &deep,
            r#""hunter2""#,
            r#"{"secrets":"hunter2"}"#,
            r#"{"hunter2":1}"#,
            r#"{"driver":"hunter2","driver":"e","targetSnapshotId":"t","limit":1}"#,
            r#"{"driver":"d","targetSnapshotId":"t","limit":"hunter2"}"#,
            r#"{"driver":"d","targetSnapshotId":"t","limit":-1}"#,
            r#"{"driver":"d","targetSnapshotId":"t","limit":1,"offset":18446744073709551616}"#,
        ] {
            let refused = decode(bad.as_bytes()).unwrap_err();
            assert_eq!(refused.kind, ProblemKind::Invalid);
            assert!(!refused.message.contains("hunter2"), "{}", refused.message);
        }
    }
}
