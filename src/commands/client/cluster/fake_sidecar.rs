//! A cluster for tests of the client: an API server with some objects and tokens, and sidecars over
//! real TLS whose responses break where a test requires it. It needs no process and no file.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use kube::client::Body;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt, iter, once};
use tonic::codegen::http;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

use grpc::RawMessage;
use grpc::proto::{snapshotmetadata as k8s, snapshotsession as sessions};
use k8s::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use sessions::snapshot_metadata_server as session_server;

/// The host that certificates are for.
pub const HOST: &str = "localhost";
pub const DRIVER: &str = "d.example";
pub const CAPACITY: i64 = 1 << 20;

/// The messages and the end of a stream of the sidecar.
#[derive(Clone)]
pub struct Script {
    pub capacity: i64,
    pub style: k8s::BlockMetadataType,
    /// Messages of offsets and lengths.
    pub messages: Vec<Vec<(i64, i64)>>,
    pub end: End,
}

#[derive(Clone, Copy)]
pub enum End {
    Whole,
    Code(Code),
    /// The connection breaks.
    Break,
}

/// A call of the sidecar.
#[derive(Debug, Clone, PartialEq)]
pub struct SidecarRequest {
    pub token: String,
    pub base: String,
    pub snapshot: String,
    pub offset: i64,
}

/// The result of the next SnapshotSessionRequest, shortly after its creation.
#[derive(Clone)]
pub enum Fate {
    /// Ready, with this token.
    Ready(&'static str),
    /// This status.
    Status(Value),
    /// No status is set.
    Ignored,
}

#[derive(Clone)]
pub struct Cluster(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Objects by path; a list ends with its selector.
    objects: BTreeMap<String, Value>,
    /// The status codes of the next calls of the API server that fail, by path.
    failures: Vec<(String, u16)>,
    /// Every call to the API server: method and path.
    calls: Vec<String>,
    tokens: u32,
    fates: Vec<Fate>,
    /// Duration of the creation of a request, and whether the next response is lost.
    delay: Duration,
    lose_response: bool,
    /// Address and authority of the first sidecar, for sessions.
    place: (String, String),
    scripts: Vec<Script>,
    sidecar_requests: Vec<SidecarRequest>,
    servers: Vec<JoinHandle<()>>,
}

impl Cluster {
    /// VolumeSnapshots `a` and `b` in the namespace `shop`, of [`DRIVER`], and a sidecar for it
    /// that answers each call with the next script.
    pub async fn new(scripts: Vec<Script>) -> Self {
        let cluster = Self(Arc::default());
        cluster.state().scripts = scripts;
        for name in ["a", "b"] {
            let content = format!("content-{name}");
            let status = json!({ "boundVolumeSnapshotContentName": content });
            cluster
                .put(&snapshot_path(name), json!({ "spec": { "source": {} }, "status": status }));
            let status = json!({ "snapshotHandle": format!("handle-{name}") });
            let content = json!({ "spec": content_spec(name), "status": status });
            cluster.put(&content_path(name), content);
        }
        let (address, ca) = cluster.start_sidecar().await;
        cluster.put(&service_path(DRIVER), service(&address, &ca));
        cluster.state().place = (address, ca);
        cluster
    }

    /// With a session manager, which gives requests these results, one after the other.
    pub async fn with_sessions(scripts: Vec<Script>, fates: &[Fate]) -> Self {
        let cluster = Self::new(scripts).await;
        cluster.state().fates = fates.to_vec();
        cluster
    }

    /// The status of a session that is ready.
    pub fn ready(&self, token: &str) -> Value {
        let (address, ca) = self.state().place.clone();
        let ca = k8s_openapi::ByteString(ca.into_bytes());
        json!({
            "state": "Ready", "address": address, "caCert": ca, "sessionToken": token,
            "driver": DRIVER, "expirationTime": "2030-01-01T00:00:00Z",
        })
    }

    /// The existing SnapshotSessionRequests, by path.
    pub fn requests(&self) -> BTreeMap<String, Value> {
        let state = self.state();
        let all = state.objects.iter().filter(|(path, _)| path.starts_with(&request_path("")));
        all.map(|(path, object)| (path.clone(), object.clone())).collect()
    }

    /// Sets the status of a request.
    pub fn set_status(&self, path: &str, status: &Value) {
        let mut state = self.state();
        let Some(object) = state.objects.get_mut(path) else { return };
        object["status"] = status.clone();
        object["metadata"]["resourceVersion"] = json!("2");
    }

    /// From now on the creation of a request takes this long.
    pub fn delay(&self, delay: Duration) {
        self.state().delay = delay;
    }

    /// The next request is created, and its response is an error.
    pub fn lose_next_response(&self) {
        self.state().lose_response = true;
    }

    async fn create_request(&self, body: &[u8]) -> http::Response<Body> {
        let delay = self.state().delay;
        tokio::time::sleep(delay).await;
        let answer = self.created(body);
        match std::mem::take(&mut self.state().lose_response) {
            true => failure(504, "the response is lost"),
            false => answer,
        }
    }

    fn created(&self, body: &[u8]) -> http::Response<Body> {
        let mut request: Value = serde_json::from_slice(body).unwrap();
        let path = request_path(request["metadata"]["name"].as_str().unwrap());
        let mut state = self.state();
        if state.objects.contains_key(&path) {
            return failure(409, &format!("{path} exists"));
        }
        request["metadata"]["resourceVersion"] = json!("1");
        state.objects.insert(path.clone(), request.clone());
        let fate = state.fates.remove(0);
        drop(state);
        let status = match fate {
            Fate::Ready(token) => self.ready(token),
            Fate::Status(status) => status,
            Fate::Ignored => return respond(201, &request),
        };
        let cluster = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(30)).await;
            cluster.set_status(&path, &status);
        });
        respond(201, &request)
    }

    /// One event: the request in another version.
    async fn watched(&self, uri: &str) -> http::Response<Body> {
        let find = |name: &str| {
            let (_, value) = uri.split_once(name).unwrap();
            value.split('&').next().unwrap().to_owned()
        };
        let path = request_path(&find("metadata.name%3D"));
        let version = find("resourceVersion=");
        loop {
            let object = self.state().objects.get(&path).cloned();
            let kind = if object.is_some() { "MODIFIED" } else { "DELETED" };
            let object =
                object.unwrap_or_else(|| json!({ "metadata": {}, "spec": { "snapshots": [] } }));
            if object["metadata"]["resourceVersion"] != version.as_str() {
                return respond(200, &json!({ "type": kind, "object": object }));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub fn put(&self, path: &str, object: Value) {
        let name = path.rsplit('/').next();
        let mut whole = json!({ "metadata": { "name": name, "namespace": "shop" } });
        whole.as_object_mut().unwrap().extend(object.as_object().unwrap().clone());
        self.state().objects.insert(path.to_owned(), whole);
    }

    pub fn remove(&self, path: &str) {
        self.state().objects.remove(path).unwrap();
    }

    /// The next call of this path fails with this HTTP status.
    pub fn fail(&self, path: &str, code: u16) {
        self.state().failures.push((path.to_owned(), code));
    }

    pub fn sidecar_requests(&self) -> Vec<SidecarRequest> {
        self.state().sidecar_requests.clone()
    }

    pub fn calls(&self) -> Vec<String> {
        self.state().calls.clone()
    }

    /// Starts another sidecar; returns its address and its own authority.
    pub async fn start_sidecar(&self) -> (String, String) {
        let (acceptor, ca) = certificates();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("{HOST}:{}", listener.local_addr().unwrap().port());
        let cluster = self.clone();
        let accepting = tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (acceptor, cluster) = (acceptor.clone(), cluster.clone());
                tokio::spawn(async move {
                    let Ok(mut tls) = acceptor.accept(socket).await else { return };
                    let (ours, mut theirs) = tokio::io::duplex(1 << 16);
                    let (break_off, mut breaks) = tokio::sync::mpsc::channel(1);
                    let sidecar = Sidecar { cluster, break_off };
                    let incoming =
                        once(Ok::<_, std::io::Error>(ours)).chain(tokio_stream::pending());
                    let serving = Server::builder()
                        .add_service(SnapshotMetadataServer::new(sidecar.clone()))
                        .add_service(session_server::SnapshotMetadataServer::new(sidecar))
                        .serve_with_incoming(incoming);
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut tls, &mut theirs) => {}
                        _ = serving => {}
                        Some(()) = breaks.recv() => {}
                    }
                });
            }
        });
        self.state().servers.push(accepting);
        (address, ca)
    }

    /// A client of the API server.
    pub fn client(&self) -> kube::Client {
        let cluster = self.clone();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let cluster = cluster.clone();
            // As in a server: independent of whether the caller waits for the response.
            let answer = tokio::spawn(async move { cluster.answer(request).await });
            async move { answer.await.map_err(std::io::Error::other) }
        });
        kube::Client::new(service, "shop")
    }

    async fn answer(&self, request: http::Request<Body>) -> http::Response<Body> {
        let (uri, method) = (request.uri().to_string(), request.method().clone());
        let path = uri.split('?').next().unwrap().to_owned();
        let watch = uri.contains("watch=true");
        self.state().calls.push(format!("{method} {uri}"));
        if let Some(code) = self.failure(&path) {
            return failure(code, &format!("{path} fails"));
        }
        if watch {
            if let Some(code) = self.failure(WATCH) {
                return failure(code, "no watch");
            }
            return self.watched(&uri).await;
        }
        if method == http::Method::POST && path == request_path("") {
            let body = request.into_body().collect_bytes().await.unwrap();
            return self.create_request(&body).await;
        }
        let mut state = self.state();
        if method == http::Method::DELETE && state.objects.contains_key(&path) {
            return respond(200, &state.objects.remove(&path).unwrap());
        }
        if path.ends_with("/token") {
            state.tokens += 1;
            let token = format!("token-{}", state.tokens);
            let status = json!({ "token": token, "expirationTimestamp": "2030-01-01T00:00:00Z" });
            return respond(
                201,
                &json!({ "metadata": {}, "spec": { "audiences": [] }, "status": status }),
            );
        }
        match state.objects.get(&path) {
            Some(object) => respond(200, object),
            None => failure(404, &format!("{path} not found")),
        }
    }

    /// The status code with which a call of this path fails.
    fn failure(&self, path: &str) -> Option<u16> {
        let mut state = self.state();
        let at = state.failures.iter().position(|(begin, _)| *begin == path)?;
        Some(state.failures.remove(at).1)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.servers.iter().for_each(JoinHandle::abort);
    }
}

/// The spec of the content of a VolumeSnapshot.
pub fn content_spec(name: &str) -> Value {
    json!({
        "driver": DRIVER, "volumeSnapshotRef": { "namespace": "shop", "name": name },
        "deletionPolicy": "Delete", "source": {},
    })
}

pub fn snapshot_path(name: &str) -> String {
    format!("/apis/snapshot.storage.k8s.io/v1/namespaces/shop/volumesnapshots/{name}")
}

pub fn content_path(name: &str) -> String {
    format!("/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents/content-{name}")
}

/// Of all of them, if the name is empty.
pub fn service_path(name: &str) -> String {
    let path = format!("/apis/cbt.storage.k8s.io/v1beta1/snapshotmetadataservices/{name}");
    path.trim_end_matches('/').to_owned()
}

/// Of all of them, if the name is empty.
pub fn request_path(name: &str) -> String {
    let path =
        format!("/apis/cbt.storage.k8s.io/v1alpha2/namespaces/shop/snapshotsessionrequests/{name}");
    path.trim_end_matches('/').to_owned()
}

/// Stands for the path of every watch.
pub const WATCH: &str = "watch";

pub const REVIEW_PATH: &str = "/apis/authentication.k8s.io/v1/selfsubjectreviews";

/// A SnapshotMetadataService.
pub fn service(address: &str, ca: &str) -> Value {
    let ca = k8s_openapi::ByteString(ca.as_bytes().to_vec());
    json!({ "spec": { "address": address, "audience": "aud", "caCert": ca } })
}

fn respond(code: u16, body: &Value) -> http::Response<Body> {
    let body = Body::from(serde_json::to_vec(body).unwrap());
    http::Response::builder().status(code).body(body).unwrap()
}

fn failure(code: u16, message: &str) -> http::Response<Body> {
    let reason = if code == 404 { "NotFound" } else { "" };
    respond(
        code,
        &json!({ "status": "Failure", "code": code, "message": message, "reason": reason }),
    )
}

/// A certificate for [`HOST`] of a new authority, which is returned as PEM.
fn certificates() -> (TlsAcceptor, String) {
    let authority_key = KeyPair::generate().unwrap();
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = authority.self_signed(&authority_key).unwrap().pem();
    let issuer = Issuer::new(authority, authority_key);
    let key = KeyPair::generate().unwrap();
    let leaf =
        CertificateParams::new(vec![HOST.to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![leaf.der().clone()], key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    (TlsAcceptor::from(Arc::new(config)), ca)
}

/// The service of one connection.
#[derive(Clone)]
struct Sidecar {
    cluster: Cluster,
    break_off: tokio::sync::mpsc::Sender<()>,
}

type Messages = Pin<Box<dyn Stream<Item = Result<RawMessage, Status>> + Send>>;

impl Sidecar {
    fn play(
        &self,
        [token, base, snapshot]: [String; 3],
        offset: i64,
        encode: fn(k8s::GetMetadataDeltaResponse) -> RawMessage,
    ) -> Result<Response<Messages>, Status> {
        let mut state = self.cluster.state();
        state.sidecar_requests.push(SidecarRequest { token, base, snapshot, offset });
        let last = state.sidecar_requests.last();
        assert!(!state.scripts.is_empty(), "no script remains for {last:?}");
        let Script { capacity, style, messages, end } = state.scripts.remove(0);
        let message = move |blocks: Vec<(i64, i64)>| {
            let block = |(byte_offset, size_bytes)| k8s::BlockMetadata { byte_offset, size_bytes };
            Ok(encode(k8s::GetMetadataDeltaResponse {
                block_metadata_type: style.into(),
                volume_capacity_bytes: capacity,
                block_metadata: blocks.into_iter().map(block).collect(),
            }))
        };
        let messages: Vec<_> = messages.into_iter().map(message).collect();
        Ok(Response::new(match end {
            End::Whole => Box::pin(iter(messages)),
            End::Code(code) if messages.is_empty() => return Err(Status::new(code, "scripted")),
            End::Code(code) => {
                Box::pin(iter(messages).chain(once(Err(Status::new(code, "scripted")))))
            }
            End::Break => {
                let (sender, receiver) = tokio::sync::mpsc::channel(1);
                let break_off = self.break_off.clone();
                tokio::spawn(async move {
                    for message in messages {
                        let _ = sender.send(message).await;
                    }
                    // Sent messages must arrive.
                    tokio::time::sleep(Duration::from_millis(300)).await;
                    let _ = break_off.send(()).await;
                    sender.closed().await;
                });
                Box::pin(ReceiverStream::new(receiver))
            }
        }))
    }
}

#[tonic::async_trait]
impl SnapshotMetadata for Sidecar {
    type GetMetadataAllocatedStream = Messages;
    type GetMetadataDeltaStream = Messages;

    async fn get_metadata_allocated(
        &self,
        request: Request<k8s::GetMetadataAllocatedRequest>,
    ) -> Result<Response<Messages>, Status> {
        let request = request.into_inner();
        assert_eq!(request.namespace, "shop");
        let names = [request.security_token, String::new(), request.snapshot_name];
        self.play(names, request.starting_offset, |message| RawMessage::of(&message))
    }

    async fn get_metadata_delta(
        &self,
        request: Request<k8s::GetMetadataDeltaRequest>,
    ) -> Result<Response<Messages>, Status> {
        let request = request.into_inner();
        assert_eq!(request.namespace, "shop");
        let k8s::GetMetadataDeltaRequest { security_token, base_snapshot_id, .. } = request;
        let names = [security_token, base_snapshot_id, request.target_snapshot_name];
        self.play(names, request.starting_offset, |message| RawMessage::of(&message))
    }
}

/// The same message in the session API, whose responses to both calls have one layout.
fn of_session(message: k8s::GetMetadataDeltaResponse) -> RawMessage {
    let block = |block: k8s::BlockMetadata| sessions::BlockMetadata {
        byte_offset: block.byte_offset as u64,
        size_bytes: block.size_bytes as u64,
    };
    RawMessage::of(&sessions::GetDeltaResponse {
        block_metadata_type: message.block_metadata_type - 1,
        volume_size_bytes: message.volume_capacity_bytes as u64,
        block_metadata: message.block_metadata.into_iter().map(block).collect(),
    })
}

#[tonic::async_trait]
impl session_server::SnapshotMetadata for Sidecar {
    type GetAllocatedStream = Messages;
    type GetDeltaStream = Messages;

    async fn get_allocated(
        &self,
        request: Request<sessions::GetAllocatedRequest>,
    ) -> Result<Response<Messages>, Status> {
        let request = request.into_inner();
        let names = [request.session_token, String::new(), request.snapshot];
        self.play(names, request.starting_offset as i64, of_session)
    }

    async fn get_delta(
        &self,
        request: Request<sessions::GetDeltaRequest>,
    ) -> Result<Response<Messages>, Status> {
        let request = request.into_inner();
        let names = [request.session_token, request.base_snapshot, request.target_snapshot];
        self.play(names, request.starting_byte_offset as i64, of_session)
    }
}
