//! Who of several replicas asks the driver, and how the others pass requests on to it: with the caller's own token, and only to
//! one that has a certificate of the same authority for the Service's host. So whoever could write an address into the
//! lease would learn nothing.

use std::sync::Arc;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, RETRY_AFTER};
use axum::http::{HeaderValue, Request, Response};
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls_pki_types::ServerName;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{Mutex, watch};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::problem::unavailable;
use crate::kubernetes::cbt_http::{PATH, Problem};
use crate::kubernetes::leader::Standing;
use crate::kubernetes::metadata_service::Address;
use crate::kubernetes::tls;

/// Header of a request that was passed on, which is not passed on again.
pub const FORWARDED: &str = "x-cbt-http-forwarded";
/// Between the address and what makes an identity one of its own. No address has it.
const MARK: char = '_';
/// How long connecting may take.
const CONNECT: Duration = Duration::from_secs(5);
/// A leader that says nothing for so long is asked whether it is there, and has so long to answer.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));
/// Bytes of an answer, at most.
const MAX_ANSWER: usize = 32 << 20;

/// Where the replica of this name is reached, if anywhere: its name begins with that.
fn address_of(identity: &str) -> Option<Address> {
    identity.rsplit_once(MARK)?.0.parse().ok()
}

/// Whom another replica is trusted as.
pub struct Trust {
    /// Authorities, in PEM.
    pub authorities: watch::Receiver<String>,
    /// What its certificate has to be for.
    pub host: ServerName<'static>,
}

/// What a replica knows of who leads. Cheap to clone.
#[derive(Clone)]
pub struct Leadership {
    standing: Standing,
    identity: Arc<str>,
    trust: Option<Arc<Trust>>,
    connected: Arc<Mutex<Option<Connected>>>,
}

/// A connection to who led when it was made, and whom it was trusted by.
struct Connected {
    leader: String,
    authorities: String,
    requests: SendRequest<Body>,
}

impl Leadership {
    pub fn new(standing: Standing, identity: &str, trust: Option<Trust>) -> Self {
        let (identity, trust) = (identity.into(), trust.map(Arc::new));
        Self { standing, identity, trust, connected: Arc::default() }
    }

    /// Tells whether this replica leads.
    pub fn watch(&self) -> watch::Receiver<bool> {
        self.standing.leads.clone()
    }

    pub fn leads(&self) -> bool {
        *self.standing.leads.borrow()
    }

    /// Has the request answered by who leads. `authorization` is the caller's.
    pub async fn forward(
        &self,
        authorization: &HeaderValue,
        body: Bytes,
    ) -> Result<Response<Body>, Problem> {
        let holder = self.standing.holder.borrow().clone();
        let leader = holder.filter(|holder| **holder != *self.identity);
        let leader = leader.ok_or_else(|| unavailable("no replica leads just now; try again"))?;
        let trust = self.trust.as_deref().ok_or_else(|| {
            unavailable(
                "this replica does not lead, and knows no authority and host by which to trust the one that does \
                 (--service-ca or --self-signed, --cbt-http-service-address); ask another one",
            )
        })?;
        let mut requests = self.requests(&leader, trust).await?;
        let request = request(authorization, body);
        let request =
            request.map_err(|_| unavailable("the request cannot be passed on to who leads"))?;
        let answered = async {
            let answer = requests.send_request(request).await.ok()?;
            let (head, body) = answer.into_parts();
            let body = to_bytes(Body::new(body), MAX_ANSWER).await.ok()?;
            Some((head, body))
        };
        let (head, body) = answered.await.ok_or_else(broke_off)?;
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = head.status;
        for name in [CONTENT_TYPE, RETRY_AFTER] {
            if let Some(value) = head.headers.get(&name) {
                response.headers_mut().insert(name, value.clone());
            }
        }
        Ok(response)
    }

    /// The connection to the leader, which is kept for as long as it leads.
    async fn requests(&self, leader: &str, trust: &Trust) -> Result<SendRequest<Body>, Problem> {
        let authorities = trust.authorities.borrow().clone();
        let mut connected = self.connected.lock().await;
        if let Some(kept) = &*connected
            && kept.leader == leader
            && kept.authorities == authorities
            && !kept.requests.is_closed()
        {
            return Ok(kept.requests.clone());
        }
        *connected = None;
        let address = address_of(leader).ok_or_else(|| {
            unavailable(
                "the replica that leads does not say where it is (--cbt-http-advertise-address); ask another one",
            )
        })?;
        let connecting = connect(&address, &authorities, trust.host.clone());
        let requests = match timeout(CONNECT, connecting).await {
            Ok(Ok(requests)) => requests,
            failed => {
                let error = failed.map_or("it takes too long".into(), |failed| {
                    failed.map_or_else(|error| format!("{error:#}"), |_| String::new())
                });
                tracing::warn!(%address, error, "the replica that leads cannot be reached");
                return Err(unavailable("the replica that leads cannot be reached; try again"));
            }
        };
        let (leader, kept) = (leader.to_owned(), requests.clone());
        *connected = Some(Connected { leader, authorities, requests: kept });
        Ok(requests)
    }
}

fn broke_off() -> Problem {
    unavailable("the replica that leads did not answer to the end; try again")
}

fn request(authorization: &HeaderValue, body: Bytes) -> Result<Request<Body>, axum::http::Error> {
    Request::post(format!("https://cbt-http{PATH}"))
        .header(HOST, "cbt-http")
        .header(AUTHORIZATION, authorization)
        .header(CONTENT_TYPE, "application/json")
        .header(FORWARDED, "1")
        .body(body.into())
}

async fn connect(
    address: &Address,
    authorities: &str,
    host: ServerName<'static>,
) -> anyhow::Result<SendRequest<Body>> {
    let config = tls::client_config(authorities.as_bytes())?;
    let stream = TcpStream::connect(address.to_string()).await?;
    stream.set_nodelay(true)?;
    let stream = TlsConnector::from(Arc::new(config)).connect(host, stream).await?;
    let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEPALIVE.0)
        .keep_alive_timeout(KEEPALIVE.1);
    let (requests, connection) = builder.handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "the connection to who leads broke");
        }
    });
    Ok(requests)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::leader::own_name;

    #[test]
    fn an_identity_tells_where_its_replica_is_if_it_is_anywhere() {
        for at in ["10.0.0.1:8443", "[fd00::1]:8443", "pod-0.driver:1"] {
            assert_eq!(address_of(&own_name(at).unwrap()).unwrap().to_string(), at);
        }
        for nowhere in
            [own_name("sidecar").unwrap().as_str(), "", "other", "_", "https://a:1_x", "a_b:1"]
        {
            assert_eq!(address_of(nowhere), None, "{nowhere}");
        }
    }
}
