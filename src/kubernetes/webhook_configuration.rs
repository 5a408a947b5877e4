//! The caBundle of a ValidatingWebhookConfiguration, by which the API server knows a webhook of this program. The object is another's,
//! who deploys it: only that one field of each of its webhooks is written, and it is never made.

use anyhow::Context;
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingWebhook, ValidatingWebhookConfiguration,
};
use kube::Resource;
use serde_json::{Value, json};

use super::publish::Publication;

/// A webhook whose answer does not come lets nothing pass, as is also the default.
const FAILS_CLOSED: &str = "Fail";

/// All webhooks of one configuration.
#[derive(Debug)]
pub struct CaBundle {
    name: String,
    manager: &'static str,
    is_open: bool,
}

impl CaBundle {
    /// Of the configuration `name`; `manager` is as whom the field is written.
    pub fn new(name: &str, manager: &'static str) -> Self {
        Self { name: name.to_owned(), manager, is_open: false }
    }
}

impl Publication for CaBundle {
    type Object = ValidatingWebhookConfiguration;

    fn manager(&self) -> &'static str {
        self.manager
    }

    fn name(&self) -> &str {
        &self.name
    }

    /// What the API server trusts whichever of the webhooks it calls.
    fn published(&self, found: &ValidatingWebhookConfiguration) -> String {
        let mut bundles = webhooks(found).iter().map(ca_bundle);
        let first = bundles.next().unwrap_or_default();
        match bundles.all(|bundle| bundle == first) {
            true => String::from_utf8_lossy(first).into_owned(),
            false => String::new(),
        }
    }

    fn is_as_it_should_be(&self, found: &ValidatingWebhookConfiguration, pem: &str) -> bool {
        let webhooks = webhooks(found);
        !webhooks.is_empty() && webhooks.iter().all(|one| ca_bundle(one) == pem.as_bytes())
    }

    fn wanted(
        &self,
        found: Option<&ValidatingWebhookConfiguration>,
        pem: &str,
    ) -> anyhow::Result<Value> {
        let found = found.context("it does not exist; nothing is checked until it is applied")?;
        let names = webhooks(found).iter().map(|webhook| &webhook.name);
        let ca_bundle = json!({ "caBundle": k8s_openapi::ByteString(pem.as_bytes().to_vec()) });
        let webhooks: Vec<_> =
            names.map(|name| json!({ "name": name, "clientConfig": ca_bundle })).collect();
        anyhow::ensure!(!webhooks.is_empty(), "it has no webhooks; apply it anew");
        Ok(json!({
            "apiVersion": ValidatingWebhookConfiguration::api_version(&()),
            "kind": ValidatingWebhookConfiguration::kind(&()),
            // With the uid, an object that is gone by now is not made.
            "metadata": { "name": self.name, "uid": found.metadata.uid },
            "webhooks": webhooks,
        }))
    }

    fn look(&mut self, found: &ValidatingWebhookConfiguration) {
        let open = webhooks(found).iter().find(|webhook| is_open(webhook));
        if let Some(webhook) = open.filter(|_| !self.is_open) {
            tracing::warn!(
                webhook = webhook.name,
                "ValidatingWebhookConfiguration {}: failurePolicy is not {FAILS_CLOSED}: while the webhook is away, anything passes",
                self.name
            );
        }
        self.is_open = open.is_some();
    }
}

fn webhooks(found: &ValidatingWebhookConfiguration) -> &[ValidatingWebhook] {
    found.webhooks.as_deref().unwrap_or_default()
}

fn ca_bundle(webhook: &ValidatingWebhook) -> &[u8] {
    webhook.client_config.ca_bundle.as_ref().map(|bundle| &*bundle.0).unwrap_or_default()
}

fn is_open(webhook: &ValidatingWebhook) -> bool {
    webhook.failure_policy.as_deref().is_some_and(|policy| policy != FAILS_CLOSED)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;

    use super::*;

    fn configuration(bundles: &[&str]) -> ValidatingWebhookConfiguration {
        let webhooks = bundles.iter().enumerate().map(|(at, bundle)| {
            json!({
                "name": format!("w{at}.example"), "sideEffects": "None",
                "admissionReviewVersions": ["v1"], "failurePolicy": "Fail",
                "clientConfig": { "url": "https://x", "caBundle": ByteString(bundle.as_bytes().to_vec()) },
            })
        });
        let webhooks: Vec<_> = webhooks.collect();
        let metadata = json!({ "name": "c", "uid": "u" });
        serde_json::from_value(json!({ "metadata": metadata, "webhooks": webhooks })).unwrap()
    }

    #[test]
    fn what_counts_as_published_is_in_every_webhook() {
        let publication = CaBundle::new("c", "m");
        let published = |bundles: &[&str]| publication.published(&configuration(bundles));
        assert_eq!(published(&["a", "a"]), "a");
        assert_eq!(published(&["a", "b"]), "");
        assert_eq!(published(&[]), "");
        let good = |bundles: &[&str]| publication.is_as_it_should_be(&configuration(bundles), "a");
        assert!(good(&["a", "a"]) && !good(&["a", "b"]) && !good(&[]));
    }

    #[test]
    fn only_the_bundle_of_each_webhook_is_written_and_none_is_made() {
        let publication = CaBundle::new("c", "m");
        let wanted = publication.wanted(Some(&configuration(&["", "old"])), "new").unwrap();
        let bundle = json!({ "caBundle": ByteString(b"new".to_vec()) });
        let webhooks = json!([
            { "name": "w0.example", "clientConfig": bundle },
            { "name": "w1.example", "clientConfig": bundle },
        ]);
        assert_eq!(wanted["webhooks"], webhooks);
        assert_eq!(wanted["metadata"], json!({ "name": "c", "uid": "u" }));
        assert!(publication.wanted(None, "new").is_err());
        assert!(publication.wanted(Some(&configuration(&[])), "new").is_err());
    }
}
