use serde::Deserialize;
use serde_json::json;

use super::*;
use crate::bounded::{self, List};
use crate::session::SnapshotSessionRequest;

const SOON: Duration = Duration::from_millis(50);

/// An object as a webhook reads it.
#[derive(Debug, Deserialize)]
struct Requested {
    spec: RequestedSpec,
}

#[derive(Debug, Deserialize)]
struct RequestedSpec {
    snapshots: List<String>,
}

fn sender() -> Sender {
    Sender { peer: Peer::unknown(), memory: None }
}

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
    let handler = async |_: ReviewRequest<Requested>| verdict;
    let (_, answer) = webhook.answer(review.to_string().as_bytes(), sender(), handler).await?;
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
    let handler = async |_: ReviewRequest<Requested>| std::future::pending::<Verdict>().await;
    let (outcome, answer) =
        webhook().answer(review().to_string().as_bytes(), sender(), handler).await.unwrap();
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
        (deep, "apiVersion"),
        ("[1]".into(), "apiVersion"),
        ("null".into(), "apiVersion"),
        (with("apiVersion", "admission.k8s.io/v1beta1".into()), "apiVersion"),
        (with("kind", "Pod".into()), "kind"),
        (with("request", Value::Null), "uid"),
        (with("request", json!({ "uid": "" })), "uid"),
        (with("request", json!({ "uid": 7 })), "uid"),
    ] {
        let handler = async |_: ReviewRequest<Requested>| Verdict::Ok(());
        let error = webhook().answer(body.as_bytes(), sender(), handler).await.unwrap_err();
        assert!(error.contains(words), "{error}");
    }
}

#[tokio::test]
async fn an_allowed_object_may_get_changes_and_warnings() {
    let changes =
        vec![Set::new(["metadata", "annotations", "a/b~c"], "x"), Set::new(["spec", "on"], true)];
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

#[tokio::test]
async fn a_request_with_too_many_elements_names_the_field() {
    let names = |count: usize| vec!["a"; count];
    let handler = async |request: ReviewRequest<Requested>| {
        assert_eq!(request.object.unwrap().spec.snapshots.len(), bounded::MAX_ELEMENTS - 1);
        Verdict::Ok(())
    };
    let answer = async |review: &Value| {
        let answer = webhook().answer(review.to_string().as_bytes(), sender(), handler).await;
        answer.unwrap().1.response.unwrap()
    };
    let mut review = review();
    review["request"]["userInfo"]["groups"] = json!(["g"]);
    review["request"]["object"]["spec"]["snapshots"] = json!(names(bounded::MAX_ELEMENTS - 1));
    // Fields that are not read have no limit.
    review["request"]["object"]["metadata"]["finalizers"] = json!(names(100_000));
    let deep = "[".repeat(10_000) + &"]".repeat(10_000);
    review["request"]["options"] = json!({ "deep": "@" });
    let text = review.to_string().replace("\"@\"", &deep);
    let taken = webhook().answer(text.as_bytes(), sender(), handler).await.unwrap();
    assert!(taken.1.response.unwrap().allowed);
    review["request"]["object"]["spec"]["snapshots"] = json!(names(bounded::MAX_ELEMENTS + 1));
    let refused = answer(&review).await;
    assert!(!refused.allowed && refused.result.code == 422);
    let message = refused.result.message;
    assert!(message.contains("request.object.spec.snapshots: the object has more"), "{message}");
}

#[tokio::test]
async fn an_object_with_too_many_changes_is_refused() {
    let changes = |count| (0..count).map(|_| Set::new(["spec", "on"], true)).collect();
    for (count, allowed) in [(MAX_CHANGES, true), (MAX_CHANGES + 1, false)] {
        let verdict = Ok(Allowed { changes: changes(count), warnings: Vec::new() });
        let answer = answered_by(&webhook(), &review(), verdict).await.unwrap();
        assert_eq!(answer["response"]["allowed"], allowed);
    }
}
