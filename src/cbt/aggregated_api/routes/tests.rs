use axum::body::{Body, to_bytes};
use serde_json::{Value, json};
use tower::ServiceExt;

use super::*;
use kubernetes::snapshot_delta::{API_VERSION, KIND, VolumeSnapshotDeltaStatus};

const PATH: &str = "/apis/cbt.storage.k8s.io/v1alpha1/namespaces/apps/volumesnapshotdeltas";

/// Returns the user's name as the error, or fails if the target is "missing".
#[derive(Clone)]
struct Echo;

impl DeltaService for Echo {
    async fn create(
        &self,
        user: &UserInfo,
        namespace: &str,
        mut request: VolumeSnapshotDelta,
    ) -> Result<VolumeSnapshotDelta, Failure> {
        if request.spec.target_volume_snapshot_name == "missing" {
            let failure = Failure::new(Cause::SnapshotMissing, "no such VolumeSnapshot");
            return Err(failure.of("snapshot.storage.k8s.io", "volumesnapshots", "missing"));
        }
        let error = format!("{} in {namespace}", user.username.as_deref().unwrap_or_default());
        request.status = Some(VolumeSnapshotDeltaStatus { error, ..Default::default() });
        Ok(request)
    }
}

/// Accepts any user in a header.
#[derive(Clone)]
struct HeaderAuthenticator(bool);

impl Authenticator for HeaderAuthenticator {
    fn authenticate(&self, _: &ClientChain, headers: &HeaderMap) -> Result<UserInfo, Failure> {
        let user = headers.get("x-user").and_then(|user| user.to_str().ok());
        let user = user.ok_or_else(|| Failure::new(Cause::Unauthenticated, "Unauthorized"))?;
        Ok(UserInfo { username: Some(user.to_owned()), ..UserInfo::default() })
    }

    fn is_known(&self) -> bool {
        self.0
    }
}

struct Answer {
    code: u16,
    headers: HeaderMap,
    body: Value,
}

async fn send(known: bool, request: axum::http::request::Builder, body: &str) -> Answer {
    let (_phase, shutdown) = Shutdown::manual();
    let routes = routes(Echo, HeaderAuthenticator(known), Metrics::new(|_| {}).0, shutdown);
    let request = request.body(Body::from(body.to_owned())).unwrap();
    let response = routes.oneshot(request).await.unwrap();
    let (code, headers) = (response.status().as_u16(), response.headers().clone());
    let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
    let text = String::from_utf8(body.to_vec()).unwrap();
    Answer { code, headers, body: serde_json::from_str(&text).unwrap_or(Value::String(text)) }
}

fn request(method: &str, path: &str) -> axum::http::request::Builder {
    axum::http::Request::builder().method(method).uri(path).header("x-user", "alice")
}

async fn call(method: &str, path: &str) -> Answer {
    send(true, request(method, path), "").await
}

fn object(target: &str, more: &Value) -> String {
    let mut spec = json!({ "targetVolumeSnapshotName": target });
    spec.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
    json!({ "apiVersion": API_VERSION, "kind": KIND, "metadata": { "name": "d" }, "spec": spec })
        .to_string()
}

fn post_of(query: &str) -> axum::http::request::Builder {
    request("POST", &format!("{PATH}{query}")).header(header::CONTENT_TYPE, "application/json")
}

#[tokio::test]
async fn a_created_object_is_returned_with_its_status() {
    let answer = send(true, post_of(""), &object("b", &json!({ "odd\"": 1 }))).await;
    assert_eq!(answer.code, 201);
    assert_eq!(answer.body["status"]["error"], "alice in apps");
    assert_eq!(answer.body["metadata"], json!({ "name": "d", "namespace": "apps" }));
    let warning = answer.headers[header::WARNING].to_str().unwrap();
    assert!(warning.starts_with("299 - \"unknown field \\\"spec.odd"), "{warning}");
    let strict = post_of("?fieldValidation=Strict");
    assert_eq!(send(true, strict, &object("b", &json!({ "odd": 1 }))).await.code, 400);
}

#[tokio::test]
async fn a_failure_is_a_status_that_names_the_object() {
    let answer = send(true, post_of(""), &object("missing", &json!({}))).await;
    assert_eq!((answer.code, &answer.body["kind"]), (404, &json!("Status")));
    let details =
        json!({ "group": "snapshot.storage.k8s.io", "kind": "volumesnapshots", "name": "missing" });
    assert_eq!(answer.body["details"], details);
}

#[tokio::test]
async fn an_unsupported_form_is_refused_unless_json_is_accepted() {
    let accept = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
    let table = post_of("").header(header::ACCEPT, accept);
    let answer = send(true, table, &object("b", &json!({}))).await;
    assert_eq!((answer.code, &answer.body["kind"]), (201, &json!("VolumeSnapshotDelta")));
    let partial = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io";
    let refused = post_of("").header(header::ACCEPT, partial);
    assert_eq!(send(true, refused, &object("b", &json!({}))).await.code, 406);
}

#[tokio::test]
async fn any_other_verb_is_405_with_a_status() {
    let one = format!("{PATH}/d");
    let all = "/apis/cbt.storage.k8s.io/v1alpha1/volumesnapshotdeltas";
    let watch = format!("{PATH}?watch=true");
    for (method, path) in [
        ("GET", PATH),
        ("GET", watch.as_str()),
        ("DELETE", PATH),
        ("PUT", PATH),
        ("GET", one.as_str()),
        ("PATCH", &one),
        ("PUT", &one),
        ("DELETE", &one),
        ("POST", &one),
        ("GET", all),
        ("POST", all),
    ] {
        let answer = call(method, path).await;
        assert_eq!(answer.code, 405, "{method} {path}");
        assert_eq!(answer.headers[header::ALLOW], "POST", "{method} {path}");
        assert_eq!(answer.body["reason"], "MethodNotAllowed", "{method} {path}");
        let message = answer.body["message"].as_str().unwrap();
        assert!(message.contains("can only be created"), "{method} {path}: {message}");
    }
    let answer = call("DELETE", "/apis").await;
    assert_eq!((answer.code, &answer.body["kind"]), (405, &json!("Status")));
}

#[tokio::test]
async fn an_unknown_path_is_404_with_a_status() {
    for path in [
        "/",
        "/api",
        "/metrics",
        "/apis/cbt.storage.k8s.io/v1alpha2",
        "/apis/cbt.storage.k8s.io/v1alpha1/nodes",
        "/apis/cbt.storage.k8s.io/v1alpha1/namespaces/apps/volumesnapshotdeltas/d/status",
    ] {
        let answer = call("GET", path).await;
        assert_eq!((answer.code, &answer.body["reason"]), (404, &json!("NotFound")), "{path}");
    }
    for namespace in ["A", "a%2Fb", "%FF", ".."] {
        let path = PATH.replace("apps", namespace);
        assert_eq!(send(true, request("POST", &path), "").await.code, 404, "{namespace}");
    }
}

#[tokio::test]
async fn without_a_user_only_health_is_served() {
    for path in ["/apis", "/version", "/openapi/v2", "/openapi/v3", "/", PATH] {
        let anonymous = || axum::http::Request::builder().uri(path);
        for method in ["GET", "POST", "DELETE"] {
            let answer = send(true, anonymous().method(method), "").await;
            assert_eq!((answer.code, &answer.body["kind"]), (401, &json!("Status")), "{path}");
        }
    }
    for path in ["/healthz", "/livez", "/readyz"] {
        let anonymous = axum::http::Request::builder().uri(path);
        let answer = send(true, anonymous, "").await;
        assert_eq!((answer.code, answer.body), (200, json!("ok")), "{path}");
    }
}

#[tokio::test]
async fn readiness_requires_the_front_proxys_configuration() {
    assert_eq!(send(false, request("GET", "/readyz"), "").await.code, 503);
    assert_eq!(send(false, request("GET", "/livez"), "").await.code, 200);
}

#[tokio::test]
async fn discovery_is_served_in_each_form() {
    let legacy = call("GET", "/apis").await;
    assert_eq!(legacy.body["kind"], "APIGroupList");
    for version in ["v2", "v2beta1"] {
        let kind =
            format!("application/json;g=apidiscovery.k8s.io;v={version};as=APIGroupDiscoveryList");
        let request = request("GET", "/apis").header(header::ACCEPT, &kind);
        let answer = send(true, request, "").await;
        assert_eq!(answer.headers[header::CONTENT_TYPE], kind);
        let resource = &answer.body["items"][0]["versions"][0]["resources"][0];
        assert_eq!(resource["verbs"], json!(["create"]));
    }
    let resources = call("GET", "/apis/cbt.storage.k8s.io/v1alpha1").await.body;
    assert_eq!(resources["resources"][0]["shortNames"], json!(["vsd"]));
    assert_eq!(call("GET", "/apis/cbt.storage.k8s.io").await.body["kind"], "APIGroup");
}

#[tokio::test]
async fn a_cached_document_is_not_sent_again() {
    for path in ["/openapi/v2", "/openapi/v3", openapi::V3_PATH] {
        let first = call("GET", path).await;
        let etag = first.headers[header::ETAG].clone();
        assert_eq!(first.code, 200);
        let again = request("GET", path).header(header::IF_NONE_MATCH, etag);
        assert_eq!(send(true, again, "").await.code, 304, "{path}");
        let other = request("GET", path).header(header::IF_NONE_MATCH, "\"x\"");
        assert_eq!(send(true, other, "").await.code, 200, "{path}");
    }
}
