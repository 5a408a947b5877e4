//! The HTTP routes. All except health require a user, named by the front proxy. Errors are returned
//! as a Kubernetes Status.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, RawQuery, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use axum::{Extension, Json, Router};
use k8s_openapi::api::authentication::v1::UserInfo;

use super::LISTENER;
use super::accept::{Form, negotiate};
use super::decode::{self, decode};
use super::failure::{Cause, Failure};
use super::front_proxy::FrontProxy;
use super::groups;
use super::metrics::{Metrics, Verb};
use super::openapi::{self, Document};
use kubernetes::https::{Bounds, Limits};
use kubernetes::name;
use kubernetes::snapshot_delta::VolumeSnapshotDelta;
use kubernetes::tls::ClientChain;
use telemetry::shutdown::Shutdown;

/// A body that is slightly too large is refused with a Status. The time exceeds the limit of a
/// response, which is enforced separately.
pub const LIMITS: Limits = Limits { body: decode::MAX_BODY, request: Duration::from_secs(40) };

/// Serves VolumeSnapshotDeltas.
pub trait DeltaService: Clone + Send + Sync + 'static {
    /// Serves a request of `user` in `namespace`; the response has a status.
    fn create(
        &self,
        user: &UserInfo,
        namespace: &str,
        request: VolumeSnapshotDelta,
    ) -> impl Future<Output = Result<VolumeSnapshotDelta, Failure>> + Send;
}

/// Authenticates requests.
pub trait Authenticator: Clone + Send + Sync + 'static {
    fn authenticate(&self, chain: &ClientChain, headers: &HeaderMap) -> Result<UserInfo, Failure>;

    /// Whether requests can be authenticated.
    fn is_known(&self) -> bool;
}

impl Authenticator for FrontProxy {
    fn authenticate(&self, chain: &ClientChain, headers: &HeaderMap) -> Result<UserInfo, Failure> {
        FrontProxy::authenticate(self, chain, headers)
    }

    fn is_known(&self) -> bool {
        FrontProxy::is_known(self)
    }
}

/// All routes. `deltas` serves VolumeSnapshotDeltas.
pub fn routes<C: DeltaService, A: Authenticator>(
    deltas: C,
    front_proxy: A,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Router {
    let guarded = documents().merge(volume_snapshot_deltas(deltas)).fallback(not_found);
    let guarded = Bounds::new(LIMITS, LISTENER)
        .around(guarded, refuse)
        .layer(from_fn_with_state(front_proxy.clone(), authenticate::<A>))
        .layer(from_fn_with_state(metrics, track));
    let ready = move || {
        let ready = match front_proxy.is_known() {
            _ if shutdown.is_draining() => Err("the server is exiting"),
            true => Ok(()),
            false => Err("the front proxy's configuration is not known yet"),
        };
        async move { health(ready) }
    };
    Router::new()
        .route("/healthz", only_get(get(async || health(Ok(())))))
        .route("/livez", only_get(get(async || health(Ok(())))))
        .route("/readyz", only_get(get(ready)))
        .merge(guarded)
}

/// See [`https::Refuse`](kubernetes::https::Refuse).
fn refuse(code: StatusCode, message: String) -> Response {
    let cause = match code {
        StatusCode::PAYLOAD_TOO_LARGE => Cause::TooLarge,
        StatusCode::REQUEST_TIMEOUT => Cause::TimedOut,
        StatusCode::SERVICE_UNAVAILABLE => Cause::TooMany,
        _ => Cause::Malformed,
    };
    Failure::new(cause, message).into_response()
}

fn health(state: Result<(), &'static str>) -> Response {
    match state {
        Ok(()) => (StatusCode::OK, "ok").into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

/// Discovery, OpenAPI and version.
fn documents() -> Router {
    let object = |answer: fn() -> serde_json::Value| {
        only_get(get(async move |headers: HeaderMap| {
            negotiate(&headers, &[Form::Plain]).map(|_| Json(answer()))
        }))
    };
    let document = |document: fn() -> &'static Document| {
        only_get(get(async move |headers: HeaderMap| serve_document(&headers, document())))
    };
    Router::new()
        .route("/version", object(groups::version))
        .route("/apis", only_get(get(apis)))
        .route("/apis/", only_get(get(apis)))
        .route("/apis/cbt.storage.k8s.io", object(groups::group))
        .route("/apis/cbt.storage.k8s.io/", object(groups::group))
        .route("/apis/cbt.storage.k8s.io/v1alpha1", object(groups::resources))
        .route("/apis/cbt.storage.k8s.io/v1alpha1/", object(groups::resources))
        .route("/openapi/v2", document(|| &openapi::V2))
        .route("/openapi/v3", document(|| &openapi::V3_ROOT))
        .route(openapi::V3_PATH, document(|| &openapi::V3))
}

async fn apis(headers: HeaderMap) -> Result<Response, Failure> {
    const ALL: [Form; 3] = [Form::Plain, Form::Discovery("v2"), Form::Discovery("v2beta1")];
    let Form::Discovery(version) = negotiate(&headers, &ALL)? else {
        return Ok(Json(groups::groups()).into_response());
    };
    let kind =
        format!("application/json;g=apidiscovery.k8s.io;v={version};as=APIGroupDiscoveryList");
    let body = groups::discovery(version).to_string();
    Ok(([(header::CONTENT_TYPE, kind), (header::VARY, "Accept".into())], body).into_response())
}

/// The document, or 304 if the client has it.
fn serve_document(headers: &HeaderMap, document: &Document) -> Result<Response, Failure> {
    negotiate(headers, &[Form::Plain])?;
    let known = headers.get_all(header::IF_NONE_MATCH).iter();
    let mut known = known.filter_map(|value| value.to_str().ok()).flat_map(|list| list.split(','));
    let is_known = known.any(|etag| {
        let etag = etag.trim();
        etag == "*" || etag.strip_prefix("W/").unwrap_or(etag) == document.etag
    });
    let etag = [(header::ETAG, document.etag.clone()), (header::VARY, "Accept".into())];
    if is_known {
        return Ok((StatusCode::NOT_MODIFIED, etag).into_response());
    }
    let kind = [(header::CONTENT_TYPE, "application/json")];
    Ok((etag, kind, document.body.clone()).into_response())
}

/// The only resource, which supports only create.
fn volume_snapshot_deltas<C: DeltaService>(deltas: C) -> Router {
    const ALL: &str = "/apis/cbt.storage.k8s.io/v1alpha1/volumesnapshotdeltas";
    const OF_A_NAMESPACE: &str =
        "/apis/cbt.storage.k8s.io/v1alpha1/namespaces/{namespace}/volumesnapshotdeltas";
    const ONE: &str =
        "/apis/cbt.storage.k8s.io/v1alpha1/namespaces/{namespace}/volumesnapshotdeltas/{name}";
    let only_create = || axum::routing::any(async || method_not_allowed("POST"));
    Router::new()
        .route(
            OF_A_NAMESPACE,
            post(create::<C>).with_state(deltas).fallback(async || method_not_allowed("POST")),
        )
        .route(ALL, only_create())
        .route(ONE, only_create())
}

async fn create<C: DeltaService>(
    State(deltas): State<C>,
    Extension(user): Extension<Arc<UserInfo>>,
    namespace: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Failure> {
    let namespace = namespace.map(|Path(namespace)| namespace).ok();
    let Some(namespace) = namespace.filter(|namespace| name::is_namespace(namespace)) else {
        return Err(Failure::new(Cause::Path, "the path has no valid namespace name"));
    };
    negotiate(&headers, &[Form::Plain])?;
    let body = body.map_err(|error| Failure::new(Cause::Malformed, error.body_text()))?;
    let request = decode(&headers, query.as_deref(), &namespace, &body)?;
    let answer = deltas.create(&user, &namespace, request.delta).await?;
    let mut response = (StatusCode::CREATED, Json(answer)).into_response();
    for warning in request.warnings {
        let text = warning.replace('\\', r"\\").replace('"', "\\\"");
        // Omit a warning that is not a valid header value.
        if let Ok(value) = HeaderValue::from_str(&format!("299 - \"{text}\"")) {
            response.headers_mut().append(header::WARNING, value);
        }
    }
    Ok(response)
}

fn only_get(method: MethodRouter) -> MethodRouter {
    method.fallback(async || method_not_allowed("GET, HEAD"))
}

fn method_not_allowed(allowed: &'static str) -> Response {
    let message = match allowed {
        "POST" => {
            "a VolumeSnapshotDelta can only be created: the response has the result, and nothing is stored \
             (kubectl create -f FILE -o json)"
        }
        _ => "the server does not allow this method on the requested resource",
    };
    let mut response = Failure::new(Cause::Verb, message).into_response();
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    response
}

async fn not_found() -> Failure {
    Failure::new(Cause::Path, "the server could not find the requested resource")
}

async fn authenticate<A: Authenticator>(
    State(front_proxy): State<A>,
    mut request: Request,
    next: Next,
) -> Response {
    let chain = request.extensions().get::<ClientChain>().cloned().unwrap_or_default();
    match front_proxy.authenticate(&chain, request.headers()) {
        Ok(user) => {
            request.extensions_mut().insert(Arc::new(user));
            next.run(request).await
        }
        Err(failure) => failure.into_response(),
    }
}

async fn track(State(metrics): State<Metrics>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let verb = match *request.method() {
        Method::POST => Verb::Create,
        Method::GET | Method::HEAD => Verb::Read,
        _ => Verb::Other,
    };
    let response = next.run(request).await;
    let refused = response.extensions().get::<Cause>().copied();
    let verb = match refused {
        Some(Cause::Verb | Cause::Path) => Verb::Other,
        _ => verb,
    };
    metrics.answered(verb, refused, started.elapsed());
    response
}

#[cfg(test)]
mod tests;
