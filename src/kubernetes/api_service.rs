//! The caBundle of an APIService, by which the aggregation layer of the API server knows a server of this program. The object is
//! another's, who deploys it: only that one field is written, and it is never made.

use anyhow::Context;
use k8s_openapi::ByteString;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::Resource;
use serde_json::{Value, json};

use super::publish::Publication;

/// Of one APIService.
#[derive(Debug)]
pub struct CaBundle {
    name: String,
    manager: &'static str,
}

impl CaBundle {
    /// Of the APIService `name`; `manager` is as whom the field is written.
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

    fn is_as_it_should_be(&self, found: &APIService, pem: &str) -> bool {
        ca_bundle(found) == pem.as_bytes()
    }

    fn wanted(&self, found: Option<&APIService>, pem: &str) -> anyhow::Result<Value> {
        let found = found.context("it does not exist; nobody is served until it is applied")?;
        let spec = found.spec.as_ref().context("it has no spec; apply it anew")?;
        // The API server refuses both together.
        anyhow::ensure!(
            spec.insecure_skip_tls_verify != Some(true),
            "spec.insecureSkipTLSVerify is true: anybody on the way to this server can answer in its place; apply it \
             without, and spec.caBundle is written"
        );
        Ok(json!({
            "apiVersion": APIService::api_version(&()),
            "kind": APIService::kind(&()),
            // With the uid, an object that is gone by now is not made.
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

    fn service(bundle: &str, insecure: bool) -> APIService {
        serde_json::from_value(json!({
            "metadata": { "name": "v1.example", "uid": "u" },
            "spec": {
                "group": "example", "version": "v1", "groupPriorityMinimum": 1, "versionPriority": 2,
                "service": { "namespace": "n", "name": "s" }, "insecureSkipTLSVerify": insecure,
                "caBundle": ByteString(bundle.as_bytes().to_vec()),
            },
        }))
        .unwrap()
    }

    #[test]
    fn only_the_bundle_is_written_and_no_api_service_is_made() {
        let publication = CaBundle::new("v1.example", "m");
        let wanted = publication.wanted(Some(&service("old", false)), "new").unwrap();
        assert_eq!(wanted["spec"], json!({ "caBundle": ByteString(b"new".to_vec()) }));
        assert_eq!(wanted["metadata"], json!({ "name": "v1.example", "uid": "u" }));
        assert!(publication.wanted(None, "new").is_err());
        assert!(publication.is_as_it_should_be(&service("a", false), "a"));
        assert!(!publication.is_as_it_should_be(&service("", false), "a"));
    }

    #[test]
    fn an_api_service_that_checks_no_certificate_is_told() {
        let wanted = CaBundle::new("v1.example", "m").wanted(Some(&service("", true)), "new");
        assert!(wanted.unwrap_err().to_string().contains("spec.insecureSkipTLSVerify"));
    }
}
