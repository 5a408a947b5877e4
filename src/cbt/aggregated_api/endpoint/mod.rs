//! Calls the `cbt-http` endpoints of drivers ([`cbt_http`]). DriverDiscovery objects contain their
//! addresses and are written by other parties. Therefore an endpoint receives a token that is valid
//! for its driver only, only the authorities in its object are trusted, redirects are not followed,
//! and responses are limited and validated.

mod answer;
pub mod certificate;
pub mod target;

use std::error::Error as StdError;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Bytes, HttpBody as _};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::ClientConfig;
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, TryAcquireError};

use self::target::Target;
use super::{LISTENER, ROLE};
use kubernetes::bounded;
use kubernetes::cbt_http::{self, Info, Page, PageRequest, Problem, ProblemKind};
use kubernetes::own_tokens::{self, Token, Tokens};
use kubernetes::{client, tls};
use telemetry::fair_limit::{FairLimit, Labels};
use telemetry::memo::{Keep, Memo};

/// Maximum bytes of a response: a fixed part, and a part per requested entry, mostly for data
/// tokens.
const ANSWER: usize = 64 << 10;
const ENTRY: usize = 4 << 10;
/// Maximum bytes of all responses. Over it, the driver with the most loses its oldest one.
const ANSWERS: usize = 128 << 20;
/// Maximum bytes of a response's head.
const MAX_HEAD: usize = 64 << 10;
/// Timeout of connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time to keep idle connections, and their maximum number per endpoint.
const IDLE: Duration = Duration::from_secs(60);
const IDLE_CONNECTIONS: usize = 4;
/// Maximum number of endpoints whose connections are kept, and time to keep an unused endpoint.
const MAX_ENDPOINTS: u64 = 64;
const ENDPOINT_TTL: Duration = Duration::from_secs(600);
/// Maximum number of concurrent calls to one endpoint, so that a slow driver does not block others.
const MAX_CALLS: usize = 8;
/// Maximum Retry-After of an endpoint.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Why a call failed.
#[derive(Debug, Clone)]
pub enum EndpointError {
    /// No response, or not a response of cbt-http.
    Unreachable(String),
    /// The response is not valid.
    Invalid(String),
    /// The endpoint returned a problem, and possibly when to retry.
    Problem { problem: Problem, after: Option<Duration> },
    /// The maximum number of calls is running, or others need the memory of the response.
    Busy,
    /// No token is available.
    NoToken(client::Failure),
}

/// All endpoints. Clones share them.
#[derive(Clone)]
pub struct Endpoints {
    tokens: Tokens,
    known: Memo<Target, Arc<Endpoint>, anyhow::Error>,
    /// Memory of responses, by driver.
    answers: FairLimit<String>,
}

/// The endpoint of a driver.
pub struct Endpoint {
    pub target: Target,
    tls: Arc<ClientConfig>,
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    calls: Semaphore,
    tokens: Tokens,
    answers: FairLimit<String>,
}

impl Endpoints {
    /// Requests tokens of the ServiceAccount `account` in `namespace`.
    pub fn new(client: kube::Client, namespace: &str, account: &str) -> Self {
        let known = Memo::new(MAX_ENDPOINTS, Keep::Unused(ENDPOINT_TTL));
        let tokens = Tokens::new(client, namespace, account);
        let labels = Labels { listener: LISTENER, share: "endpoint_response" };
        Self { tokens, known, answers: FairLimit::new(labels, ANSWERS) }
    }

    /// Returns the endpoint of a target, with its open connections. Another address or other
    /// authorities are another endpoint.
    ///
    /// # Errors
    /// The target has no usable authority.
    pub async fn at(&self, target: &Target) -> Result<Arc<Endpoint>, String> {
        let make = async { Endpoint::new(target.clone(), self).map(Arc::new) };
        let made = self.known.get_or_load(target, make).await;
        made.map_err(|error| format!("spec.clientConfig.caBundle: {error:#}"))
    }
}

impl Endpoint {
    fn new(target: Target, shared: &Endpoints) -> anyhow::Result<Self> {
        let mut config = tls::client_config(&target.ca_bundle)?;
        // The connector sets the protocols itself.
        config.alpn_protocols.clear();
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let https = HttpsConnectorBuilder::new()
            .with_tls_config(config.clone())
            .https_only()
            .enable_http1()
            .wrap_connector(http);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            .http1_max_buf_size(MAX_HEAD)
            .build(https);
        let (tls, calls) = (Arc::new(config), Semaphore::new(MAX_CALLS));
        let (tokens, answers) = (shared.tokens.clone(), shared.answers.clone());
        Ok(Self { target, tls, client, calls, tokens, answers })
    }

    /// Requests a page and validates it.
    pub async fn page(&self, request: &PageRequest) -> Result<Page, EndpointError> {
        let _call = self.calls.try_acquire().map_err(|error| match error {
            TryAcquireError::NoPermits | TryAcquireError::Closed => EndpointError::Busy,
        })?;
        let body = serde_json::to_vec(request)
            .map_err(|_| EndpointError::Unreachable("the request cannot be encoded".into()))?;
        let room = ANSWER + request.limit as usize * ENTRY;
        let page = self.call(Method::POST, body.into(), room).await?;
        answer::check(request, &page).map_err(EndpointError::Invalid)?;
        Ok(page)
    }

    /// Requests the driver's capability.
    pub async fn info(&self) -> Result<Info, EndpointError> {
        self.call(Method::GET, Bytes::new(), ANSWER).await
    }

    /// Makes a call, and a second one if the token was refused, because it may have been revoked.
    /// The response has at most `room` bytes.
    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        body: Bytes,
        room: usize,
    ) -> Result<T, EndpointError> {
        let audience = cbt_http::audience(&self.target.driver);
        let no_token = |error: Arc<kube::Error>| {
            EndpointError::NoToken(client::failure(ROLE, own_tokens::REQUESTING, &error))
        };
        let (method, body) = (&method, &body);
        let send =
            |token: Arc<Token>| async move { self.send(method, body, &token.text, room).await };
        self.tokens.call(&audience, no_token, is_token_refused, send).await
    }

    async fn send<T: DeserializeOwned>(
        &self,
        method: &Method,
        body: &Bytes,
        token: &str,
        room: usize,
    ) -> Result<T, EndpointError> {
        let unreachable = |why: &str| EndpointError::Unreachable(why.to_owned());
        let mut bearer = HeaderValue::try_from(format!("Bearer {token}"))
            .map_err(|_| unreachable("the token cannot be sent"))?;
        bearer.set_sensitive(true);
        let request = Request::builder()
            .method(method)
            .uri(&self.target.uri)
            .header(AUTHORIZATION, bearer)
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body.clone()))
            .map_err(|_| unreachable("its address is not valid"))?;
        let answer = self.client.request(request).await;
        let (head, body) =
            answer.map_err(|error| EndpointError::Unreachable(root_cause(&error)))?.into_parts();
        let expected = body.size_hint().exact().and_then(|length| usize::try_from(length).ok());
        let reserved = expected.map_or(room, |length| length.min(room));
        let share = self.answers.take(self.target.driver.clone(), reserved);
        let body = tokio::select! {
            body = Limited::new(body, room).collect() => body,
            () = share.revoked() => return Err(EndpointError::Busy),
        };
        let body =
            body.map_err(|error| EndpointError::Unreachable(root_cause(&*error)))?.to_bytes();
        share.shrink(body.len());
        if head.status == StatusCode::OK {
            let wrong = || EndpointError::Invalid("its response cannot be decoded".into());
            return bounded::parse(&body).map(|parsed| parsed.value).map_err(|_| wrong());
        }
        let status = head.status.as_u16();
        let problem: Problem = serde_json::from_slice(&body).map_err(|_| {
            EndpointError::Unreachable(format!(
                "it returned HTTP {status} without a cbt-http problem"
            ))
        })?;
        Err(EndpointError::Problem { problem, after: pause(&head.headers) })
    }
}

fn is_token_refused(error: &EndpointError) -> bool {
    let kind = match error {
        EndpointError::Problem { problem, .. } => problem.kind,
        _ => return false,
    };
    kind == ProblemKind::Unauthenticated
}

fn pause(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST_PAUSE))
}

/// The root cause of an error.
fn root_cause(error: &(dyn StdError + 'static)) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}
