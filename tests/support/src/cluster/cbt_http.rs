//! Valid and invalid requests to a sidecar's cbt-http, and the rights that sidecar and client need.

use axum::body::{Body, to_bytes};
use csi_loopback::kubernetes::cbt_http::{Page, PageRequest, Problem};
use http::{HeaderMap, Request};
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::rbac::v1::PolicyRule;
use rustls_pki_types::ServerName;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::net::TcpStream;

use super::access::rule;
use super::sidecar::connector;
use crate::driver::{PATIENCE, map};

/// The additional rights of the sidecar, in its namespace and in the cluster.
pub fn cbt_http_rules() -> Vec<PolicyRule> {
    vec![
        rule("authentication.k8s.io", &["tokenreviews"], &["create"]),
        rule("authorization.k8s.io", &["subjectaccessreviews"], &["create"]),
        rule("coordination.k8s.io", &["leases"], &["get", "create", "update"]),
    ]
}

/// The rights of its client.
pub fn caller_rules() -> Vec<PolicyRule> {
    vec![rule("cbt.storage.k8s.io", &["driverdiscoveries/deltas"], &["create"])]
}

/// A response with any status.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

impl Reply {
    #[track_caller]
    pub fn json<T: DeserializeOwned>(&self) -> T {
        let text = String::from_utf8_lossy(&self.body);
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// The page of a successful response.
    #[track_caller]
    pub fn page(&self) -> Page {
        assert_eq!(self.status, 200, "{}", String::from_utf8_lossy(&self.body));
        self.json()
    }

    /// The problem of a failed response.
    #[track_caller]
    pub fn problem(&self) -> Problem {
        assert_ne!(self.status, 200, "{}", String::from_utf8_lossy(&self.body));
        self.json()
    }
}

/// A request for a page.
pub fn page_request(
    driver: &str,
    base: &str,
    target: &str,
    offset: u64,
    limit: u32,
) -> PageRequest {
    PageRequest {
        driver: driver.to_owned(),
        base_snapshot_id: base.to_owned(),
        target_snapshot_id: target.to_owned(),
        offset,
        limit,
        secrets: Default::default(),
    }
}

/// Adds secrets for the driver to a request.
pub fn with_secrets(request: PageRequest, secrets: &[(&str, &str)]) -> PageRequest {
    PageRequest { secrets: serde_json::from_value(json!(map(secrets))).unwrap(), ..request }
}

/// Sends one request over a new connection to this port. The server must have a certificate for
/// `host` of this authority.
pub async fn send(
    port: u16,
    authority: &str,
    host: &str,
    request: Request<Body>,
) -> Result<Reply, String> {
    let reply = async {
        let stream =
            TcpStream::connect(("localhost", port)).await.map_err(|error| error.to_string())?;
        let name = ServerName::try_from(host.to_owned()).unwrap();
        let stream = connector(authority).connect(name, stream).await;
        let stream = TokioIo::new(stream.map_err(|error| error.to_string())?);
        let connected = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await;
        let (mut requests, connection) = connected.map_err(|error| error.to_string())?;
        let connection = tokio::spawn(connection);
        let response =
            requests.send_request(request).await.map_err(|error| format!("{error:?}"))?;
        let (head, body) = response.into_parts();
        let body = to_bytes(Body::new(body), 64 << 20).await.map_err(|error| error.to_string())?;
        connection.abort();
        let status = head.status.as_u16();
        Ok(Reply { status, headers: head.headers, body: body.into() })
    };
    tokio::time::timeout(PATIENCE, reply).await.map_err(|_| "timeout".to_owned())?
}
