//! Resolves a request to snapshots, endpoint and secrets. Call it only for authorized users.

use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::runtime::watcher;
use kube::{Api, Client};

use super::api_failure;
use super::rights::{SECRETS, SNAPSHOTS};
use crate::aggregated_api::endpoint::target::Target;
use crate::aggregated_api::failure::{Cause, Failure};
use kubernetes::bound_snapshot::{Part, Problem, Resolver, Snapshot, fits};
use kubernetes::cache::{self, Cache, Key, in_time};
use kubernetes::driver_discovery::DriverDiscovery;
use kubernetes::secret::Secrets;
use kubernetes::snapshot_delta::{GROUP, VolumeSnapshotDeltaSpec};
use kubernetes::{name, snapshot};
use telemetry::shutdown::Shutdown;

const BASE: &str = "spec.baseVolumeSnapshotName";
/// Delay of a retry if an object is not ready.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Resolves requests. Clones share the watches.
#[derive(Clone)]
pub struct Finder {
    client: Client,
    bound: Resolver,
    discoveries: Cache<DriverDiscovery>,
}

/// A resolved request.
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

    /// Whether all watches are running.
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
                Cause::SnapshotNotReady => failure.after(RETRY_DELAY),
                _ => failure,
            }
        })
    }

    async fn endpoint(&self, driver: &str) -> Result<Target, Failure> {
        let missing = || {
            let message = format!(
                "changed blocks of the CSI driver {driver} are not available: DriverDiscovery {driver} does not exist; \
                 start the driver's sidecar with --cbt-http and --manage-service"
            );
            Failure::new(Cause::DiscoveryMissing, message).of(GROUP, "driverdiscoveries", driver)
        };
        // Not a valid name of an object.
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
                "spec.secretRef: Secret {namespace}/{name} has a value that is not UTF-8 text"
            );
            Failure::new(Cause::Invalid, message)
        })
    }
}

/// The failure for a DriverDiscovery that must be corrected.
pub fn unusable(driver: &str, wrong: &str) -> Failure {
    let message = format!(
        "DriverDiscovery {driver} is not usable: {wrong}; the administrator of the CSI driver must correct it"
    );
    Failure::new(Cause::DiscoveryUnusable, message).of(GROUP, "driverdiscoveries", driver)
}

fn fit(base: &Snapshot, target: &Snapshot) -> Result<(), Failure> {
    let [of_base, of_target] = [base, target].map(|one| &one.content.spec.driver);
    let wrong = if of_base == of_target {
        fits(&base.content, &target.content).err().map(|mismatch| mismatch.to_string())
    } else {
        Some(format!("belongs to the CSI driver {of_base}, but the target to {of_target}"))
    };
    match wrong {
        None => Ok(()),
        Some(wrong) => Err(Failure::new(Cause::BaseUnfit, format!("{BASE}: {wrong}"))),
    }
}
