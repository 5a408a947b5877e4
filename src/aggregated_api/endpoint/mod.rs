//! Calls to the `cbt-http` endpoints of drivers ([`cbt_http`]): where they are is told by DriverDiscovery objects, which are another's to write.
//! So an endpoint is shown a token that is good for its driver alone, only the authorities of its object are trusted, no redirect is
//! followed, and what it answers has a bound and is checked.

mod answer;
pub mod certificate;
pub mod target;
mod tokens;

use std::error::Error as StdError;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use moka::future::Cache;
use rustls::ClientConfig;
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, TryAcquireError};

use self::target::Target;
use self::tokens::Tokens;
use super::WHO;
use crate::kubernetes::cbt_http::{Info, Page, PageRequest, Problem, ProblemKind};
use crate::kubernetes::{client, tls};

/// Bytes of an answer, at most: so many, and so many for each entry that was asked for. What a driver hands out with a block
/// is the most of that.
const ANSWER: usize = 64 << 10;
const ENTRY: usize = 4 << 10;
/// Bytes of the head of one.
const MAX_HEAD: usize = 64 << 10;
/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections that are not used are kept for so long, and so many of an endpoint.
const IDLE: Duration = Duration::from_secs(60);
const IDLE_CONNECTIONS: usize = 4;
/// Endpoints whose connections are kept, at most, and for how long if nobody asks.
const KEPT: u64 = 64;
const KEPT_FOR: Duration = Duration::from_secs(600);
/// Calls to one endpoint at once: a driver that is slow is not to hold up the others.
const AT_ONCE: usize = 8;
/// The longest pause that an endpoint may ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Why there is no answer.
#[derive(Debug, Clone)]
pub enum Trouble {
    /// Nothing came, or nothing that is one.
    Unreachable(String),
    /// What came cannot be true.
    Untrue(String),
    /// It says what is wrong, and perhaps when to try again.
    Told { problem: Problem, after: Option<Duration> },
    /// As many calls as may be run already.
    Busy,
    /// There is no token to show.
    NoToken(client::Failure),
}

/// All endpoints. Cheap to clone.
#[derive(Clone)]
pub struct Endpoints {
    tokens: Tokens,
    known: Cache<Target, Arc<Endpoint>>,
}

/// The endpoint of a driver.
pub struct Endpoint {
    pub target: Target,
    tls: Arc<ClientConfig>,
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    calls: Semaphore,
    tokens: Tokens,
}

impl Endpoints {
    /// Tokens are those of the ServiceAccount `account` in `namespace`.
    pub fn new(client: kube::Client, namespace: &str, account: &str) -> Self {
        let known = Cache::builder().max_capacity(KEPT).time_to_idle(KEPT_FOR).build();
        Self { tokens: Tokens::new(client, namespace, account), known }
    }

    /// The endpoint there, with the connections that it has already: another address or other authorities are another
    /// endpoint.
    ///
    /// # Errors
    /// Nobody can be trusted there; why.
    pub async fn at(&self, target: &Target) -> Result<Arc<Endpoint>, String> {
        let make = async { Endpoint::new(target.clone(), self.tokens.clone()).map(Arc::new) };
        let made = self.known.try_get_with_by_ref(target, make).await;
        made.map_err(|error| format!("spec.clientConfig.caBundle: {error:#}"))
    }
}

impl Endpoint {
    fn new(target: Target, tokens: Tokens) -> anyhow::Result<Self> {
        let mut config = tls::client_config(&target.ca_bundle)?;
        // The connector says by itself what it speaks.
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
        let (tls, calls) = (Arc::new(config), Semaphore::new(AT_ONCE));
        Ok(Self { target, tls, client, calls, tokens })
    }

    /// A page, which can be true.
    pub async fn page(&self, asked: &PageRequest) -> Result<Page, Trouble> {
        let _call = self.calls.try_acquire().map_err(|error| match error {
            TryAcquireError::NoPermits | TryAcquireError::Closed => Trouble::Busy,
        })?;
        let body = serde_json::to_vec(asked)
            .map_err(|_| Trouble::Unreachable("the request cannot be written".into()))?;
        let room = ANSWER + asked.limit as usize * ENTRY;
        let page = self.call(Method::POST, body.into(), room).await?;
        answer::check(asked, &page).map_err(Trouble::Untrue)?;
        Ok(page)
    }

    /// What the driver can do.
    pub async fn info(&self) -> Result<Info, Trouble> {
        self.call(Method::GET, Bytes::new(), ANSWER).await
    }

    /// One call, and a second one if the token was refused: it may have been taken back. The answer has at most `room` bytes.
    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        body: Bytes,
        room: usize,
    ) -> Result<T, Trouble> {
        let driver = &self.target.driver;
        let no_token = |error: Arc<kube::Error>| {
            let doing = "make a token of its ServiceAccount (serviceaccounts/token)";
            Trouble::NoToken(client::failure(WHO, doing, &error))
        };
        let token = self.tokens.of(driver).await.map_err(no_token)?;
        let answer = self.send(&method, &body, &token.text, room).await;
        if !answer.as_ref().is_err_and(is_of_token) {
            return answer;
        }
        self.tokens.forget(driver, &token).await;
        let token = self.tokens.of(driver).await.map_err(no_token)?;
        self.send(&method, &body, &token.text, room).await
    }

    async fn send<T: DeserializeOwned>(
        &self,
        method: &Method,
        body: &Bytes,
        token: &str,
        room: usize,
    ) -> Result<T, Trouble> {
        let unreachable = |why: &str| Trouble::Unreachable(why.to_owned());
        let mut bearer = HeaderValue::try_from(format!("Bearer {token}"))
            .map_err(|_| unreachable("the token cannot be sent"))?;
        bearer.set_sensitive(true);
        let request = Request::builder()
            .method(method)
            .uri(&self.target.uri)
            .header(AUTHORIZATION, bearer)
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body.clone()))
            .map_err(|_| unreachable("its address cannot be called"))?;
        let answer = self.client.request(request).await;
        let (head, body) = answer.map_err(|error| Trouble::Unreachable(why(&error)))?.into_parts();
        let body = Limited::new(body, room).collect().await;
        let body = body.map_err(|error| Trouble::Unreachable(why(&*error)))?.to_bytes();
        if head.status == StatusCode::OK {
            let wrong = || Trouble::Untrue("its answer is not what was asked for".into());
            return serde_json::from_slice(&body).map_err(|_| wrong());
        }
        let status = head.status.as_u16();
        let problem: Problem = serde_json::from_slice(&body).map_err(|_| {
            Trouble::Unreachable(format!("it answered HTTP {status} and not as cbt-http does"))
        })?;
        Err(Trouble::Told { problem, after: pause(&head.headers) })
    }
}

fn is_of_token(trouble: &Trouble) -> bool {
    let kind = match trouble {
        Trouble::Told { problem, .. } => problem.kind,
        _ => return false,
    };
    kind == ProblemKind::Unauthenticated
}

fn pause(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST_PAUSE))
}

/// The cause that all others come from.
fn why(error: &(dyn StdError + 'static)) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}
