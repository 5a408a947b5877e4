//! Resolves the names in a request to the driver, the snapshots' handles and the driver's service
//! (KEP-3314, "The Snapshot Session Manager"). An object is reported as missing only after a query
//! to the API server.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use kube::api::ListParams;
use kube::{Api, ResourceExt};

use super::cause::{Cause, Obstacle, Verdict};
use kubernetes::cache::{Cache, Key, in_time};
use kubernetes::metadata_service::DRIVER_LABEL;
use kubernetes::name;
use kubernetes::session::{SessionSnapshot, SnapshotServiceConfiguration};
use kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};

/// What a session consists of.
#[derive(Debug, Clone)]
pub struct Resolved {
    pub driver: String,
    pub snapshots: Vec<SessionSnapshot>,
    pub configuration: Arc<SnapshotServiceConfiguration>,
}

/// The result of a lookup, or the obstacle.
pub type Outcome<T> = Result<T, Obstacle>;

pub struct Resolver {
    pub snapshots: Cache<VolumeSnapshot>,
    pub contents: Cache<VolumeSnapshotContent>,
    /// Indexed by the driver's label.
    pub configurations: Cache<SnapshotServiceConfiguration>,
    pub all_configurations: Api<SnapshotServiceConfiguration>,
}

/// Index of configurations by the driver's label.
pub fn driver_label(configuration: &SnapshotServiceConfiguration) -> Option<Cow<'_, str>> {
    configuration.labels().get(DRIVER_LABEL).map(Into::into)
}

impl Resolver {
    /// # Errors
    /// A call to the API server failed.
    pub async fn resolve(
        &self,
        namespace: &str,
        names: &[String],
    ) -> kube::Result<Outcome<Resolved>> {
        let mut drivers = BTreeSet::new();
        let mut snapshots = Vec::new();
        let mut waiting: Option<Obstacle> = None;
        for name in names {
            match self.snapshot(&Key::new(namespace, name)).await? {
                Ok((driver, snapshot)) => {
                    drivers.insert(driver);
                    snapshots.push(snapshot);
                }
                Err(obstacle) if obstacle.cause.verdict() == Verdict::Fail => {
                    return Ok(Err(obstacle));
                }
                // Report a permanent obstacle rather than a temporary one.
                Err(obstacle) => drop(waiting.get_or_insert(obstacle)),
            }
        }
        if drivers.len() > 1 {
            let all: Vec<_> = drivers.into_iter().collect();
            return Ok(Err(Obstacle::new(
                Cause::SeveralDrivers,
                format!(
                    "the VolumeSnapshots belong to several CSI drivers ({}); create a request for each driver",
                    all.join(", ")
                ),
            )));
        }
        let driver = match (waiting, drivers.pop_first()) {
            (Some(obstacle), _) => return Ok(Err(obstacle)),
            (None, Some(driver)) => driver,
            (None, None) => {
                let obstacle =
                    Obstacle::new(Cause::SnapshotMissing, "the request names no VolumeSnapshot");
                return Ok(Err(obstacle));
            }
        };
        let configuration = self.configuration(&driver).await?;
        Ok(configuration.map(|configuration| Resolved { driver, snapshots, configuration }))
    }

    /// The driver of a VolumeSnapshot, and its entry in the session's data.
    async fn snapshot(&self, key: &Key) -> kube::Result<Outcome<(String, SessionSnapshot)>> {
        let Key { namespace, name } = key;
        let shown = format!("VolumeSnapshot {namespace}/{name}");
        let Some(object) = self.snapshots.get(key).await? else {
            let message = format!("{shown} does not exist");
            return Ok(Err(Obstacle::new(Cause::SnapshotMissing, message)));
        };
        if object.metadata.deletion_timestamp.is_some() {
            let message = format!("{shown} is being deleted");
            return Ok(Err(Obstacle::new(Cause::SnapshotDeleting, message)));
        }
        let Some(content_name) = object.ready_content() else {
            return Ok(Err(not_ready(&shown, &object)));
        };
        let Some(content) = self.contents.get(&Key::cluster(content_name)).await? else {
            let message = format!(
                "VolumeSnapshotContent {content_name}, to which {shown} is bound, does not exist"
            );
            return Ok(Err(Obstacle::new(Cause::ContentMissing, message)));
        };
        let handle = content.ready_handle().filter(|_| content.belongs_to(&object));
        let Some(handle) = handle else { return Ok(Err(not_ready(&shown, &object))) };
        let snapshot = SessionSnapshot {
            namespace: namespace.clone(),
            name: name.clone(),
            uid: object.metadata.uid.clone().unwrap_or_default(),
            handle: handle.to_owned(),
        };
        Ok(Ok((content.spec.driver.clone(), snapshot)))
    }

    /// The only configuration with the driver's label.
    async fn configuration(
        &self,
        driver: &str,
    ) -> kube::Result<Outcome<Arc<SnapshotServiceConfiguration>>> {
        let known = match name::is_object(driver) {
            true => self.configurations.with(driver).await?,
            // Not a valid name of an object or value of a label.
            false => return Ok(Err(without_configuration(driver))),
        };
        let found = match <[_; 1]>::try_from(known) {
            Ok(one) => one.into(),
            Err(_) => {
                let select = ListParams::default().labels(&format!("{DRIVER_LABEL}={driver}"));
                let list = in_time(self.all_configurations.list(&select)).await?;
                list.items.into_iter().map(Arc::new).collect()
            }
        };
        Ok(the_one(driver, found))
    }
}

fn the_one(
    driver: &str,
    found: Vec<Arc<SnapshotServiceConfiguration>>,
) -> Outcome<Arc<SnapshotServiceConfiguration>> {
    let names: Vec<_> = found.iter().map(|one| one.name_any()).collect();
    let mut found = found.into_iter();
    match (found.next(), found.next()) {
        (None, _) => Err(without_configuration(driver)),
        (Some(one), None) if one.name_any() == driver => Ok(one),
        // Otherwise a user who may only write an object of one name could configure another driver.
        (Some(one), None) => Err(Obstacle::new(
            Cause::ConfigurationMisnamed,
            format!(
                "SnapshotServiceConfiguration {} has the label {DRIVER_LABEL}={driver}, but not the driver's name; an \
                 administrator must correct or delete it",
                one.name_any()
            ),
        )),
        (Some(_), Some(_)) => Err(Obstacle::new(
            Cause::SeveralConfigurations,
            format!(
                "several SnapshotServiceConfigurations have the label {DRIVER_LABEL}={driver} ({}); an administrator \
                 must delete all except the one with the driver's name",
                names.join(", ")
            ),
        )),
    }
}

fn without_configuration(driver: &str) -> Obstacle {
    Obstacle::new(
        Cause::NoConfiguration,
        format!(
            "the CSI driver {driver} does not offer snapshot sessions: no SnapshotServiceConfiguration has the label \
             {DRIVER_LABEL}={driver}"
        ),
    )
}

fn not_ready(shown: &str, object: &VolumeSnapshot) -> Obstacle {
    let error = object.status.as_ref().and_then(|status| status.error.as_ref());
    let why = error.and_then(|error| error.message.as_deref()).unwrap_or_default();
    let because = if why.is_empty() { String::new() } else { format!(": {why}") };
    Obstacle::new(Cause::SnapshotNotReady, format!("{shown} is not ready to use yet{because}"))
}
