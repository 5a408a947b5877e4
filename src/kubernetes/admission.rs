//! Admission webhooks (AdmissionReview v1): an object on its way into the cluster is judged, and what cannot be judged is refused.
//! A refusal has a code and words, which the API server hands on to whoever sent the object. What is let pass may be changed on
//! its way, and warned of.

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
use crate::grpc::{MAX_MESSAGE, cut};

/// Bytes of one warning and of all of an object: the API server cuts what is longer.
const MAX_WARNING: usize = 240;
const MAX_WARNINGS: usize = 3072;

/// What becomes of an object.
pub type Verdict = Result<(), Refusal>;

/// An object that is let pass.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Allowed {
    /// In order.
    pub changes: Vec<Set>,
    /// For whoever sent it, a line each.
    pub warnings: Vec<String>,
}

impl From<()> for Allowed {
    fn from((): ()) -> Self {
        Self::default()
    }
}

/// One step of a JSON Patch (RFC 6902): a field gets a value, whether it had one or not. What holds the field has to be there.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Set {
    op: &'static str,
    path: String,
    value: Value,
}

impl Set {
    /// The field's name is the last of `path`.
    pub fn new<'a>(path: impl IntoIterator<Item = &'a str>, value: impl Into<Value>) -> Self {
        let escaped = |name: &str| format!("/{}", name.replace('~', "~0").replace('/', "~1"));
        let path = path.into_iter().map(escaped).collect();
        Self { op: "add", path, value: value.into() }
    }
}

/// What became of a review, for whoever counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Allowed,
    /// Let pass, and changed.
    Changed,
    Refused,
    /// It could not be judged.
    Failed,
    /// It was no review.
    Nonsense,
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

/// Who is told what became of each review, and how long that took.
pub type Count = Arc<dyn Fn(Outcome, Duration) + Send + Sync>;

/// Why an object is not taken: for whoever sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    code: StatusCode,
    message: String,
}

impl Refusal {
    /// Who sent it may not.
    pub fn not_allowed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, message)
    }

    /// It can be sent by nobody.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, message)
    }

    /// It cannot be judged until somebody has mended something.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// It cannot be judged now.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    /// It cannot be judged, since a call to the API server failed; `what` is not known without it.
    pub fn unknown(what: &str, failure: &Failure) -> Self {
        let message = format!("{what} is not known: {}", failure.message);
        match failure.is_own_right {
            true => Self::failed(message),
            false => Self::unavailable(message),
        }
    }

    fn new(code: StatusCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// As an HTTP status.
    pub fn code(&self) -> u16 {
        self.code.as_u16()
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    /// As the API server names its own refusals.
    fn reason(&self) -> &'static str {
        match self.code {
            StatusCode::FORBIDDEN => "Forbidden",
            StatusCode::UNPROCESSABLE_ENTITY => "Invalid",
            StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailable",
            _ => "InternalError",
        }
    }
}

/// A webhook that judges objects of one kind, each within `limit`, which is to be less than the API server waits.
pub fn validating<K, J, F>(limit: Duration, judge: J) -> MethodRouter
where
    K: Object,
    J: Fn(AdmissionRequest<K>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Verdict> + Send + 'static,
{
    Webhook::of::<K>(limit).route(judge)
}

/// How objects are judged at one path.
#[derive(Clone)]
pub struct Webhook {
    kinds: Arc<[GroupVersionKind]>,
    limit: Duration,
    count: Option<Count>,
}

impl Webhook {
    /// Of objects of this kind, each within `limit`, which is to be less than the API server waits.
    pub fn of<K: Object>(limit: Duration) -> Self {
        Self::of_kinds(
            &[GroupVersionKind::gvk(&K::group(&()), &K::version(&()), &K::kind(&()))],
            limit,
        )
    }

    pub fn of_kinds(kinds: &[GroupVersionKind], limit: Duration) -> Self {
        Self { kinds: kinds.into(), limit, count: None }
    }

    pub fn counted(self, count: Count) -> Self {
        Self { count: Some(count), ..self }
    }

    /// Judges what is posted there.
    pub fn route<K, A, J, F>(self, judge: J) -> MethodRouter
    where
        K: Resource + DeserializeOwned + Send + 'static,
        A: Into<Allowed>,
        J: Fn(AdmissionRequest<K>) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<A, Refusal>> + Send + 'static,
    {
        post(move |body: Bytes| async move {
            let started = Instant::now();
            let (outcome, response) = match self.answer(&body, judge).await {
                Ok((outcome, review)) => (outcome, Json(review).into_response()),
                Err(problem) => (Outcome::Nonsense, no_review(problem)),
            };
            if let Some(count) = &self.count {
                count(outcome, started.elapsed());
            }
            response
        })
    }

    /// # Errors
    /// It is no review that could be answered; why.
    async fn answer<K, A, J, F>(
        &self,
        body: &[u8],
        judge: J,
    ) -> Result<(Outcome, AdmissionReview<DynamicObject>), String>
    where
        K: Resource + DeserializeOwned,
        A: Into<Allowed>,
        J: FnOnce(AdmissionRequest<K>) -> F,
        F: Future<Output = Result<A, Refusal>>,
    {
        let (uid, request) = asked(body)?;
        let limit = self.limit;
        let verdict = match request_for::<K>(&self.kinds, request) {
            Ok(request) => timeout(limit, judge(request)).await.unwrap_or_else(|_| {
                let message = format!("could not be judged within {limit:?}; try again");
                Err(Refusal::unavailable(message))
            }),
            Err(refusal) => Err(refusal),
        };
        // What it says may hold what a client sent: no line for each at the usual level.
        if let Err(Refusal { code, message }) = &verdict {
            match code.is_server_error() {
                true => tracing::warn!(uid, %code, message, "an object could not be judged"),
                false => tracing::debug!(uid, %code, message, "an object was refused"),
            }
        }
        let verdict = verdict.map(Into::into);
        let outcome = Outcome::of(&verdict);
        Ok((outcome, answered(uid, verdict)?.into_review()))
    }
}

fn no_review(problem: String) -> Response {
    let told = format!("not an AdmissionReview of {META_API_VERSION_V1}: {problem}\n");
    (StatusCode::BAD_REQUEST, told).into_response()
}

/// The request's uid, and the request, of which nothing else is known yet.
fn asked(body: &[u8]) -> Result<(String, Value), String> {
    // Where it ended or went wrong is told; what it holds is not.
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

/// The request as one for objects of one of these kinds.
fn request_for<K: Resource + DeserializeOwned>(
    kinds: &[GroupVersionKind],
    request: Value,
) -> Result<AdmissionRequest<K>, Refusal> {
    let asked: Option<GroupVersionKind> = serde_json::from_value(request["kind"].clone()).ok();
    let Some(kind) = asked.filter(|kind| kinds.contains(kind)) else {
        let judged = |kind: &GroupVersionKind| format!("{} of {}", kind.kind, kind.api_version());
        let judged: Vec<_> = kinds.iter().map(judged).collect();
        return Err(Refusal::failed(format!(
            "this webhook judges {} only; mend the rules of its webhook configuration",
            judged.join(", ")
        )));
    };
    serde_json::from_value(request)
        .map_err(|error| Refusal::invalid(format!("not a request for a {}: {error}", kind.kind)))
}

fn answered(uid: String, verdict: Result<Allowed, Refusal>) -> Result<AdmissionResponse, String> {
    // It has no other way to be made without the request, which may be unreadable.
    let mut response = AdmissionResponse::invalid("");
    response.uid = uid;
    response.allowed = verdict.is_ok();
    match verdict {
        Ok(allowed) => {
            response.result = Status::default();
            response.warnings = Some(warnings(allowed.warnings)).filter(|some| !some.is_empty());
            if !allowed.changes.is_empty() {
                let unsaid = |error: serde_json::Error| error.to_string();
                let patch = serde_json::to_value(allowed.changes).map_err(unsaid)?;
                let patch = serde_json::from_value(patch).map_err(unsaid)?;
                response = response.with_patch(patch).map_err(|error| error.to_string())?;
            }
        }
        Err(refusal) => {
            response.result = Status {
                status: Some(StatusSummary::Failure),
                code: refusal.code(),
                reason: refusal.reason().to_owned(),
                message: cut(&refusal.message, MAX_MESSAGE),
                ..Status::default()
            };
        }
    }
    Ok(response)
}

/// As many as the API server hands on, in a form in which it does. They become a header's text, which has no control characters.
fn warnings(all: Vec<String>) -> Vec<String> {
    let (mut taken, mut bytes, total) = (Vec::new(), 0, all.len());
    for warning in all {
        let plain = warning.replace(char::is_control, " ");
        let warning = cut(&plain, MAX_WARNING);
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

    async fn judged(review: &Value, verdict: Verdict) -> Result<Value, String> {
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
        let judge = async |_: AdmissionRequest<SnapshotSessionRequest>| verdict;
        let (_, answer) = webhook.answer(review.to_string().as_bytes(), judge).await?;
        Ok(serde_json::to_value(answer).unwrap())
    }

    #[tokio::test]
    async fn an_answer_has_the_requests_uid_and_the_verdict() {
        let answer = judged(&review(), Ok(())).await.unwrap();
        assert_eq!(answer["apiVersion"], "admission.k8s.io/v1");
        assert_eq!(answer["kind"], "AdmissionReview");
        assert_eq!(answer["response"]["uid"], "u-1");
        assert_eq!(answer["response"]["allowed"], true);
        let answer = judged(&review(), Err(Refusal::not_allowed("no"))).await.unwrap();
        let response = &answer["response"];
        assert_eq!((&response["uid"], &response["allowed"]), (&json!("u-1"), &json!(false)));
        assert_eq!(response["status"]["code"], 403);
        assert_eq!(response["status"]["reason"], "Forbidden");
        assert_eq!(response["status"]["message"], "no");
    }

    #[tokio::test]
    async fn what_cannot_be_judged_is_refused() {
        let mut other = review();
        other["request"]["kind"]["kind"] = "Pod".into();
        let mut unreadable = review();
        unreadable["request"]["object"]["spec"] = json!({ "snapshots": 1 });
        let mut nobody = review();
        nobody["request"]["userInfo"] = Value::Null;
        let mut unknown = review();
        unknown["request"]["operation"] = "BLESS".into();
        for (review, code, words) in [
            (other, 500, "judges SnapshotSessionRequest"),
            (unreadable, 422, "not a request for a SnapshotSessionRequest"),
            (nobody, 422, "not a request"),
            (unknown, 422, "BLESS"),
        ] {
            let answer = judged(&review, Ok(())).await.unwrap();
            let response = &answer["response"];
            assert_eq!(response["allowed"], false, "{answer}");
            assert_eq!(response["status"]["code"], code, "{answer}");
            assert!(response["status"]["message"].as_str().unwrap().contains(words), "{answer}");
        }
    }

    #[tokio::test]
    async fn a_judge_who_takes_too_long_is_not_waited_for() {
        let judge = async |_: AdmissionRequest<SnapshotSessionRequest>| {
            std::future::pending::<Verdict>().await
        };
        let (outcome, answer) =
            webhook().answer(review().to_string().as_bytes(), judge).await.unwrap();
        assert_eq!(outcome, Outcome::Failed);
        let response = answer.response.unwrap();
        assert!(!response.allowed);
        assert_eq!(response.result.code, 503);
    }

    #[tokio::test]
    async fn what_is_no_review_is_told_so() {
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
            let judge = async |_: AdmissionRequest<SnapshotSessionRequest>| Verdict::Ok(());
            let error = webhook().answer(body.as_bytes(), judge).await.unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    #[tokio::test]
    async fn an_object_that_passes_may_be_changed_and_warned_of() {
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
    async fn warnings_are_no_more_than_the_api_server_hands_on() {
        let warnings = (0..100).map(|_| "w".repeat(1000)).collect();
        let allowed = Allowed { warnings, ..Allowed::default() };
        let answer = answered_by(&webhook(), &review(), Ok(allowed)).await.unwrap();
        let told: Vec<String> =
            serde_json::from_value(answer["response"]["warnings"].clone()).unwrap();
        assert!(told.iter().all(|one| one.len() <= 256), "{told:?}");
        assert!(told.iter().map(String::len).sum::<usize>() <= 4096, "{told:?}");
        let last = told.last().unwrap();
        assert_eq!(*last, format!("and {} more", 100 - (told.len() - 1)));
    }
}
