//! Admission webhooks (AdmissionReview v1): an object on its way into the cluster is judged, and what cannot be judged is refused.
//! A refusal has a code and words, which the API server hands on to whoever sent the object.

use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, post};
use kube::core::admission::{AdmissionRequest, AdmissionResponse, META_API_VERSION_V1, META_KIND};
use kube::core::gvk::GroupVersionKind;
use kube::core::response::StatusSummary;
use kube::core::{DynamicObject, Status, admission::AdmissionReview};
use serde_json::Value;
use tokio::time::timeout;

use super::cache::Object;
use crate::grpc::{MAX_MESSAGE, cut};

/// What becomes of an object.
pub type Verdict = Result<(), Refusal>;

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
    post(move |body: Bytes| async move {
        match answer(&body, limit, judge).await {
            Ok(review) => Json(review).into_response(),
            Err(problem) => no_review(problem),
        }
    })
}

fn no_review(problem: String) -> Response {
    let told = format!("not an AdmissionReview of {META_API_VERSION_V1}: {problem}\n");
    (StatusCode::BAD_REQUEST, told).into_response()
}

/// # Errors
/// It is no review that could be answered; why.
async fn answer<K, J, F>(
    body: &[u8],
    limit: Duration,
    judge: J,
) -> Result<AdmissionReview<DynamicObject>, String>
where
    K: Object,
    J: FnOnce(AdmissionRequest<K>) -> F,
    F: Future<Output = Verdict>,
{
    let (uid, request) = asked(body)?;
    let verdict = match request_for::<K>(request) {
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
    Ok(answered(uid, verdict).into_review())
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

/// The request as one for objects of this kind.
fn request_for<K: Object>(request: Value) -> Result<AdmissionRequest<K>, Refusal> {
    let kind = GroupVersionKind::gvk(&K::group(&()), &K::version(&()), &K::kind(&()));
    let asked: Option<GroupVersionKind> = serde_json::from_value(request["kind"].clone()).ok();
    if asked.as_ref() != Some(&kind) {
        return Err(Refusal::failed(format!(
            "this webhook judges {} of {} only; mend the rules of its webhook configuration",
            kind.kind,
            kind.api_version()
        )));
    }
    serde_json::from_value(request)
        .map_err(|error| Refusal::invalid(format!("not a request for a {}: {error}", kind.kind)))
}

fn answered(uid: String, verdict: Verdict) -> AdmissionResponse {
    // It has no other way to be made without the request, which may be unreadable.
    let mut response = AdmissionResponse::invalid("");
    response.uid = uid;
    response.allowed = verdict.is_ok();
    response.result = match verdict {
        Ok(()) => Status::default(),
        Err(refusal) => Status {
            status: Some(StatusSummary::Failure),
            code: refusal.code(),
            reason: refusal.reason().to_owned(),
            message: cut(&refusal.message, MAX_MESSAGE),
            ..Status::default()
        },
    };
    response
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
        let judge = async |_: AdmissionRequest<SnapshotSessionRequest>| verdict;
        let answer = answer(review.to_string().as_bytes(), SOON, judge).await?;
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
        let judge =
            async |_: AdmissionRequest<SnapshotSessionRequest>| std::future::pending().await;
        let answer = answer(review().to_string().as_bytes(), SOON, judge).await.unwrap();
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
            let judge = async |_: AdmissionRequest<SnapshotSessionRequest>| Ok(());
            let error = answer(body.as_bytes(), SOON, judge).await.unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
