//! Authentication and authorization of a call (KEP-3314, "The External Snapshot Metadata Sidecar"):
//! reviews the token for this driver's audience, then the permission to get VolumeSnapshots in the
//! namespace, and, if the base is a VolumeSnapshot of another namespace, the permission to get it.

use std::sync::Arc;

use k8s_openapi::api::authentication::v1::UserInfo;
use tokio::sync::watch;

use super::driver_link::DriverLink;
use super::refusal::{Reason, Refusal};
use super::relay::exiting;
use super::request::Token;
use kubernetes::cache::{Cache, Key};
use kubernetes::metadata_service::SnapshotMetadataService;
use kubernetes::review::{Denied, Reviewer};
use kubernetes::snapshot::GROUP;
use telemetry::peer::Peer;

/// Source of the audience that tokens must have.
#[derive(Clone)]
pub enum Audience {
    /// `--audience`.
    Fixed(String),
    /// The spec of the SnapshotMetadataService with this name.
    Of { services: Box<Cache<SnapshotMetadataService>>, name: String },
}

impl Audience {
    async fn current(&self) -> Result<String, Refusal> {
        let (services, name) = match self {
            Self::Fixed(audience) => return Ok(audience.clone()),
            Self::Of { services, name } => (services, name),
        };
        let service = services.get(&Key::cluster(name)).await;
        let service =
            service.map_err(|error| Refusal::api("read SnapshotMetadataServices", &error))?;
        match service {
            Some(service) if !service.spec.audience.is_empty() => Ok(service.spec.audience.clone()),
            Some(_) => {
                Err(unknown(&format!("SnapshotMetadataService {name} has an empty audience")))
            }
            None => Err(unknown(&format!("SnapshotMetadataService {name} does not exist"))),
        }
    }
}

/// Authenticates callers. Clones share the caches of reviews.
#[derive(Clone)]
pub struct Authenticator {
    pub audience: Audience,
    pub reviewer: Reviewer,
}

/// The token's user, once the driver's name is known: without it the audience is unknown.
pub async fn authenticate(
    authenticator: &watch::Receiver<Option<Authenticator>>,
    driver: &DriverLink,
    token: &Token,
    peer: Peer,
) -> Result<Caller, Refusal> {
    let authenticator = authenticator.borrow().clone();
    let unknown = || driver.name().err().unwrap_or_else(exiting);
    authenticator.ok_or_else(unknown)?.authenticate(token, peer).await
}

/// The user of an accepted token.
pub struct Caller {
    reviewer: Reviewer,
    user: Arc<UserInfo>,
}

impl Authenticator {
    /// Returns the token's user, or the refusal of a token that the API server rejects.
    pub async fn authenticate(self, token: &Token, peer: Peer) -> Result<Caller, Refusal> {
        let audience = self.audience.current().await?;
        match self.reviewer.authenticate(token.reveal(), &audience, peer).await {
            Ok(user) => Ok(Caller { reviewer: self.reviewer, user }),
            Err(Denied::Refused(reason)) => Err(Refusal::new(
                Reason::Unauthenticated,
                format!(
                    "security_token: {reason}; request a token from the TokenRequest API with the audience of the \
                     driver's SnapshotMetadataService"
                ),
            )),
            Err(Denied::Unknown(error)) => Err(Refusal::api("create TokenReviews", &error)),
        }
    }
}

/// The user of an accepted token.
pub trait User: Send + Sync {
    fn username(&self) -> Option<&str>;

    /// Refuses a user who may not get VolumeSnapshots in the namespace.
    fn authorize(&self, namespace: &str) -> impl Future<Output = Result<(), Refusal>> + Send;
}

impl User for Caller {
    fn username(&self) -> Option<&str> {
        self.user.username.as_deref()
    }

    async fn authorize(&self, namespace: &str) -> Result<(), Refusal> {
        if self.may_get(namespace, None).await? {
            return Ok(());
        }
        Err(not_allowed(self.username(), namespace))
    }
}

impl Caller {
    #[cfg(test)]
    pub fn new(reviewer: Reviewer, user: UserInfo) -> Self {
        Self { reviewer, user: Arc::new(user) }
    }

    /// Whether the caller may get this VolumeSnapshot, or, without a name, all of the namespace.
    pub async fn may_get(&self, namespace: &str, name: Option<&str>) -> Result<bool, Refusal> {
        let reviewed = self.reviewer.may_get_snapshots(&self.user, namespace, name).await;
        reviewed.map_err(|error| Refusal::api("create SubjectAccessReviews", &error))
    }
}

/// The refusal of a user who may not get VolumeSnapshots in the namespace.
pub fn not_allowed(user: Option<&str>, namespace: &str) -> Refusal {
    Refusal::new(
        Reason::NotAllowed,
        format!(
            "{} may not get volumesnapshots.{GROUP} in the namespace {namespace}; grant the permission with a Role \
             there or a ClusterRole",
            user.unwrap_or("the user")
        ),
    )
}

fn unknown(problem: &str) -> Refusal {
    let message = format!(
        "{problem}, so tokens cannot be checked; correct the object or start the sidecar with --audience"
    );
    Refusal::new(Reason::NoAudience, message)
}
