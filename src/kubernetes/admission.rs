//! Admission webhooks (AdmissionReview v1): decides about objects that are sent to the API server,
//! and refuses what it cannot decide. A refusal has a code and a message, which the API server
//! returns to the sender. An allowed object may be changed, and may get warnings.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, post};
use kube::Resource;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, META_API_VERSION_V1, META_KIND};
use kube::core::gvk::GroupVersionKind;
use kube::core::response::StatusSummary;
use kube::core::{DynamicObject, Status, admission::AdmissionReview};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;

use super::cache::Object;
use super::client::Failure;
use crate::grpc::{MAX_MESSAGE, truncate};

/// Maximum bytes of one warning, and of all warnings of an object: the API server truncates longer
/// ones.
const MAX_WARNING: usize = 240;
const MAX_WARNINGS: usize = 3072;

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

/// A webhook for objects of one kind. `limit` bounds a review; it must be shorter than the API
/// server's timeout.
pub fn validating<K, H, F>(limit: Duration, handler: H) -> MethodRouter
where
    K: Object,
    H: Fn(AdmissionRequest<K>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Verdict> + Send + 'static,
{
    Webhook::of::<K>(limit).route(handler)
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
    pub fn of<K: Object>(limit: Duration) -> Self {
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
        K: Resource + DeserializeOwned + Send + 'static,
        A: Into<Allowed>,
        H: Fn(AdmissionRequest<K>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<A, Refusal>> + Send + 'static,
    {
        post(move |body: Bytes| async move {
            let started = Instant::now();
            let (outcome, response) = match self.answer(&body, handler).await {
                Ok((outcome, review)) => (outcome, Json(review).into_response()),
                Err(problem) => (Outcome::Malformed, no_review(problem)),
            };
            if let Some(observer) = &self.observer {
                observer(outcome, started.elapsed());
            }
            response
        })
    }

    /// # Errors
    /// The body is not a review that can be response.
    async fn answer<K, A, H, F>(
        &self,
        body: &[u8],
        handler: H,
    ) -> Result<(Outcome, AdmissionReview<DynamicObject>), String>
    where
        K: Resource + DeserializeOwned,
        A: Into<Allowed>,
        H: FnOnce(AdmissionRequest<K>) -> F,
        F: Future<Output = Result<A, Refusal>>,
    {
        let (uid, request) = parse(body)?;
        let limit = self.limit;
        let verdict = match request_for::<K>(&self.kinds, request) {
            Ok(request) => timeout(limit, handler(request)).await.unwrap_or_else(|_| {
                let message = format!("the webhook did not decide within {limit:?}; retry later");
                Err(Refusal::unavailable(message))
            }),
            Err(refusal) => Err(refusal),
        };
        // The message may contain text of a client: do not log each refusal at the usual level.
        if let Err(Refusal { code, message }) = &verdict {
            match code.is_server_error() {
                true => tracing::warn!(uid, %code, message, "failed to review an object"),
                false => tracing::debug!(uid, %code, message, "refused an object"),
            }
        }
        let verdict = verdict.map(Into::into);
        let outcome = Outcome::of(&verdict);
        Ok((outcome, response(uid, verdict)?.into_review()))
    }
}

fn no_review(problem: String) -> Response {
    let text = format!("not an AdmissionReview of {META_API_VERSION_V1}: {problem}\n");
    (StatusCode::BAD_REQUEST, text).into_response()
}

/// Returns the request's uid, and the request, still undecoded.
fn parse(body: &[u8]) -> Result<(String, Value), String> {
    // The error reports the position, but no content.
    let mut review: Value = serde_json::from_slice(body)
        .map_err(|error| format!("not JSON in line {}, column {}", error.line(), error.column()))?;
    for (field, expected) in [("apiVersion", META_API_VERSION_V1), ("kind", META_KIND)] {
        if review[field] != expected {
            return Err(format!("{field} is not {expected}"));
        }
    }
    let request = review["request"].take();
    match request["uid"].as_str() {
        Some(uid) if !uid.is_empty() => Ok((uid.to_owned(), request)),
        _ => Err("request.uid is missing".into()),
    }
}

/// Decodes a request for objects of one of these kinds.
fn request_for<K: Resource + DeserializeOwned>(
    kinds: &[GroupVersionKind],
    request: Value,
) -> Result<AdmissionRequest<K>, Refusal> {
    let requested: Option<GroupVersionKind> = serde_json::from_value(request["kind"].clone()).ok();
    let Some(kind) = requested.filter(|kind| kinds.contains(kind)) else {
        let title = |kind: &GroupVersionKind| format!("{} of {}", kind.kind, kind.api_version());
        let titles: Vec<_> = kinds.iter().map(title).collect();
        return Err(Refusal::failed(format!(
            "this webhook reviews only {}; correct the rules of its webhook configuration",
            titles.join(", ")
        )));
    };
    serde_json::from_value(request)
        .map_err(|error| Refusal::invalid(format!("invalid request for a {}: {error}", kind.kind)))
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
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kubernetes::session::SnapshotSessionRequest;

    const SOON: Duration = Duration::from_millis(50);

    fn review() -> Value {
        json!({
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {
                "uid": "u-1",
                "kind": { "group": "cbt.storage.k8s.io", "version": "v1alpha2", "kind": "SnapshotSessionRequest" },
                "resource": {
                    "group": "cbt.storage.k8s.io", "version": "v1alpha2", "resource": "snapshotsessionrequests",
                },
                "name": "r", "namespace": "n", "operation": "CREATE",
                "userInfo": { "username": "alice" },
                "object": {
                    "apiVersion": "cbt.storage.k8s.io/v1alpha2", "kind": "SnapshotSessionRequest",
                    "metadata": { "name": "r" }, "spec": { "snapshots": ["a"] },
                },
                "oldObject": null, "dryRun": false,
            },
        })
    }

    async fn reviewed(review: &Value, verdict: Verdict) -> Result<Value, String> {
        answered_by(&webhook(), review, verdict).await
    }

    fn webhook() -> Webhook {
        Webhook::of::<SnapshotSessionRequest>(SOON)
    }

    async fn answered_by<A: Into<Allowed>>(
        webhook: &Webhook,
        review: &Value,
        verdict: Result<A, Refusal>,
    ) -> Result<Value, String> {
        let handler = async |_: AdmissionRequest<SnapshotSessionRequest>| verdict;
        let (_, answer) = webhook.answer(review.to_string().as_bytes(), handler).await?;
        Ok(serde_json::to_value(answer).unwrap())
    }

    #[tokio::test]
    async fn a_response_has_the_uid_and_the_decision() {
        let answer = reviewed(&review(), Ok(())).await.unwrap();
        assert_eq!(answer["apiVersion"], "admission.k8s.io/v1");
        assert_eq!(answer["kind"], "AdmissionReview");
        assert_eq!(answer["response"]["uid"], "u-1");
        assert_eq!(answer["response"]["allowed"], true);
        let answer = reviewed(&review(), Err(Refusal::not_allowed("no"))).await.unwrap();
        let response = &answer["response"];
        assert_eq!((&response["uid"], &response["allowed"]), (&json!("u-1"), &json!(false)));
        assert_eq!(response["status"]["code"], 403);
        assert_eq!(response["status"]["reason"], "Forbidden");
        assert_eq!(response["status"]["message"], "no");
    }

    #[tokio::test]
    async fn an_undecidable_request_is_refused() {
        let mut other = review();
        other["request"]["kind"]["kind"] = "Pod".into();
        let mut unreadable = review();
        unreadable["request"]["object"]["spec"] = json!({ "snapshots": 1 });
        let mut no_user = review();
        no_user["request"]["userInfo"] = Value::Null;
        let mut unknown = review();
        unknown["request"]["operation"] = "BLESS".into();
        for (review, code, words) in [
            (other, 500, "reviews only SnapshotSessionRequest"),
            (unreadable, 422, "invalid request for a SnapshotSessionRequest"),
            (no_user, 422, "invalid request"),
            (unknown, 422, "BLESS"),
        ] {
            let answer = reviewed(&review, Ok(())).await.unwrap();
            let response = &answer["response"];
            assert_eq!(response["allowed"], false, "{answer}");
            assert_eq!(response["status"]["code"], code, "{answer}");
            assert!(response["status"]["message"].as_str().unwrap().contains(words), "{answer}");
        }
    }

    #[tokio::test]
    async fn a_slow_review_times_out() {
        let handler = async |_: AdmissionRequest<SnapshotSessionRequest>| {
            std::future::pending::<Verdict>().await
        };
        let (outcome, answer) =
            webhook().answer(review().to_string().as_bytes(), handler).await.unwrap();
        assert_eq!(outcome, Outcome::Failed);
        let response = answer.response.unwrap();
        assert!(!response.allowed);
        assert_eq!(response.result.code, 503);
    }

    #[tokio::test]
    async fn a_malformed_review_is_an_error() {
        let with = |field: &str, value: Value| {
            let mut review = review();
            review[field] = value;
            review.to_string()
        };
        let deep = "[".repeat(100_000);
        for (body, words) in [
            (String::new(), "not JSON"),
            ("nonsense".into(), "not JSON"),
            (deep, "not JSON"),
            ("[1]".into(), "apiVersion"),
            ("null".into(), "apiVersion"),
            (with("apiVersion", "admission.k8s.io/v1beta1".into()), "apiVersion"),
            (with("kind", "Pod".into()), "kind"),
            (with("request", Value::Null), "uid"),
            (with("request", json!({ "uid": "" })), "uid"),
            (with("request", json!({ "uid": 7 })), "uid"),
        ] {
            let handler = async |_: AdmissionRequest<SnapshotSessionRequest>| Verdict::Ok(());
            let error = webhook().answer(body.as_bytes(), handler).await.unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    #[tokio::test]
    async fn an_allowed_object_may_get_changes_and_warnings() {
        let changes = vec![
            Set::new(["metadata", "annotations", "a/b~c"], "x"),
            Set::new(["spec", "on"], true),
        ];
        let allowed = Allowed { changes, warnings: vec!["mind\nthe gap".into()] };
        let answer = answered_by(&webhook(), &review(), Ok(allowed)).await.unwrap();
        let response = &answer["response"];
        assert_eq!(response["allowed"], true);
        assert_eq!(response["patchType"], "JSONPatch");
        let patch: Vec<u8> = serde_json::from_value(response["patch"].clone()).unwrap();
        let patch: Value = serde_json::from_slice(&patch).unwrap();
        let expected = json!([
            { "op": "add", "path": "/metadata/annotations/a~1b~0c", "value": "x" },
            { "op": "add", "path": "/spec/on", "value": true },
        ]);
        assert_eq!(patch, expected);
        assert_eq!(response["warnings"], json!(["mind the gap"]));
        let answer = answered_by(&webhook(), &review(), Ok(())).await.unwrap();
        assert!(answer["response"]["patch"].is_null() && answer["response"]["warnings"].is_null());
    }

    #[tokio::test]
    async fn warnings_stay_within_the_api_servers_limits() {
        let warnings = (0..100).map(|_| "w".repeat(1000)).collect();
        let allowed = Allowed { warnings, ..Allowed::default() };
        let answer = answered_by(&webhook(), &review(), Ok(allowed)).await.unwrap();
        let returned: Vec<String> =
            serde_json::from_value(answer["response"]["warnings"].clone()).unwrap();
        assert!(returned.iter().all(|one| one.len() <= 256), "{returned:?}");
        assert!(returned.iter().map(String::len).sum::<usize>() <= 4096, "{returned:?}");
        let last = returned.last().unwrap();
        assert_eq!(*last, format!("and {} more", 100 - (returned.len() - 1)));
    }
}
