//! A fake endpoint of a driver: it returns invalid pages, is slow, refuses tokens and returns every
//! kind of problem, which the sidecar's real endpoint would not do on demand.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use csi_loopback::kubernetes::cbt_http::{PATH, PageRequest, Problem, ProblemKind};
use csi_loopback::kubernetes::https::Limits;
use csi_loopback::telemetry::shutdown::Phase;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};

use support::cluster::Cluster;
use support::cluster::tls::{Certificate, serve};

const LIMITS: Limits = Limits { body: 1 << 20, request: Duration::from_secs(120) };

/// A reply.
#[derive(Clone)]
pub enum Reply {
    /// 200 with this JSON.
    Say(Value),
    Problem(Problem),
    /// Status, body, and Retry-After or Location.
    Raw(u16, String, &'static [(header::HeaderName, &'static str)]),
    /// No response, ever.
    Hang,
    /// The other reply, once the gate has a permit.
    Gated(Arc<Semaphore>, Box<Reply>),
}

/// A received request.
#[derive(Debug, Clone)]
pub struct Seen {
    pub token: String,
    /// `None` for a GET of the capability.
    pub request: Option<PageRequest>,
}

pub struct Endpoint {
    pub port: u16,
    known: Arc<Known>,
    phase: watch::Sender<Phase>,
}

struct Known {
    pages: Mutex<Reply>,
    info: Mutex<Reply>,
    seen: Mutex<Vec<Seen>>,
    refused: Mutex<Vec<String>>,
}

/// A page of these blocks of 4 KiB.
pub fn page(blocks: &[u64], next: Option<u64>) -> Reply {
    let blocks: Vec<_> =
        blocks.iter().map(|offset| json!({ "offset": offset, "blockSizeBytes": 4096 })).collect();
    Reply::Say(json!({ "volumeSizeBytes": 1 << 30, "changedBlocks": blocks, "continue": next }))
}

pub fn problem(kind: ProblemKind, message: &str, code: Option<&str>) -> Reply {
    Reply::Problem(Problem { kind, message: message.into(), code: code.map(Into::into) })
}

pub fn info(driver: &str, capability: &str) -> Reply {
    Reply::Say(json!({ "driver": driver, "capability": capability }))
}

impl Endpoint {
    pub fn start(cluster: &Cluster, certificate: &Certificate) -> Self {
        let known = Arc::new(Known {
            pages: Mutex::new(page(&[], None)),
            info: Mutex::new(Reply::Hang),
            seen: Mutex::default(),
            refused: Mutex::default(),
        });
        let routes =
            Router::new().route(PATH, get(answer).post(answer)).with_state(Arc::clone(&known));
        let (port, phase) = serve(cluster, certificate, routes, LIMITS);
        Self { port, known, phase }
    }

    pub fn url(&self) -> String {
        format!("https://localhost:{}{PATH}", self.port)
    }

    /// Sets the reply to page requests.
    pub fn says(&self, reply: Reply) {
        *self.known.pages.lock().unwrap() = reply;
    }

    /// Sets the reply to capability requests.
    pub fn reports(&self, reply: Reply) {
        *self.known.info.lock().unwrap() = reply;
    }

    /// Refuses this token from now on.
    pub fn refuse(&self, token: &str) {
        self.known.refused.lock().unwrap().push(token.to_owned());
    }

    /// The page requests so far.
    pub fn pages(&self) -> Vec<Seen> {
        let seen = self.known.seen.lock().unwrap();
        seen.iter().filter(|seen| seen.request.is_some()).cloned().collect()
    }

    /// The number of capability requests so far.
    pub fn probes(&self) -> usize {
        let seen = self.known.seen.lock().unwrap();
        seen.iter().filter(|seen| seen.request.is_none()).count()
    }

    pub fn stop(&self) {
        self.phase.send_replace(Phase::Ending);
    }
}

async fn answer(State(known): State<Arc<Known>>, headers: HeaderMap, body: Bytes) -> Response {
    let bearer = headers[header::AUTHORIZATION].to_str().unwrap();
    let token = bearer.strip_prefix("Bearer ").unwrap().to_owned();
    let request: Option<PageRequest> =
        (!body.is_empty()).then(|| serde_json::from_slice(&body).unwrap());
    let reply = if request.is_some() { &known.pages } else { &known.info };
    let mut reply = reply.lock().unwrap().clone();
    if known.refused.lock().unwrap().iter().any(|one| *one == token || one == "*") {
        reply = problem(ProblemKind::Unauthenticated, "not this token", None);
    }
    known.seen.lock().unwrap().push(Seen { token, request });
    loop {
        match reply {
            Reply::Gated(gate, next) => {
                gate.acquire().await.unwrap().forget();
                reply = *next;
            }
            Reply::Say(value) => return axum::Json(value).into_response(),
            Reply::Problem(problem) => {
                return (problem.kind.status(), axum::Json(problem)).into_response();
            }
            Reply::Raw(status, body, headers) => {
                let mut response = (StatusCode::from_u16(status).unwrap(), body).into_response();
                for (name, value) in headers {
                    response.headers_mut().insert(name, value.parse().unwrap());
                }
                return response;
            }
            Reply::Hang => std::future::pending().await,
        }
    }
}
