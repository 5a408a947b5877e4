//! What the released API must know besides the driver's responses: who the caller is, what they may
//! read, and which handles the names of a request have. [`Cluster`] reads it from Kubernetes;
//! [`Standalone`](super::standalone::Standalone) knows it without a cluster.

use tokio::sync::watch;

use super::access::{Authenticator, Caller, User, authenticate};
use super::driver_link::DriverLink;
use super::refusal::Refusal;
use super::request::MetadataRequest;
use super::resolve::Resolver;
use super::secrets::SecretFinder;
use kubernetes::bound_snapshot::Snapshot;
use kubernetes::cache::Key;
use kubernetes::secret::Secrets;
use telemetry::peer::Peer;

/// Answers the first and the last of these questions; the [`User`] of the first answers the second.
pub trait Directory: Clone + Send + Sync + 'static {
    type Caller: User;

    fn authenticate(
        &self,
        request: &MetadataRequest,
        peer: Peer,
    ) -> impl Future<Output = Result<Self::Caller, Refusal>> + Send;

    /// The handles of the request's snapshots, after checks that the user may use them and that
    /// they fit each other.
    fn handles(
        &self,
        driver: &str,
        request: &MetadataRequest,
        caller: &Self::Caller,
    ) -> impl Future<Output = Result<Handles, Refusal>> + Send;

    /// Whether a VolumeSnapshot is known to have this name.
    fn is_name(&self, namespace: &str, text: &str) -> impl Future<Output = bool> + Send;
}

/// What the driver is called with.
pub struct Handles {
    pub target: String,
    pub base: Option<String>,
    pub secrets: Secrets,
    /// The node that holds the target, if Kubernetes knows it.
    pub node: Option<String>,
}

impl Handles {
    pub fn of(target: Snapshot, base: Option<String>, secrets: Secrets) -> Self {
        let node = target.content.node().map(str::to_owned);
        Self { target: target.handle, base, secrets, node }
    }
}

/// A Kubernetes cluster. Clones share the watches and the caches.
#[derive(Clone)]
pub struct Cluster {
    pub driver: DriverLink,
    /// Set once the driver's name is known.
    pub authenticator: watch::Receiver<Option<Authenticator>>,
    pub resolver: Resolver,
    pub secrets: SecretFinder,
}

impl Directory for Cluster {
    type Caller = Caller;

    async fn authenticate(&self, request: &MetadataRequest, peer: Peer) -> Result<Caller, Refusal> {
        authenticate(&self.authenticator, &self.driver, &request.token, peer).await
    }

    async fn handles(
        &self,
        driver: &str,
        request: &MetadataRequest,
        caller: &Caller,
    ) -> Result<Handles, Refusal> {
        let target = self.resolver.target(driver, &request.namespace, &request.target).await?;
        let base = match &request.base {
            Some(base) => Some(self.resolver.base(driver, base, &target, caller).await?),
            None => None,
        };
        let secrets = self.secrets.secrets(&target).await?;
        Ok(Handles::of(target, base, secrets))
    }

    async fn is_name(&self, namespace: &str, text: &str) -> bool {
        let named = self.resolver.bound.snapshots.cached(&Key::new(namespace, text));
        matches!(named, Some(Some(_)))
    }
}
