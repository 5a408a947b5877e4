//! Maintains the caBundle of an APIService, by which the API server's aggregation layer
//! authenticates a server of this program. The administrator owns the object: only this field is
//! written, and the object is never created.

use anyhow::Context;
use k8s_openapi::ByteString;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::Resource;
use serde_json::{Value, json};

use super::publish::Publication;

/// The caBundle of one APIService.
#[derive(Debug)]
pub struct CaBundle {
    name: String,
    manager: &'static str,
}

impl CaBundle {
    /// For the APIService `name`; `manager` is the field manager of the writes.
    pub fn new(name: &str, manager: &'static str) -> Self {
        Self { name: name.to_owned(), manager }
    }
}

impl Publication for CaBundle {
    type Object = APIService;

    fn manager(&self) -> &'static str {
        self.manager
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn is_current(&self, found: &APIService, pem: &str) -> bool {
        ca_bundle(found) == pem.as_bytes()
    }

    fn desired(&self, found: Option<&APIService>, pem: &str) -> anyhow::Result<Value> {
        let found = found
            .context("the object does not exist; apply it, otherwise the API is not served")?;
        let spec = found.spec.as_ref().context("the object has no spec; apply it again")?;
        // The API server rejects this field together with a caBundle.
        anyhow::ensure!(
            spec.insecure_skip_tls_verify != Some(true),
            "spec.insecureSkipTLSVerify is true, which lets any server on the network path impersonate this one; apply \
             the object without this field, and spec.caBundle will be written"
        );
        Ok(json!({
            "apiVersion": APIService::api_version(&()),
            "kind": APIService::kind(&()),
            // The uid prevents that apply creates an object that has been deleted meanwhile.
            "metadata": { "name": self.name, "uid": found.metadata.uid },
            "spec": { "caBundle": ByteString(pem.as_bytes().to_vec()) },
        }))
    }
}

fn ca_bundle(found: &APIService) -> &[u8] {
    let bundle = found.spec.as_ref().and_then(|spec| spec.ca_bundle.as_ref());
    bundle.map(|bundle| &*bundle.0).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(bundle: &str) -> APIService {
        serde_json::from_value(json!({
            "metadata": { "name": "v1.example", "uid": "u" },
            "spec": {
                "group": "example", "version": "v1", "groupPriorityMinimum": 1, "versionPriority": 2,
                "service": { "namespace": "n", "name": "s" },
                "caBundle": ByteString(bundle.as_bytes().to_vec()),
            },
        }))
        .unwrap()
    }

    #[test]
    fn only_the_bundle_is_written_and_nothing_is_created() {
        let publication = CaBundle::new("v1.example", "m");
        let desired = publication.desired(Some(&service("old")), "new").unwrap();
        assert_eq!(desired["spec"], json!({ "caBundle": ByteString(b"new".to_vec()) }));
        assert_eq!(desired["metadata"], json!({ "name": "v1.example", "uid": "u" }));
        assert!(publication.desired(None, "new").is_err());
        assert!(publication.is_current(&service("a"), "a"));
        assert!(!publication.is_current(&service(""), "a"));
    }
}
