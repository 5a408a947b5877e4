//! One call to a driver's sidecar: TLS that trusts the SnapshotMetadataService's certificates alone, and the
//! Kubernetes SnapshotMetadata API over it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, anyhow};
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint, Uri};

use super::super::block_map::{Answer, Message, Query, Window};
use super::super::connection::Deadline;
use super::failure::{Failure, Retry, Subject};
use super::find::Service;
use crate::kubernetes::tls;
use crate::proto::csi::v1 as csi;
use crate::proto::snapshotmetadata as k8s;
use k8s::snapshot_metadata_client::SnapshotMetadataClient;

/// How long connecting may take, the TLS handshake included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How often to ask whether the other side is there still. Servers in Go, by default, hang up on those
/// who ask more than every five minutes.
const PING_INTERVAL: Duration = Duration::from_secs(310);
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// The longest message, in bytes: more than the sidecar passes on.
const LONGEST_MESSAGE: usize = 33 << 20;

/// An answer of the sidecar.
pub type Sidecar = Answer<k8s::GetMetadataAllocatedResponse, k8s::GetMetadataDeltaResponse>;

/// The responses of the Kubernetes API, whose numbers are CSI's.
macro_rules! message_of {
    ($($response:ty),*) => {$(
        impl From<$response> for Message {
            fn from(response: $response) -> Self {
                let block_metadata_type = response.block_metadata_type.try_into();
                let block = |block: k8s::BlockMetadata| csi::BlockMetadata {
                    byte_offset: block.byte_offset,
                    size_bytes: block.size_bytes,
                };
                Self {
                    block_metadata_type: block_metadata_type
                        .unwrap_or(csi::BlockMetadataType::Unknown),
                    volume_capacity_bytes: response.volume_capacity_bytes,
                    block_metadata: response.block_metadata.into_iter().map(block).collect(),
                }
            }
        }
    )*};
}

message_of!(k8s::GetMetadataAllocatedResponse, k8s::GetMetadataDeltaResponse);

/// Asks the sidecar, over a connection of its own.
pub async fn open(
    service: &Service,
    token: String,
    query: Query,
    window: Window,
    subject: &Subject<'_>,
    deadline: Instant,
) -> Result<Sidecar, Failure> {
    let channel = connect(service).await?;
    let mut client = SnapshotMetadataClient::with_interceptor(channel, Deadline(deadline))
        .max_decoding_message_size(LONGEST_MESSAGE);
    let Window { starting_offset, max_results } = window;
    let namespace = subject.namespace.to_owned();
    let answer = match query {
        Query::Allocated { snapshot } => {
            let request = k8s::GetMetadataAllocatedRequest {
                security_token: token,
                namespace,
                snapshot_name: snapshot,
                starting_offset,
                max_results,
            };
            client.get_metadata_allocated(request).await.map(Sidecar::allocated)
        }
        Query::Delta { base, target } => {
            let request = k8s::GetMetadataDeltaRequest {
                security_token: token,
                namespace,
                base_snapshot_id: base,
                target_snapshot_name: target,
                starting_offset,
                max_results,
            };
            client.get_metadata_delta(request).await.map(Sidecar::delta)
        }
    };
    answer.map_err(|status| Failure::stream(status, subject))
}

/// A channel over one connection: when that breaks, so does the answer, and whoever asks again begins with
/// the SnapshotMetadataService, which may have changed.
async fn connect(service: &Service) -> Result<Channel, Failure> {
    let address = &service.address;
    let unusable =
        |error: anyhow::Error| Failure::never(error.context(format!("address {address:?}")));
    let endpoint = Endpoint::from_shared(format!("https://{address}"))
        .map_err(|error| unusable(error.into()))?
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    let stream = match timeout(CONNECT_TIMEOUT, handshake(service)).await {
        Ok(stream) => stream?,
        Err(_) => {
            let seconds = CONNECT_TIMEOUT.as_secs();
            let error = anyhow!("cannot connect to {address} within {seconds} s");
            return Err(Failure::new(Retry::Always, error));
        }
    };
    let stream = Arc::new(Mutex::new(Some(TokioIo::new(stream))));
    let once = tower::service_fn(move |_: Uri| {
        let stream = stream.lock().unwrap_or_else(PoisonError::into_inner).take();
        async move { stream.ok_or_else(|| std::io::Error::other("the connection is used up")) }
    });
    endpoint.connect_with_connector(once).await.map_err(|error| {
        let error = anyhow::Error::from(error).context(format!("cannot connect to {address}"));
        Failure::new(Retry::Always, error)
    })
}

async fn handshake(service: &Service) -> Result<TlsStream<TcpStream>, Failure> {
    let Service { address, host, ca, .. } = service;
    let name = ServerName::try_from(host.clone())
        .with_context(|| format!("{host:?} is not a host's name"))
        .map_err(Failure::never)?;
    let config = tls::client_config(ca)
        .context("the caCert of the SnapshotMetadataService")
        .map_err(|error| Failure::new(Retry::OnceBegun, error))?;
    let unreachable = |error: std::io::Error| {
        // A certificate that is not trusted is no matter of time, unless it is being renewed.
        let refused = error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>());
        let retry = if refused { Retry::OnceBegun } else { Retry::Always };
        let what = if refused {
            format!(
                "TLS with {address}, whose certificate must be for {host:?} and from the caCert of its \
                 SnapshotMetadataService"
            )
        } else {
            format!(
                "cannot connect to {address} (from outside of the cluster: port-forward, --address)"
            )
        };
        Failure::new(retry, anyhow::Error::from(error).context(what))
    };
    let socket = TcpStream::connect(address).await.map_err(unreachable)?;
    let connector = TlsConnector::from(Arc::new(config));
    connector.connect(name, socket).await.map_err(unreachable)
}
