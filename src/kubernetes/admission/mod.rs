//! Admission webhooks (AdmissionReview v1): decides about objects that are sent to the API server,
//! and refuses what it cannot decide. A refusal has a code and a message, which the API server
//! returns to the sender. An allowed object may be changed, and may get warnings.

mod request;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, post};
use axum::{Extension, Json};
use kube::Resource;
use kube::core::admission::{AdmissionResponse, META_API_VERSION_V1};
use kube::core::gvk::GroupVersionKind;
use kube::core::response::StatusSummary;
use kube::core::{DynamicObject, Status, admission::AdmissionReview};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;

pub use self::request::ReviewRequest;
use self::request::{Sender, head, request_for};
use super::client::Failure;
use super::https::Memory;
use common::text::{MAX_MESSAGE, truncate};
use telemetry::peer::Peer;

/// Maximum bytes of one warning, and of all warnings of an object: the API server truncates longer
/// ones.
const MAX_WARNING: usize = 240;
const MAX_WARNINGS: usize = 3072;

/// Maximum changes of an object, so that a response stays small.
const MAX_CHANGES: usize = 512;

/// The decision about an object.
pub type Verdict = Result<(), Refusal>;

/// An object that is allowed.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Allowed {
    /// Changes to the object, in order.
    pub changes: Vec<Set>,
    /// Warnings for the sender, one line each.
    pub warnings: Vec<String>,
}

impl From<()> for Allowed {
    fn from((): ()) -> Self {
        Self::default()
    }
}

/// One step of a JSON Patch (RFC 6902) that sets a field. The parent of the field must exist.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Set {
    op: &'static str,
    path: String,
    value: Value,
}

impl Set {
    /// `path` leads to the field and ends with its name.
    pub fn new<'a>(path: impl IntoIterator<Item = &'a str>, value: impl Into<Value>) -> Self {
        let escaped = |name: &str| format!("/{}", name.replace('~', "~0").replace('/', "~1"));
        let path = path.into_iter().map(escaped).collect();
        Self { op: "add", path, value: value.into() }
    }
}

/// The outcome of a review, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Allowed,
    /// Allowed, and changed.
    Changed,
    Refused,
    /// No decision was possible.
    Failed,
    /// The body was not a review.
    Malformed,
}

impl Outcome {
    fn of(verdict: &Result<Allowed, Refusal>) -> Self {
        match verdict {
            Ok(allowed) if allowed.changes.is_empty() => Self::Allowed,
            Ok(_) => Self::Changed,
            Err(refusal) if refusal.code.is_server_error() => Self::Failed,
            Err(_) => Self::Refused,
        }
    }
}

/// Observes outcome and duration of each review.
pub type Observer = Arc<dyn Fn(Outcome, Duration) + Send + Sync>;

/// Why an object is refused, for the sender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    code: StatusCode,
    message: String,
}

impl Refusal {
    /// The sender has no permission.
    pub fn not_allowed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, message)
    }

    /// The object is invalid for every sender.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, message)
    }

    /// No decision is possible until an administrator corrects something.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// No decision is possible now; a retry may help.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    /// No decision is possible, because a call to the API server failed that would return `what`.
    pub fn unknown(what: &str, failure: &Failure) -> Self {
        let message = format!("cannot determine {what}: {}", failure.message);
        match failure.lacks_permission {
            true => Self::failed(message),
            false => Self::unavailable(message),
        }
    }

    fn new(code: StatusCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// The code as an HTTP status.
    pub fn code(&self) -> u16 {
        self.code.as_u16()
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    /// The reason in the API server's own terms.
    fn reason(&self) -> &'static str {
        match self.code {
            StatusCode::FORBIDDEN => "Forbidden",
            StatusCode::UNPROCESSABLE_ENTITY => "Invalid",
            StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailable",
            _ => "InternalError",
        }
    }
}

/// A webhook at one path.
#[derive(Clone)]
pub struct Webhook {
    kinds: Arc<[GroupVersionKind]>,
    limit: Duration,
    observer: Option<Observer>,
}

impl Webhook {
    /// For objects of one kind. `limit` bounds a review; it must be shorter than the API server's
    /// timeout.
    pub fn of<K: Resource<DynamicType = ()>>(limit: Duration) -> Self {
        Self::of_kinds(
            &[GroupVersionKind::gvk(&K::group(&()), &K::version(&()), &K::kind(&()))],
            limit,
        )
    }

    pub fn of_kinds(kinds: &[GroupVersionKind], limit: Duration) -> Self {
        Self { kinds: kinds.into(), limit, observer: None }
    }

    pub fn observed_by(self, observer: Observer) -> Self {
        Self { observer: Some(observer), ..self }
    }

    /// The route that handles reviews with `handler`.
    pub fn route<K, A, H, F>(self, handler: H) -> MethodRouter
    where
        K: DeserializeOwned + Send + 'static,
        A: Into<Allowed>,
        H: Fn(ReviewRequest<K>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<A, Refusal>> + Send + 'static,
    {
        let route = async move |peer: Option<Extension<Peer>>,
                                memory: Option<Extension<Memory>>,
                                body: Bytes| {
            let started = Instant::now();
            let sender = Sender {
                peer: peer.map_or_else(Peer::unknown, |Extension(peer)| peer),
                memory: memory.map(|Extension(memory)| memory),
            };
            let (outcome, response) = match self.answer(&body, sender, handler).await {
                Ok((outcome, review)) => (outcome, Json(review).into_response()),
                Err(problem) => (Outcome::Malformed, no_review(problem)),
            };
            if let Some(observer) = &self.observer {
                observer(outcome, started.elapsed());
            }
            response
        };
        post(route)
    }

    /// # Errors
    /// The body is not a review, so it cannot be answered with one.
    async fn answer<K, A, H, F>(
        &self,
        body: &[u8],
        sender: Sender,
        handler: H,
    ) -> Result<(Outcome, AdmissionReview<DynamicObject>), String>
    where
        K: DeserializeOwned,
        A: Into<Allowed>,
        H: FnOnce(ReviewRequest<K>) -> F,
        F: Future<Output = Result<A, Refusal>>,
    {
        let (uid, kind) = head(body)?;
        let limit = self.limit;
        let verdict = match request_for::<K>(&self.kinds, kind, body, sender) {
            Ok(request) => timeout(limit, handler(request)).await.unwrap_or_else(|_| {
                let message = format!("the webhook did not decide within {limit:?}; retry later");
                Err(Refusal::unavailable(message))
            }),
            Err(refusal) => Err(refusal),
        };
        let verdict = verdict.map(Into::into).and_then(Allowed::checked);
        // The message may contain text of a client: do not log each refusal at the usual level.
        if let Err(Refusal { code, message }) = &verdict {
            match code.is_server_error() {
                true => tracing::warn!(uid, %code, message, "failed to review an object"),
                false => tracing::debug!(uid, %code, message, "refused an object"),
            }
        }
        let outcome = Outcome::of(&verdict);
        Ok((outcome, response(uid, verdict)?.into_review()))
    }
}

fn no_review(problem: String) -> Response {
    let text = format!("not an AdmissionReview of {META_API_VERSION_V1}: {problem}\n");
    (StatusCode::BAD_REQUEST, text).into_response()
}

impl Allowed {
    /// # Errors
    /// There are more changes than a response may hold.
    fn checked(self) -> Result<Self, Refusal> {
        match self.changes.len() {
            ..=MAX_CHANGES => Ok(self),
            count => Err(Refusal::invalid(format!(
                "spec: {count} fields must change, and the maximum is {MAX_CHANGES}; set them in the object, or use fewer volumes and mounts"
            ))),
        }
    }
}

fn response(uid: String, verdict: Result<Allowed, Refusal>) -> Result<AdmissionResponse, String> {
    // The only constructor that does not need the request, which may be unreadable.
    let mut response = AdmissionResponse::invalid("");
    response.uid = uid;
    response.allowed = verdict.is_ok();
    match verdict {
        Ok(allowed) => {
            response.result = Status::default();
            response.warnings = Some(warnings(allowed.warnings)).filter(|some| !some.is_empty());
            if !allowed.changes.is_empty() {
                let failed = |error: serde_json::Error| error.to_string();
                let patch = serde_json::to_value(allowed.changes).map_err(failed)?;
                let patch = serde_json::from_value(patch).map_err(failed)?;
                response = response.with_patch(patch).map_err(|error| error.to_string())?;
            }
        }
        Err(refusal) => {
            response.result = Status {
                status: Some(StatusSummary::Failure),
                code: refusal.code(),
                reason: refusal.reason().to_owned(),
                message: truncate(&refusal.message, MAX_MESSAGE),
                ..Status::default()
            };
        }
    }
    Ok(response)
}

/// Truncates the warnings as the API server would. They become HTTP headers, which cannot contain
/// control characters.
fn warnings(all: Vec<String>) -> Vec<String> {
    let (mut taken, mut bytes, total) = (Vec::new(), 0, all.len());
    for warning in all {
        let plain = warning.replace(char::is_control, " ");
        let warning = truncate(&plain, MAX_WARNING);
        bytes += warning.len();
        if bytes > MAX_WARNINGS {
            let more = total - taken.len();
            taken.push(format!("and {more} more"));
            break;
        }
        taken.push(warning);
    }
    taken
}

#[cfg(test)]
mod tests;
