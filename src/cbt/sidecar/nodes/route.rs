//! The way from a snapshot to its driver: a label of its VolumeSnapshotContent names the node, the
//! EndpointSlices of a Service have the address of the node's sidecar. A connection is made when it
//! is needed, to a server whose certificate has the node's name and was signed for nodes.

use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::Status;
use tonic_types::StatusExt;

use super::signer::{self, Policy};
use super::{Args, audience};
use crate::sidecar::driver_link::{DriverLink, DriverRequest, MetadataStream};
use crate::sidecar::metrics::Metrics;
use crate::sidecar::refusal::{DOMAIN, Reason, Refusal};
use crate::sidecar::relay::of_driver;
use crate::sidecar::service::remaining;
use kubernetes::cache::Clients;
use kubernetes::node_endpoints::NodeEndpoints;
use kubernetes::own_tokens::{self, Token, Tokens};
use kubernetes::secret::Secrets;
use kubernetes::snapshot::MANAGED_BY;
use kubernetes::tls;
use telemetry::memo::{Keep, Memo};
use telemetry::shutdown::Shutdown;

/// Maximum number of connected nodes, and time to keep an unused connection.
const MAX_NODES: u64 = 8192;
const IDLE: Duration = Duration::from_secs(600);
/// Timeout of a connection with its handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The nodes of one driver. Clones share the connections.
#[derive(Clone)]
pub struct Nodes {
    driver: String,
    /// Maximum number of streams.
    streams: usize,
    endpoints: NodeEndpoints,
    tokens: Tokens,
    trusted: watch::Receiver<Arc<ClientConfig>>,
    links: Memo<String, Link>,
}

#[derive(Clone)]
struct Link {
    address: SocketAddr,
    driver: DriverLink,
}

impl Nodes {
    /// Starts to watch the endpoints, with `--node-service`. `namespace` is that of the program.
    ///
    /// # Errors
    /// `--node-ca` has no certificate, or `--node-signer` no authority.
    pub async fn start(
        args: &Args,
        streams: usize,
        clients: Clients,
        namespace: Option<&str>,
        metrics: &Metrics,
        shutdown: &Shutdown,
    ) -> anyhow::Result<Option<Self>> {
        let Args { node_service, driver_name, front_account, .. } = args;
        let (Some(service), Some(driver), Some(account)) =
            (node_service, driver_name, front_account)
        else {
            return Ok(None);
        };
        let trusted = match (&args.node_ca, &args.node_signer, &args.node_account, namespace) {
            (Some(ca), ..) => {
                let parse = |pem: &str| tls::client_config(pem.as_bytes()).map(Arc::new);
                tls::watch_authorities("--node-ca", ca, parse, shutdown.clone())?
            }
            (None, Some(signer), Some(account), Some(namespace)) => {
                let policy = Policy { signer: signer.clone(), account: account.clone() };
                let secret = (namespace, args.node_signer_secret.clone());
                signer::start(policy, secret, clients.clone(), metrics, shutdown).await?
            }
            _ => return Ok(None),
        };
        let tokens = Tokens::new(clients.lookups.clone(), &account.namespace, &account.name);
        Ok(Some(Self {
            driver: driver.clone(),
            streams,
            endpoints: NodeEndpoints::start(clients, service.clone(), shutdown.clone()),
            tokens,
            trusted,
            links: Memo::new(MAX_NODES, Keep::Unused(IDLE)),
        }))
    }

    /// Calls the driver on the node that holds the snapshot.
    pub async fn get_metadata(
        &self,
        node: Option<&str>,
        request: DriverRequest,
        secrets: &Secrets,
        deadline: Instant,
    ) -> Result<MetadataStream, Refusal> {
        let node = node.ok_or_else(no_node)?;
        let link = self.link(node).await?;
        let no_token = |error: Arc<kube::Error>| Refusal::api(own_tokens::REQUESTING, &error);
        let is_refused = |refusal: &Refusal| refusal.reason == Reason::NodeRefused;
        let call = |token: Arc<Token>| {
            let (link, request) = (link.with_token(&token.text), request.clone());
            async move {
                let answer = link.get_metadata(request, secrets.reveal(), remaining(deadline));
                answer.await.map_err(|status| of_node(&status, node, secrets))
            }
        };
        self.tokens.call(&audience(&self.driver, node), no_token, is_refused, call).await
    }

    /// The connection to the node's sidecar.
    async fn link(&self, node: &str) -> Result<DriverLink, Refusal> {
        let address = self.address(node).await?;
        if let Some(link) = self.links.get(node).filter(|link| link.address == address) {
            return Ok(link.driver);
        }
        let driver = self.connection(node, address)?;
        self.links.insert(node.to_owned(), Link { address, driver: driver.clone() });
        Ok(driver)
    }

    async fn address(&self, node: &str) -> Result<SocketAddr, Refusal> {
        let unread = |error: &kube::Error| Refusal::api("read EndpointSlices", error);
        if let Some(address) = self.endpoints.on(node).await.map_err(|error| unread(&error))? {
            return Ok(address);
        }
        match self.endpoints.has_node(node).await {
            Ok(true) => Err(away(node, "it has no ready sidecar")),
            Ok(false) => Err(gone(node)),
            Err(error) => Err(Refusal::api("read Nodes", &error)),
        }
    }

    fn connection(&self, node: &str, address: SocketAddr) -> Result<DriverLink, Refusal> {
        let name = ServerName::try_from(node.to_owned());
        let name = name.map_err(|_| away(node, "its name cannot be that of a certificate"))?;
        let trusted = self.trusted.clone();
        Ok(DriverLink::remote(&self.driver, self.streams, move || {
            let (name, trusted) = (name.clone(), trusted.borrow().clone());
            async move { connect(address, name, trusted).await.map(TokioIo::new) }
        }))
    }
}

async fn connect(
    address: SocketAddr,
    name: ServerName<'static>,
    trusted: Arc<ClientConfig>,
) -> io::Result<TlsStream<TcpStream>> {
    let connecting = async {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        TlsConnector::from(trusted).connect(name, stream).await
    };
    timeout(CONNECT_TIMEOUT, connecting).await?
}

/// Whether the node's sidecar, not its driver, refused the token.
fn is_token_refused(status: &Status) -> bool {
    let is_own = |reason: Reason| own_reason(status) == Some(reason.label().to_uppercase());
    is_own(Reason::Unauthenticated) || is_own(Reason::NotAllowed)
}

/// The reason of a sidecar of this project.
fn own_reason(status: &Status) -> Option<String> {
    let info = status.get_details_error_info()?;
    (info.domain == DOMAIN).then_some(info.reason)
}

/// Maps an error of a node's sidecar for the client. What the sidecar explained is relayed as it is.
pub fn of_node(status: &Status, node: &str, secrets: &Secrets) -> Refusal {
    if is_token_refused(status) {
        let message = format!(
            "the sidecar of node {node} refused this sidecar: {}; compare --front-account, --driver-name and \
             --serve-node of both",
            status.message()
        );
        return Refusal::new(Reason::NodeRefused, message);
    }
    if let Some(mut cause) = status.source() {
        while let Some(next) = cause.source() {
            cause = next;
        }
        return away(node, &cause.to_string());
    }
    match own_reason(status) {
        Some(_) => Refusal::new(Reason::Driver(status.code()), status.message()),
        None => of_driver(status, secrets),
    }
}

fn away(node: &str, why: &str) -> Refusal {
    let message = format!(
        "node {node}, which holds the snapshot, cannot be reached: {why}; retry later, a stream at starting_offset"
    );
    Refusal::new(Reason::NodeAway, message)
}

fn gone(node: &str) -> Refusal {
    let message = format!(
        "node {node}, which held the snapshot, no longer exists, and its data is gone with it; take a full backup of \
         another volume, or restore from a backup"
    );
    Refusal::new(Reason::NodeGone, message)
}

fn no_node() -> Refusal {
    let message = format!(
        "the snapshot's VolumeSnapshotContent does not name its node (label {MANAGED_BY}): start the \
         snapshot-controller with --enable-distributed-snapshotting and take another snapshot; set the label of an \
         imported one yourself"
    );
    Refusal::new(Reason::NoNode, message)
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn a_refused_token_of_ours_is_not_reported_as_the_clients() {
        let none = Secrets::default();
        let refused = Refusal::new(Reason::Unauthenticated, "security_token: it has expired");
        let refusal = of_node(&refused.status(), "node-1", &none);
        assert_eq!((refusal.reason, refusal.code()), (Reason::NodeRefused, Code::Internal));
        // The driver's own code passes, as it does without nodes.
        let driver = of_node(&Status::unauthenticated("wrong user"), "node-1", &none);
        assert_eq!(driver.code(), Code::Unauthenticated);
    }

    #[test]
    fn what_a_node_has_explained_is_relayed_unchanged() {
        let secrets = Secrets::default();
        let once = of_driver(&Status::failed_precondition("the chain is broken"), &secrets);
        let twice = of_node(&once.status(), "node-1", &secrets);
        assert_eq!((twice.code(), twice.message()), (once.code(), once.message()));
        let lost = Status::from_error(Box::new(io::Error::other("reset by peer")));
        let refusal = of_node(&lost, "node-1", &secrets);
        assert_eq!(refusal.reason, Reason::NodeAway);
        for words in ["node-1", "reset by peer"] {
            assert!(refusal.message().contains(words), "{refusal:?}");
        }
    }
}
