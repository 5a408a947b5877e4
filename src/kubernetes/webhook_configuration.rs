//! Maintains the caBundle of a ValidatingWebhookConfiguration or MutatingWebhookConfiguration, by
//! which the API server authenticates a webhook of this program. The administrator owns the object:
//! only this field of each webhook is written, and the object is never created.

use std::marker::PhantomData;

use anyhow::Context;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use kube::Resource;
use kube::core::ClusterResourceScope;
use serde_json::{Value, json};

use super::cache::Object;
use super::publish::Publication;

/// The policy, also the default, under which requests fail if the webhook does not respond.
const FAILS_CLOSED: &str = "Fail";

/// Fields that both kinds of webhooks have.
#[derive(Debug, Clone, Copy)]
pub struct Webhook<'a> {
    name: &'a str,
    client: &'a WebhookClientConfig,
    failure_policy: Option<&'a str>,
}

/// An object that has webhooks.
pub trait Configuration: Object + Resource<Scope = ClusterResourceScope> {
    fn webhooks(&self) -> Vec<Webhook<'_>>;
}

macro_rules! has_webhooks {
    ($($kind:ty),*) => {$(
        impl Configuration for $kind {
            fn webhooks(&self) -> Vec<Webhook<'_>> {
                let all = self.webhooks.iter().flatten();
                all.map(|one| Webhook {
                    name: &one.name,
                    client: &one.client_config,
                    failure_policy: one.failure_policy.as_deref(),
                })
                .collect()
            }
        }
    )*};
}

has_webhooks!(MutatingWebhookConfiguration, ValidatingWebhookConfiguration);

impl<'a> Webhook<'a> {
    fn ca_bundle(&self) -> &'a [u8] {
        self.client.ca_bundle.as_ref().map(|bundle| &*bundle.0).unwrap_or_default()
    }

    fn is_open(&self) -> bool {
        self.failure_policy.is_some_and(|policy| policy != FAILS_CLOSED)
    }
}

/// The caBundle of all webhooks of one configuration.
#[derive(Debug)]
pub struct CaBundle<C> {
    name: String,
    manager: &'static str,
    is_open: bool,
    kind: PhantomData<fn() -> C>,
}

impl<C: Configuration> CaBundle<C> {
    /// For the configuration `name`; `manager` is the field manager of the writes.
    pub fn new(name: &str, manager: &'static str) -> Self {
        Self { name: name.to_owned(), manager, is_open: false, kind: PhantomData }
    }
}

impl<C: Configuration> Publication for CaBundle<C> {
    type Object = C;

    fn manager(&self) -> &'static str {
        self.manager
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn is_current(&self, found: &C, pem: &str) -> bool {
        let webhooks = found.webhooks();
        !webhooks.is_empty() && webhooks.iter().all(|one| one.ca_bundle() == pem.as_bytes())
    }

    fn desired(&self, found: Option<&C>, pem: &str) -> anyhow::Result<Value> {
        let found =
            found.context("the object does not exist; apply it, otherwise nothing is checked")?;
        let ca_bundle = json!({ "caBundle": k8s_openapi::ByteString(pem.as_bytes().to_vec()) });
        let webhooks = found.webhooks();
        let webhooks =
            webhooks.iter().map(|one| json!({ "name": one.name, "clientConfig": ca_bundle }));
        let webhooks: Vec<_> = webhooks.collect();
        anyhow::ensure!(!webhooks.is_empty(), "the object has no webhooks; apply it again");
        Ok(json!({
            "apiVersion": C::api_version(&()),
            "kind": C::kind(&()),
            // The uid prevents that apply creates an object that has been deleted meanwhile.
            "metadata": { "name": self.name, "uid": found.meta().uid },
            "webhooks": webhooks,
        }))
    }

    fn inspect(&mut self, found: &C) {
        let webhooks = found.webhooks();
        let open = webhooks.iter().find(|webhook| webhook.is_open());
        if let Some(webhook) = open.filter(|_| !self.is_open) {
            tracing::warn!(
                webhook = webhook.name,
                "{} {}: failurePolicy is not {FAILS_CLOSED}: while the webhook is unavailable, all requests pass unchecked",
                C::kind(&()),
                self.name
            );
        }
        self.is_open = open.is_some();
    }
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
    fn only_the_bundles_are_written_and_nothing_is_created() {
        let publication = CaBundle::new("c", "m");
        let desired = publication.desired(Some(&configuration(&["", "old"])), "new").unwrap();
        let bundle = json!({ "caBundle": ByteString(b"new".to_vec()) });
        let webhooks = json!([
            { "name": "w0.example", "clientConfig": bundle },
            { "name": "w1.example", "clientConfig": bundle },
        ]);
        assert_eq!(desired["webhooks"], webhooks);
        assert_eq!(desired["metadata"], json!({ "name": "c", "uid": "u" }));
        assert!(publication.desired(None, "new").is_err());
        assert!(publication.desired(Some(&configuration(&[])), "new").is_err());
    }
}
