//! From a request to what a driver's endpoint is asked: snapshots, endpoint, secrets. To be called for who may get them only.

use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::runtime::watcher;
use kube::{Api, Client};

use super::api_failure;
use super::rights::{SECRETS, SNAPSHOTS};
use crate::aggregated_api::endpoint::target::Target;
use crate::aggregated_api::failure::{Cause, Failure};
use crate::kubernetes::bound_snapshot::{Part, Problem, Resolver, Snapshot, fits};
use crate::kubernetes::cache::{self, Cache, Key, in_time};
use crate::kubernetes::driver_discovery::DriverDiscovery;
use crate::kubernetes::secret::Secrets;
use crate::kubernetes::snapshot_delta::{GROUP, VolumeSnapshotDeltaSpec};
use crate::kubernetes::{name, snapshot};
use crate::telemetry::shutdown::Shutdown;

const BASE: &str = "spec.baseVolumeSnapshotName";
/// What is not ready now may be so in a moment.
const READY_AGAIN: Duration = Duration::from_secs(1);

/// Cheap to clone.
#[derive(Clone)]
pub struct Finder {
    client: Client,
    bound: Resolver,
    discoveries: Cache<DriverDiscovery>,
}

/// What is asked for, as the driver knows it.
pub struct Found {
    pub base: Option<Snapshot>,
    pub target: Snapshot,
    pub endpoint: Target,
    pub secrets: Secrets,
}

impl Finder {
    pub fn start(client: Client, shutdown: &Shutdown) -> Self {
        let all = watcher::Config::default;
        let bound = Resolver {
            snapshots: cache::of_all_namespaces(&client, |_| None, shutdown.clone()),
            contents: cache::of_cluster(&client, all(), |_| None, shutdown.clone()),
        };
        let discoveries = cache::of_cluster(&client, all(), |_| None, shutdown.clone());
        Self { client, bound, discoveries }
    }

    /// Whether all watches run.
    pub fn is_live(&self) -> bool {
        let Resolver { snapshots, contents } = &self.bound;
        snapshots.is_live() && contents.is_live() && self.discoveries.is_live()
    }

    pub async fn find(
        &self,
        namespace: &str,
        spec: &VolumeSnapshotDeltaSpec,
    ) -> Result<Found, Failure> {
        let target = self.snapshot(namespace, &spec.target_volume_snapshot_name, Part::Target);
        let target = target.await?;
        let base = match spec.base_volume_snapshot_name.as_str() {
            "" => None,
            name => Some(self.snapshot(namespace, name, Part::Base).await?),
        };
        if let Some(base) = &base {
            fit(base, &target)?;
        }
        let endpoint = self.endpoint(&target.content.spec.driver).await?;
        let secrets = match &spec.secret_ref {
            None => Secrets::default(),
            Some(secret) => self.secrets(namespace, &secret.name).await?,
        };
        Ok(Found { base, target, endpoint, secrets })
    }

    async fn snapshot(&self, namespace: &str, name: &str, part: Part) -> Result<Snapshot, Failure> {
        let resolved = self.bound.resolve(None, &Key::new(namespace, name), part).await;
        resolved.map_err(|problem| {
            let cause = match &problem {
                Problem::Missing(_) => Cause::SnapshotMissing,
                Problem::Deleting { .. } => Cause::SnapshotDeleting,
                Problem::NotReady(_) => Cause::SnapshotNotReady,
                Problem::ContentMissing { .. } => Cause::ContentMissing,
                Problem::OtherDriver { .. } => Cause::BaseUnfit,
                Problem::Api { doing, error } => return api_failure(doing, error),
            };
            let failure =
                Failure::new(cause, problem.to_string()).of(snapshot::GROUP, SNAPSHOTS, name);
            match cause {
                Cause::SnapshotNotReady => failure.after(READY_AGAIN),
                _ => failure,
            }
        })
    }

    async fn endpoint(&self, driver: &str) -> Result<Target, Failure> {
        let missing = || {
            let message = format!(
                "the CSI driver {driver} tells no changed blocks: there is no DriverDiscovery {driver}; its sidecar \
                 publishes one with --cbt-http"
            );
            Failure::new(Cause::DiscoveryMissing, message).of(GROUP, "driverdiscoveries", driver)
        };
        // No object can be called otherwise.
        if !name::is_object(driver) {
            return Err(missing());
        }
        let found = self.discoveries.get(&Key::cluster(driver)).await;
        let found = found.map_err(|error| api_failure("read DriverDiscoveries", &error))?;
        let discovery = found.ok_or_else(missing)?;
        Target::of(&discovery).map_err(|wrong| unusable(driver, &wrong))
    }

    async fn secrets(&self, namespace: &str, name: &str) -> Result<Secrets, Failure> {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let found = in_time(secrets.get_opt(name)).await;
        let found = found.map_err(|error| api_failure("get Secrets", &error))?;
        let Some(secret) = found else {
            let message = format!("Secret {namespace}/{name} does not exist");
            return Err(Failure::new(Cause::SecretMissing, message).of("", SECRETS, name));
        };
        Secrets::of(secret).ok_or_else(|| {
            let message = format!(
                "spec.secretRef: Secret {namespace}/{name} holds a value that is no text (UTF-8)"
            );
            Failure::new(Cause::Invalid, message)
        })
    }
}

/// Says that a DriverDiscovery has to be mended.
pub fn unusable(driver: &str, wrong: &str) -> Failure {
    let message = format!(
        "DriverDiscovery {driver} cannot be used: {wrong}; whoever runs the CSI driver has to mend it"
    );
    Failure::new(Cause::DiscoveryUnusable, message).of(GROUP, "driverdiscoveries", driver)
}

fn fit(base: &Snapshot, target: &Snapshot) -> Result<(), Failure> {
    let [of_base, of_target] = [base, target].map(|one| &one.content.spec.driver);
    let wrong = if of_base == of_target {
        fits(&base.content, &target.content).err().map(|misfit| misfit.to_string())
    } else {
        Some(format!(
            "is a snapshot of the CSI driver {of_base}, and the target one of {of_target}"
        ))
    };
    match wrong {
        None => Ok(()),
        Some(wrong) => Err(Failure::new(Cause::BaseUnfit, format!("{BASE}: {wrong}"))),
    }
}
