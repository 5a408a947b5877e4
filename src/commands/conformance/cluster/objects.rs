//! What a run creates in the cluster, and its removal. All names begin with the random name of the
//! run. An object is noted before it is created, so that the clean-up removes whatever may exist.

use std::fmt::Debug;
use std::time::Duration;

use anyhow::Result;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{
    Event, PersistentVolume, PersistentVolumeClaim, Pod, ServiceAccount,
};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::super::door::{Done, Refusal};
use super::manifest::RUN;
use crate::client::cluster::removal::{request_deletion, until_gone};
use crate::client::cluster::{Failure, Retry, call};
use kubernetes::cache;
use kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};

const POLL: Duration = Duration::from_millis(300);

/// A kind of objects in a namespace.
pub trait Object: cache::Object + Resource<Scope = NamespaceResourceScope> + Serialize {}

impl<K: cache::Object + Resource<Scope = NamespaceResourceScope> + Serialize> Object for K {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Claim,
    Pod,
    Snapshot,
    Account,
}

/// An object of the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Made {
    pub kind: Kind,
    pub name: String,
    /// The PersistentVolume or VolumeSnapshotContent that goes with it.
    pub bound: Option<String>,
}

impl Made {
    pub fn new(kind: Kind, name: &str) -> Self {
        Self { kind, name: name.to_owned(), bound: None }
    }

    /// How the user finds it.
    pub fn describe(&self, namespace: &str) -> String {
        let kind = match self.kind {
            Kind::Claim => "PersistentVolumeClaim",
            Kind::Pod => "Pod",
            Kind::Snapshot => "VolumeSnapshot",
            Kind::Account => "ServiceAccount",
        };
        let bound = match (&self.bound, self.kind) {
            (None, _) => String::new(),
            (Some(bound), Kind::Snapshot) => format!(" with VolumeSnapshotContent {bound}"),
            (Some(bound), _) => format!(" with PersistentVolume {bound}"),
        };
        format!("{kind} {namespace}/{}{bound}", self.name)
    }
}

/// The objects of a run. Clones share the client.
#[derive(Clone)]
pub struct Objects {
    pub client: Client,
    pub namespace: String,
    /// The name of the run.
    pub run: String,
}

/// A failed call of the API server.
impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        let reason = format!("{:#}", failure.error);
        match failure.retry {
            Retry::Never => Self::Final(reason),
            _ => Self::Refused(reason),
        }
    }
}

impl Objects {
    pub fn api<K: Object>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn named<K: Object>(&self, name: &str) -> String {
        format!("{} {}/{name}", K::kind(&()), self.namespace)
    }

    /// Creates an object, which has the label of the run.
    pub async fn create<K: Object>(&self, mut object: Value) -> Done<K> {
        object["metadata"]["labels"][RUN] = self.run.as_str().into();
        let wrong = |error: serde_json::Error| Refusal::Final(error.to_string());
        let object: K = serde_json::from_value(object).map_err(wrong)?;
        let (api, name) = (self.api::<K>(), object.name_any());
        let creation = async {
            match api.create(&PostParams::default(), &object).await {
                Err(kube::Error::Api(status)) if status.code == 409 => {
                    // The client repeats a creation without a response.
                    let found = api.get_opt(&name).await?;
                    let is_own = |found: &K| found.labels().get(RUN) == Some(&self.run);
                    found.filter(is_own).ok_or(kube::Error::Api(status))
                }
                outcome => outcome,
            }
        };
        Ok(call(&self.named::<K>(&name), creation).await?)
    }

    pub async fn get<K: Object>(&self, name: &str) -> Done<Option<K>> {
        Ok(call(&self.named::<K>(name), self.api::<K>().get_opt(name)).await?)
    }

    /// Polls an object until `done` returns something. After `patience` the error has the last
    /// warning about the object, if the caller may list events.
    pub async fn until<K: Object, T>(
        &self,
        name: &str,
        what: &str,
        patience: Duration,
        mut done: impl FnMut(&K) -> Option<Done<T>>,
    ) -> Done<T> {
        let end = Instant::now() + patience;
        loop {
            match self.get::<K>(name).await {
                Ok(Some(found)) => {
                    if let Some(done) = done(&found) {
                        return done;
                    }
                }
                Ok(None) => {
                    let gone = format!("{} was deleted", self.named::<K>(name));
                    return Err(Refusal::Refused(gone));
                }
                Err(Refusal::Final(reason)) => return Err(Refusal::Final(reason)),
                // A temporary error of the API server.
                Err(_) => {}
            }
            if Instant::now() >= end {
                let warning = self.warning(name).await;
                let seconds = patience.as_secs();
                let object = self.named::<K>(name);
                let reason = format!("{object} is not {what} after {seconds} s{warning}");
                return Err(Refusal::Refused(reason));
            }
            sleep(POLL).await;
        }
    }

    /// The last warning about an object, for a message.
    async fn warning(&self, name: &str) -> String {
        let about = ListParams::default().fields(&format!("involvedObject.name={name}"));
        let Ok(found) = call("", self.api::<Event>().list(&about)).await else {
            return String::new();
        };
        let warnings =
            found.items.into_iter().filter(|event| event.type_.as_deref() == Some("Warning"));
        let last = warnings.max_by_key(|event| event.metadata.creation_timestamp.clone());
        let message = last.and_then(|event| event.message).unwrap_or_default();
        if message.is_empty() { message } else { format!(": {message}") }
    }

    /// What goes with an object, as it is known now.
    pub async fn bound(&self, made: &Made) -> Option<String> {
        let name = &made.name;
        let bound = match made.kind {
            Kind::Claim => {
                let claim = self.get::<PersistentVolumeClaim>(name).await.ok().flatten();
                claim.and_then(|claim| claim.spec?.volume_name)
            }
            Kind::Snapshot => {
                let snapshot = self.get::<VolumeSnapshot>(name).await.ok().flatten();
                snapshot.and_then(|one| one.status?.bound_volume_snapshot_content_name)
            }
            Kind::Pod | Kind::Account => None,
        };
        bound.or_else(|| made.bound.clone()).filter(|bound| !bound.is_empty())
    }

    /// Deletes an object, and returns when it is gone with what goes with it.
    pub async fn remove(&self, made: &Made) -> Result<()> {
        let name = &made.name;
        match made.kind {
            Kind::Claim => self.delete::<PersistentVolumeClaim>(name).await?,
            Kind::Pod => self.delete::<Pod>(name).await?,
            Kind::Snapshot => self.delete::<VolumeSnapshot>(name).await?,
            Kind::Account => self.delete::<ServiceAccount>(name).await?,
        }
        let Some(bound) = &made.bound else { return Ok(()) };
        let client = self.client.clone();
        match made.kind {
            Kind::Claim => gone(&Api::<PersistentVolume>::all(client), bound).await,
            Kind::Snapshot => gone(&Api::<VolumeSnapshotContent>::all(client), bound).await,
            Kind::Pod | Kind::Account => Ok(()),
        }
    }

    /// Deletes an object until it is gone.
    async fn delete<K: Object>(&self, name: &str) -> Result<()> {
        let (api, params) = (self.api::<K>(), DeleteParams::background());
        until_gone(Duration::ZERO, || request_deletion(&api, name, &params)).await
    }
}

/// Waits until an object of the cluster is gone.
async fn gone<K>(api: &Api<K>, name: &str) -> Result<()>
where
    K: Clone + Debug + DeserializeOwned,
{
    until_gone(Duration::ZERO, || async { Ok(api.get_opt(name).await?.is_some()) }).await
}
