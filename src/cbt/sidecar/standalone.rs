//! The sidecar without a cluster (`csi-loopback dev`): TLS with an authority of its own, tokens that
//! are given, and VolumeSnapshots that are the driver's own snapshots. The snapshot `shop.monday` is
//! the VolumeSnapshot `monday` of the namespace `shop`, if that namespace is configured; every other
//! one is in the first namespace.

use std::net::{Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, bail};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::access::{User, not_allowed};
use super::args::Args;
use super::directory::{Directory, Handles};
use super::driver_link::{Driver, DriverLink};
use super::metrics::Metrics;
use super::publish::Service;
use super::refusal::{Reason, Refusal};
use super::relay::of_driver;
use super::request::{MetadataRequest, Token};
use super::resolve::{BASE_ID, foreign_base};
use super::server;
use super::snapshot_metadata::SnapshotMetadataApi;
use common::ids;
use grpc::proto::csi::v1::Snapshot;
use grpc::proto::snapshotmetadata::snapshot_metadata_server::SnapshotMetadataServer;
use grpc::reflection;
use kubernetes::bound_snapshot::{NotReady, OtherVolume, Problem};
use kubernetes::cache::Key;
use kubernetes::name;
use kubernetes::publish::Publication;
use kubernetes::secret::Secrets;
use kubernetes::tls::authority;
use telemetry::peer::Peer;
use telemetry::shutdown::Shutdown;
use telemetry::task;

/// A token, and the namespaces whose VolumeSnapshots its user may get; all without any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticToken {
    token: Token,
    namespaces: Vec<String>,
}

impl StaticToken {
    /// A token for all namespaces.
    pub fn for_all(token: String) -> Self {
        Self { token: token.into(), namespaces: Vec::new() }
    }

    /// For the output of the command.
    pub fn reveal(&self) -> &str {
        self.token.reveal()
    }

    fn may_get(&self, namespace: &str) -> bool {
        self.namespaces.is_empty() || self.namespaces.iter().any(|one| one == namespace)
    }
}

impl FromStr for StaticToken {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (token, namespaces) = text.split_once('=').unwrap_or((text, ""));
        let is_plain = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
        let namespaces: Vec<_> =
            namespaces.split(',').filter(|one| !one.is_empty()).map(str::to_owned).collect();
        match namespaces.iter().find(|one| !name::is_namespace(one)) {
            Some(bad) => Err(format!("{bad:?} is not the name of a namespace")),
            None if !is_plain => Err("is not TOKEN or TOKEN=NAMESPACE,…".into()),
            None => Ok(Self { token: token.to_owned().into(), namespaces }),
        }
    }
}

/// What clients need to call the sidecar.
pub struct Started {
    pub address: SocketAddr,
    /// The certificate to trust (PEM).
    pub ca: String,
    /// The SnapshotMetadataService that a cluster would have.
    pub object: Value,
    /// Ends when the shutdown has ended all calls.
    pub served: JoinHandle<()>,
}

/// Starts to serve on 127.0.0.1, and returns when the driver is ready.
///
/// # Errors
/// The port is in use, or the driver is not ready.
pub async fn start(
    args: Args,
    namespaces: Vec<String>,
    tokens: Vec<StaticToken>,
    shutdown: Shutdown,
) -> anyhow::Result<Started> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port)).await;
    let listener = listener.with_context(|| format!("--port {}", args.port))?;
    let address = listener.local_addr()?;
    let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
    let (certificates, ca) = authority::in_memory("dev", &names)?;
    let driver = server::driver(&args, &shutdown);
    let audience = ready(&driver).await?;
    let metrics = Metrics::new(|_| ());
    let sidecar = server::sidecar(&args, &driver, &metrics, &shutdown);
    let directory = Standalone { driver, namespaces, tokens: tokens.into() };
    let mut routes = tonic::service::Routes::builder();
    routes.add_service(SnapshotMetadataServer::new(SnapshotMetadataApi { sidecar, directory }));
    let reflected = reflection::service(&["snapshotmetadata.SnapshotMetadata"])?;
    routes.add_service(reflected);
    let incoming = server::accept(&args, listener, certificates, &shutdown)?;
    let served = task::spawn(server::serve_grpc(
        server::longest(&args),
        incoming,
        routes.routes(),
        shutdown,
    ));
    let service = Service {
        driver: audience.clone(),
        address: address.to_string().parse().map_err(anyhow::Error::msg)?,
        audience,
        requires_base: Some(false),
    };
    Ok(Started { address, object: service.desired(None, &ca)?, ca, served })
}

/// Waits for the driver, and returns its name.
async fn ready(link: &DriverLink) -> anyhow::Result<String> {
    let mut state = link.state();
    let ready = state.wait_for(|driver| matches!(driver, Driver::Ready { .. })).await;
    match ready.context("the driver has stopped")?.clone() {
        Driver::Ready { name, .. } => Ok(name),
        Driver::NotReady(why) => bail!("the driver is not ready: {why}"),
    }
}

/// A directory without a cluster.
#[derive(Clone)]
struct Standalone {
    driver: DriverLink,
    namespaces: Vec<String>,
    tokens: Arc<[StaticToken]>,
}

impl Standalone {
    /// Namespace and name of a snapshot as a VolumeSnapshot.
    fn key(&self, snapshot: &Snapshot) -> Option<Key> {
        let name = ids::name_of(&snapshot.snapshot_id)?;
        let of = |namespace: &String| {
            let name = name.strip_prefix(namespace.as_str())?.strip_prefix('.')?;
            Some(Key::new(namespace, name))
        };
        let first = || self.namespaces.first().map(|namespace| Key::new(namespace, name));
        self.namespaces.iter().find_map(of).or_else(first)
    }

    async fn snapshots(&self) -> Result<Vec<(Key, Snapshot)>, Refusal> {
        let listed = self.driver.snapshots().await;
        let listed = listed.map_err(|status| of_driver(&status, &Secrets::default()))?;
        let named = listed.into_iter().filter_map(|one| Some((self.key(&one)?, one)));
        Ok(named.collect())
    }
}

/// The user of a token, who is named after its number.
struct Holder {
    name: String,
    token: StaticToken,
}

impl User for Holder {
    fn username(&self) -> Option<&str> {
        Some(&self.name)
    }

    async fn authorize(&self, namespace: &str) -> Result<(), Refusal> {
        match self.token.may_get(namespace) {
            true => Ok(()),
            false => Err(not_allowed(self.username(), namespace)),
        }
    }
}

impl Directory for Standalone {
    type Caller = Holder;

    async fn authenticate(&self, request: &MetadataRequest, _: Peer) -> Result<Holder, Refusal> {
        match (1..).zip(self.tokens.iter()).find(|(_, one)| one.token == request.token) {
            Some((number, token)) => {
                Ok(Holder { name: format!("token-{number}"), token: token.clone() })
            }
            None => Err(Refusal::new(
                Reason::Unauthenticated,
                "security_token: is not one of the tokens that csi-loopback dev has printed or was given",
            )),
        }
    }

    async fn handles(
        &self,
        _driver: &str,
        request: &MetadataRequest,
        caller: &Holder,
    ) -> Result<Handles, Refusal> {
        let snapshots = self.snapshots().await?;
        let key = Key::new(&request.namespace, &request.target);
        let target = snapshots.iter().find(|(other, _)| *other == key);
        let (_, target) = target.ok_or_else(|| Refusal::from(Problem::Missing(key.clone())))?;
        if !target.ready_to_use {
            return Err(Problem::from(NotReady::Snapshot(key)).into());
        }
        let has_id = |(_, snapshot): &&(Key, Snapshot)| {
            request.base.as_ref().is_some_and(|base| snapshot.snapshot_id == *base)
        };
        // Whether a deleted snapshot can be a base is the driver's decision.
        if let Some((home, base)) = snapshots.iter().find(has_id) {
            if home.namespace != request.namespace && !caller.token.may_get(&home.namespace) {
                return Err(foreign_base(&request.namespace, Some(&caller.name)));
            }
            if base.source_volume_id != target.source_volume_id {
                let message = format!("{BASE_ID}: {OtherVolume}");
                return Err(Refusal::new(Reason::OtherVolume, message));
            }
        }
        Ok(Handles {
            target: target.snapshot_id.clone(),
            base: request.base.clone(),
            secrets: Secrets::default(),
            node: None,
        })
    }

    async fn is_name(&self, namespace: &str, text: &str) -> bool {
        let key = Key::new(namespace, text);
        self.snapshots().await.is_ok_and(|all| all.iter().any(|(other, _)| *other == key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_names_the_namespaces_of_its_user() {
        let token: StaticToken = "secret=shop,bank".parse().unwrap();
        assert!(token.may_get("shop") && token.may_get("bank") && !token.may_get("default"));
        assert!("secret".parse::<StaticToken>().unwrap().may_get("default"));
        for bad in ["", "=shop", "a b", "secret=Shop", "secret=a/b"] {
            assert!(bad.parse::<StaticToken>().is_err(), "{bad}");
        }
    }
}
