//! Who asks, and may they: the token is reviewed for this driver's audience, then the right to get VolumeSnapshots
//! in the namespace (KEP-3314, "The External Snapshot Metadata Sidecar"), and, where the base is a VolumeSnapshot of another
//! namespace, the right to get that one.

use std::sync::Arc;

use k8s_openapi::api::authentication::v1::UserInfo;

use super::refusal::{Reason, Refusal};
use super::request::Asked;
use crate::kubernetes::cache::{Cache, Key};
use crate::kubernetes::metadata_service::SnapshotMetadataService;
use crate::kubernetes::review::{Action, Denied, Reviewer};
use crate::kubernetes::snapshot::GROUP;

/// Where the audience comes from.
#[derive(Clone)]
pub enum Audience {
    /// `--audience`.
    Fixed(String),
    /// The SnapshotMetadataService of this name.
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

/// Cheap to clone.
#[derive(Clone)]
pub struct Gate {
    pub audience: Audience,
    pub reviewer: Reviewer,
}

/// The user of a token that is good.
pub struct Caller<'g> {
    reviewer: &'g Reviewer,
    user: Arc<UserInfo>,
}

impl Gate {
    /// The user of the token.
    pub async fn authenticate(&self, asked: &Asked) -> Result<Caller<'_>, Refusal> {
        let audience = self.audience.current().await?;
        match self.reviewer.authenticate(asked.token.reveal(), &audience).await {
            Ok(user) => Ok(Caller { reviewer: &self.reviewer, user }),
            Err(Denied::Refused(reason)) => Err(Refusal::new(
                Reason::Unauthenticated,
                format!(
                    "security_token: {reason}; ask the TokenRequest API for one with the audience that the \
                     driver's SnapshotMetadataService names"
                ),
            )),
            Err(Denied::Unknown(error)) => Err(Refusal::api("create TokenReviews", &error)),
        }
    }
}

impl<'g> Caller<'g> {
    #[cfg(test)]
    pub fn new(reviewer: &'g Reviewer, user: UserInfo) -> Self {
        Self { reviewer, user: Arc::new(user) }
    }

    pub fn username(&self) -> Option<&str> {
        self.user.username.as_deref()
    }

    /// Refuses a caller that may not get the VolumeSnapshots of the namespace.
    pub async fn authorize(&self, namespace: &str) -> Result<(), Refusal> {
        if self.may_get(namespace, None).await? {
            return Ok(());
        }
        Err(Refusal::new(
            Reason::NotAllowed,
            format!(
                "{} may not get volumesnapshots.{GROUP} in the namespace {namespace}; a Role there or a \
                 ClusterRole has to allow it",
                self.username().unwrap_or("the user")
            ),
        ))
    }

    /// Whether the caller may get the VolumeSnapshot of this name, or all of the namespace.
    pub async fn may_get(&self, namespace: &str, name: Option<&str>) -> Result<bool, Refusal> {
        let action = Action {
            verb: "get",
            group: GROUP,
            resource: "volumesnapshots",
            subresource: None,
            namespace,
            name,
        };
        match self.reviewer.authorize(&self.user, action).await {
            Ok(()) => Ok(true),
            Err(Denied::Refused(_)) => Ok(false),
            Err(Denied::Unknown(error)) => Err(Refusal::api("create SubjectAccessReviews", &error)),
        }
    }
}

fn unknown(problem: &str) -> Refusal {
    let message = format!(
        "{problem}, so that no token can be checked; mend it or start the sidecar with --audience"
    );
    Refusal::new(Reason::NoAudience, message)
}
