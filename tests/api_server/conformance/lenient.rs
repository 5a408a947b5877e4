//! A sidecar with one fault, in front of this project's sidecar: it accepts what it must refuse, or
//! refuses in another way.

use std::fs;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use csi_loopback::grpc::RawMessage;
use csi_loopback::proto::snapshotmetadata as api;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::Value;
use support::cluster::sidecar::channel;
use support::cluster::sidecar_rig::{AUDIENCE, Rig};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status, Streaming};

use api::snapshot_metadata_client::SnapshotMetadataClient;
use api::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};

/// What a sidecar does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    AcceptsNoToken,
    AcceptsInvalidToken,
    AcceptsOtherAudience,
    AcceptsNoRights,
    AcceptsNoNamespace,
    RepeatsToken,
    NotFoundIsUnavailable,
}

/// Dropping it stops it.
pub struct Lenient {
    pub port: u16,
    service: Service,
    task: JoinHandle<()>,
}

#[derive(Clone)]
struct Service {
    fault: Arc<Mutex<Fault>>,
    real: Channel,
    namespace: String,
    /// What it puts in the place of what it accepts, and the caller that needs no replacement.
    token: String,
    user: String,
}

impl Lenient {
    pub fn start(rig: &Rig<'_>, token: String, user: String) -> Self {
        let certificate = rig.authority.certify(rig.driver.scratch(), "lenient");
        let acceptor = acceptor(&certificate.file, &certificate.key);
        let real = rig.cluster.block_on(async { channel(rig.sidecar.port, &rig.authority.pem()) });
        let service = Service {
            fault: Arc::new(Mutex::new(Fault::None)),
            real,
            namespace: rig.namespace.clone(),
            token,
            user,
        };
        let listener = rig.cluster.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let port = listener.local_addr().unwrap().port();
        let task = rig.cluster.spawn_task(serve(listener, acceptor, service.clone()));
        Self { port, service, task }
    }

    pub fn set(&self, fault: Fault) {
        *self.service.fault.lock().unwrap() = fault;
    }
}

impl Drop for Lenient {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn acceptor(file: &std::path::Path, key: &std::path::Path) -> TlsAcceptor {
    let pem = fs::read(file).unwrap();
    let chain = CertificateDer::pem_slice_iter(&pem).map(Result::unwrap).collect();
    let key = PrivateKeyDer::from_pem_slice(&fs::read(key).unwrap()).unwrap();
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(ring)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

async fn serve(listener: TcpListener, acceptor: TlsAcceptor, service: Service) {
    while let Ok((stream, _)) = listener.accept().await {
        let (acceptor, service) = (acceptor.clone(), service.clone());
        stream.set_nodelay(true).unwrap();
        tokio::spawn(async move {
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let service = TowerToHyperService::new(SnapshotMetadataServer::new(service));
            let builder = Builder::new(TokioExecutor::new());
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

impl Service {
    fn fault(&self) -> Fault {
        *self.fault.lock().unwrap()
    }

    /// What is wrong with a call, before its signature is verified.
    fn visible(&self, token: &str, namespace: &str) -> Fault {
        let claims = token.split('.').nth(1).map(|claims| URL_SAFE_NO_PAD.decode(claims).unwrap());
        let claims: Value = serde_json::from_slice(&claims.unwrap_or_default()).unwrap_or_default();
        if token.is_empty() {
            Fault::AcceptsNoToken
        } else if namespace.is_empty() {
            Fault::AcceptsNoNamespace
        } else if claims["aud"][0] != AUDIENCE {
            Fault::AcceptsOtherAudience
        } else if claims["sub"] != self.user.as_str() {
            Fault::AcceptsNoRights
        } else {
            Fault::None
        }
    }

    /// Replaces token and namespace if the fault accepts those of the call.
    fn correct(&self, token: &mut String, namespace: &mut String) {
        let fault = self.fault();
        let is_accepted = match self.visible(token, namespace) {
            // The signature may be invalid.
            Fault::None => fault == Fault::AcceptsInvalidToken,
            wrong => fault == wrong,
        };
        if is_accepted {
            token.clone_from(&self.token);
            namespace.clone_from(&self.namespace);
        }
    }

    fn refusal(&self, status: Status, token: &str) -> Status {
        match (self.fault(), status.code()) {
            (Fault::RepeatsToken, code) => {
                Status::new(code, format!("{} ({token})", status.message()))
            }
            (Fault::NotFoundIsUnavailable, Code::NotFound) => Status::unavailable(status.message()),
            _ => status,
        }
    }
}

/// The messages of a response.
type Raw = Pin<Box<dyn Stream<Item = Result<RawMessage, Status>> + Send>>;

fn raw<M: prost::Message + 'static>(response: Response<Streaming<M>>) -> Raw {
    Box::pin(response.into_inner().map(|message| message.map(|message| RawMessage::of(&message))))
}

#[tonic::async_trait]
impl SnapshotMetadata for Service {
    type GetMetadataAllocatedStream = Raw;
    type GetMetadataDeltaStream = Raw;

    async fn get_metadata_allocated(
        &self,
        request: Request<api::GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        let mut request = request.into_inner();
        let token = request.security_token.clone();
        self.correct(&mut request.security_token, &mut request.namespace);
        let mut client = SnapshotMetadataClient::new(self.real.clone());
        let response = client.get_metadata_allocated(request).await;
        Ok(Response::new(raw(response.map_err(|status| self.refusal(status, &token))?)))
    }

    async fn get_metadata_delta(
        &self,
        request: Request<api::GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        let mut request = request.into_inner();
        let token = request.security_token.clone();
        self.correct(&mut request.security_token, &mut request.namespace);
        let mut client = SnapshotMetadataClient::new(self.real.clone());
        let response = client.get_metadata_delta(request).await;
        Ok(Response::new(raw(response.map_err(|status| self.refusal(status, &token))?)))
    }
}
