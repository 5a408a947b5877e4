//! Finds the StorageClass of a pod's claims when the pod is admitted. For a claim that does not
//! exist yet, the template of the generic ephemeral volume names the class. A pod whose claim has
//! neither is rejected until the claim exists. (A StatefulSet creates the claims before the pod.)
//! Equal lookups at the same time are one call, and the drivers of classes are cached: they cannot
//! change.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::{Api, Client};

use super::ROLE;
use kubernetes::admission::Refusal;
use kubernetes::cache::{CALL_TIMEOUT, in_time};
use kubernetes::client::failure;
use kubernetes::peer_limit::PeerLimit;
use kubernetes::pod::Volume;
use telemetry::memo::{Keep, Memo};
use telemetry::peer::Peer;

/// Maximum time to cache the driver of a StorageClass: another one can get the name.
const CLASS_TTL: Duration = Duration::from_secs(5);
/// Maximum number of cached classes, and of concurrent lookups of claims.
const MAX_CACHED: u64 = 10_000;

/// Reads claims and StorageClasses from the API server. Clones share caches and turns.
#[derive(Clone)]
pub struct Claims {
    client: Client,
    turns: PeerLimit,
    /// Concurrent lookups of claims, by namespace and name.
    claims: Memo<(String, String), Option<Claim>, kube::Error>,
    /// The driver of each StorageClass; `None` if it does not exist.
    classes: Memo<String, Option<Arc<str>>, kube::Error>,
}

/// What is used of a claim.
#[derive(Debug, Clone)]
struct Claim {
    class: Option<String>,
    is_bound: bool,
}

impl Claims {
    /// `turns` are those of the clients whose reviews cause lookups.
    pub fn new(client: &Client, turns: PeerLimit) -> Self {
        let claims = Memo::new(MAX_CACHED, Keep::For(CALL_TIMEOUT));
        let classes = Memo::new(MAX_CACHED, Keep::For(CLASS_TTL));
        Self { client: client.clone(), turns, claims, classes }
    }

    /// Returns the StorageClass of the claim of `spec.volumes[index]`: empty for a claim without a
    /// class, `None` for a volume without a claim.
    ///
    /// # Errors
    /// The class is unknown. The pod can be created again once it is known.
    pub async fn class(
        &self,
        peer: Peer,
        namespace: &str,
        index: usize,
        volume: &Volume,
    ) -> Result<Option<String>, Refusal> {
        if let Some(source) = &volume.persistent_volume_claim {
            let field = format!("spec.volumes[{index}].persistentVolumeClaim.claimName");
            return self.of_claim(peer, &field, namespace, &source.claim_name).await.map(Some);
        }
        let Some(source) = &volume.ephemeral else { return Ok(None) };
        let template = source.volume_claim_template.as_ref();
        match template.and_then(|template| template.spec.storage_class_name.clone()) {
            Some(class) => Ok(Some(class)),
            None => Err(Refusal::invalid(format!(
                "spec.volumes[{index}].ephemeral.volumeClaimTemplate.spec.storageClassName: is missing, and the default StorageClass \
                 can change before the claim exists; name the StorageClass"
            ))),
        }
    }

    async fn of_claim(
        &self,
        peer: Peer,
        field: &str,
        namespace: &str,
        name: &str,
    ) -> Result<String, Refusal> {
        let found = self.claim(peer, namespace, name).await.map_err(|error| {
            let what = format!("the StorageClass of the PersistentVolumeClaim {name:?} ({field})");
            Refusal::unknown(&what, &failure(ROLE, "get PersistentVolumeClaims", &error))
        })?;
        let Some(claim) = found else {
            return Err(Refusal::unavailable(format!(
                "{field}: the PersistentVolumeClaim {name:?} does not exist in the namespace {namespace}, so its StorageClass is \
                 unknown; create the claim, then try again"
            )));
        };
        match (claim.class, claim.is_bound) {
            (Some(class), _) => Ok(class),
            // A bound claim gets no default class.
            (None, true) => Ok(String::new()),
            (None, false) => Err(Refusal::unavailable(format!(
                "{field}: the PersistentVolumeClaim {name:?} has no StorageClass yet and may get the default class; set its \
                 spec.storageClassName, or wait until it is bound, then try again"
            ))),
        }
    }

    async fn claim(
        &self,
        peer: Peer,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Claim>, Arc<kube::Error>> {
        // Before the shared lookup, which must not wait in the queue of another client.
        let _turn = self.turns.turn(peer).await?;
        let key = (namespace.to_owned(), name.to_owned());
        let lookup = async {
            let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), namespace);
            let found = in_time(api.get_opt(name)).await?;
            let of = |claim: PersistentVolumeClaim| claim.spec.unwrap_or_default();
            Ok::<_, kube::Error>(found.map(of).map(|spec| Claim {
                class: spec.storage_class_name,
                is_bound: spec.volume_name.is_some(),
            }))
        };
        let found = self.claims.get_or_load(&key, lookup).await;
        // A claim changes until it is bound.
        self.claims.remove(&key);
        found
    }

    /// Whether the driver provisions volumes of the class, which `spec.volumes[index]` has.
    ///
    /// # Errors
    /// The driver of the class is unknown. The pod can be created again once it is known.
    pub async fn is_of_driver(
        &self,
        peer: Peer,
        driver: &str,
        index: usize,
        class: &str,
    ) -> Result<bool, Refusal> {
        let found = self.driver_of(peer, class).await.map_err(|error| {
            let what = format!("the driver of the StorageClass {class:?} (spec.volumes[{index}])");
            Refusal::unknown(&what, &failure(ROLE, "get StorageClasses", &error))
        })?;
        match found {
            Some(provisioner) => Ok(*provisioner == *driver),
            None => Err(Refusal::unavailable(format!(
                "spec.volumes[{index}]: the StorageClass {class:?} does not exist, so its driver is unknown; create it, or ask an \
                 administrator to remove it from the policy (deferral), then try again"
            ))),
        }
    }

    async fn driver_of(
        &self,
        peer: Peer,
        class: &str,
    ) -> Result<Option<Arc<str>>, Arc<kube::Error>> {
        if let Some(driver) = self.classes.get(class) {
            return Ok(driver);
        }
        let _turn = self.turns.turn(peer).await?;
        let lookup = async {
            let api: Api<StorageClass> = Api::all(self.client.clone());
            let found = in_time(api.get_opt(class)).await?;
            Ok::<_, kube::Error>(found.map(|class| class.provisioner.into()))
        };
        let found = self.classes.get_or_load(class, lookup).await;
        if found.as_ref().is_ok_and(Option::is_none) {
            // It may be created at any time.
            self.classes.remove(class);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use kubernetes::fake_api::FakeApi;

    #[tokio::test]
    async fn unavailable_api_server_rejects_pods_with_advice_to_retry() {
        let api = FakeApi::default();
        let claims = Claims::new(&api.client(), PeerLimit::default());
        let peer = Peer::unknown();
        let volume = json!({ "name": "v", "persistentVolumeClaim": { "claimName": "data" } });
        let volume: Volume = serde_json::from_value(volume).unwrap();
        let spec = json!({ "spec": { "storageClassName": "fast" } });
        api.put("/api/v1/namespaces/n/persistentvolumeclaims/data", spec);
        let class = json!({ "provisioner": "d.example" });
        api.put("/apis/storage.k8s.io/v1/storageclasses/fast", class);
        assert_eq!(claims.class(peer, "n", 0, &volume).await, Ok(Some("fast".into())));
        assert_eq!(claims.is_of_driver(peer, "d.example", 0, "fast").await, Ok(true));
        assert_eq!(claims.is_of_driver(peer, "other.example", 0, "fast").await, Ok(false));
        // The driver of a class that is known remains so for a while.
        api.fail();
        assert_eq!(claims.is_of_driver(peer, "d.example", 0, "fast").await, Ok(true));
        let claim = claims.class(peer, "n", 0, &volume).await.unwrap_err();
        let class = claims.is_of_driver(peer, "d.example", 0, "slow").await.unwrap_err();
        for (refusal, what) in [(claim, "PersistentVolumeClaim"), (class, "StorageClass")] {
            let words = refusal.message();
            assert_eq!(refusal.code(), 503, "{words}");
            assert!(words.contains("(spec.volumes[0]") && words.contains(what), "{words}");
            assert!(
                words.starts_with("cannot determine") && words.ends_with("retry later"),
                "{words}"
            );
        }
    }
}
