//! Finds the StorageClass of a pod's claims when the pod is admitted. For a claim that does not
//! exist yet, the template of the generic ephemeral volume names the class. A pod whose claim has
//! neither is rejected until the claim exists. (A StatefulSet creates the claims before the pod.)

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Volume};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::{Api, Client};

use super::ROLE;
use crate::kubernetes::admission::Refusal;
use crate::kubernetes::cache::in_time;
use crate::kubernetes::client::failure;

/// Reads claims and StorageClasses from the API server.
#[derive(Clone)]
pub struct Claims {
    client: Client,
}

impl Claims {
    pub fn new(client: &Client) -> Self {
        Self { client: client.clone() }
    }

    /// Returns the StorageClass of the claim of `spec.volumes[index]`: empty for a claim without a
    /// class, `None` for a volume without a claim.
    ///
    /// # Errors
    /// The class is unknown. The pod can be created again once it is known.
    pub async fn class(
        &self,
        namespace: &str,
        index: usize,
        volume: &Volume,
    ) -> Result<Option<String>, Refusal> {
        if let Some(source) = &volume.persistent_volume_claim {
            let field = format!("spec.volumes[{index}].persistentVolumeClaim.claimName");
            return self.of_claim(&field, namespace, &source.claim_name).await.map(Some);
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

    async fn of_claim(&self, field: &str, namespace: &str, name: &str) -> Result<String, Refusal> {
        let api: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), namespace);
        let found = in_time(api.get_opt(name)).await.map_err(|error| {
            let what = format!("the StorageClass of the PersistentVolumeClaim {name:?} ({field})");
            Refusal::unknown(&what, &failure(ROLE, "get PersistentVolumeClaims", &error))
        })?;
        let Some(claim) = found else {
            return Err(Refusal::unavailable(format!(
                "{field}: the PersistentVolumeClaim {name:?} does not exist in the namespace {namespace}, so its StorageClass is \
                 unknown; create the claim, then try again"
            )));
        };
        let spec = claim.spec.unwrap_or_default();
        match (spec.storage_class_name, spec.volume_name) {
            (Some(class), _) => Ok(class),
            // A bound claim gets no default class.
            (None, Some(_)) => Ok(String::new()),
            (None, None) => Err(Refusal::unavailable(format!(
                "{field}: the PersistentVolumeClaim {name:?} has no StorageClass yet and may get the default class; set its \
                 spec.storageClassName, or wait until it is bound, then try again"
            ))),
        }
    }

    /// Whether the driver provisions volumes of the class, which `spec.volumes[index]` has.
    ///
    /// # Errors
    /// The driver of the class is unknown. The pod can be created again once it is known.
    pub async fn is_of_driver(
        &self,
        driver: &str,
        index: usize,
        class: &str,
    ) -> Result<bool, Refusal> {
        let api: Api<StorageClass> = Api::all(self.client.clone());
        let found = in_time(api.get_opt(class)).await.map_err(|error| {
            let what = format!("the driver of the StorageClass {class:?} (spec.volumes[{index}])");
            Refusal::unknown(&what, &failure(ROLE, "get StorageClasses", &error))
        })?;
        match found {
            Some(class) => Ok(class.provisioner == driver),
            None => Err(Refusal::unavailable(format!(
                "spec.volumes[{index}]: the StorageClass {class:?} does not exist, so its driver is unknown; create it, or ask an \
                 administrator to remove it from the policy (deferral), then try again"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kubernetes::fake_api::FakeApi;

    #[tokio::test]
    async fn unavailable_api_server_rejects_pods_with_advice_to_retry() {
        let api = FakeApi::default();
        let claims = Claims::new(&api.client());
        let volume = json!({ "name": "v", "persistentVolumeClaim": { "claimName": "data" } });
        let volume: Volume = serde_json::from_value(volume).unwrap();
        let spec = json!({ "spec": { "storageClassName": "fast" } });
        api.put("/api/v1/namespaces/n/persistentvolumeclaims/data", spec);
        let class = json!({ "provisioner": "d.example" });
        api.put("/apis/storage.k8s.io/v1/storageclasses/fast", class);
        assert_eq!(claims.class("n", 0, &volume).await, Ok(Some("fast".into())));
        assert_eq!(claims.is_of_driver("d.example", 0, "fast").await, Ok(true));
        assert_eq!(claims.is_of_driver("other.example", 0, "fast").await, Ok(false));
        api.fail();
        let claim = claims.class("n", 0, &volume).await.unwrap_err();
        let class = claims.is_of_driver("d.example", 0, "fast").await.unwrap_err();
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
