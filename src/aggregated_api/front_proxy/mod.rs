//! Who asks: the user whom the API server names in the headers of a request that it passes on (front proxy). The headers count only beside
//! a client certificate of the request-header authority with a name that is allowed; both, and which headers they are, stand in the
//! ConfigMap kube-system/extension-apiserver-authentication, which the API server keeps. There is no other way in: no tokens, no
//! anonymous user.
//!
//! What the ConfigMap says now is what holds. While the watch does not run, that is what it said last; when it is gone or cannot be
//! read, nobody is believed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use axum::http::HeaderMap;
use axum::http::header::{HeaderName, HeaderValue};
use k8s_openapi::api::authentication::v1::UserInfo;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::watcher;
use kube::{Api, Client};
use percent_encoding::percent_decode_str;

use super::failure::{Cause, Failure};
use crate::kubernetes::cache::{Cache, Key};
use crate::kubernetes::tls::{ClientAuthorities, ClientChain};
use crate::telemetry::complaint::Complaint;
use crate::telemetry::shutdown::Shutdown;

/// Where the API server says whom to believe.
const NAMESPACE: &str = "kube-system";
const NAME: &str = "extension-apiserver-authentication";
/// Entries in one of the ConfigMap's lists, at most.
const MAX_LIST: usize = 100;
/// After so long it may be known.
const RETRY: Duration = Duration::from_secs(1);

/// Whom to believe, as it is now. Cheap to clone.
#[derive(Clone)]
pub struct FrontProxy {
    maps: Cache<ConfigMap>,
    known: Arc<Mutex<Known>>,
}

/// What was made of the ConfigMap that was told last.
#[derive(Default)]
struct Known {
    told: Option<Option<Arc<ConfigMap>>>,
    trust: Option<Arc<Trust>>,
    complaint: Complaint,
}

impl FrontProxy {
    /// Begins to watch the ConfigMap.
    pub fn start(client: &Client, shutdown: Shutdown) -> Self {
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
        let one = maps.clone();
        let select = watcher::Config::default().fields(&format!("metadata.name={NAME}"));
        let maps = Cache::start(maps, move |_| one.clone(), select, |_| None, shutdown);
        Self { maps, known: Arc::default() }
    }

    /// Whether anybody can be believed.
    pub fn is_known(&self) -> bool {
        self.trust().is_some()
    }

    /// The user for whom the API server asks.
    ///
    /// # Errors
    /// It is not the API server, or it is not known yet how it is told.
    pub fn authenticate(
        &self,
        chain: &ClientChain,
        headers: &HeaderMap,
    ) -> Result<UserInfo, Failure> {
        let Some(trust) = self.trust() else {
            let message = format!(
                "it is not known whom to believe: ConfigMap {NAMESPACE}/{NAME} cannot be read or used; try again"
            );
            return Err(Failure::new(Cause::ApiServer, message).after(RETRY));
        };
        trust.authenticate(chain, headers)
    }

    fn trust(&self) -> Option<Arc<Trust>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(told) = self.maps.told(&Key::new(NAMESPACE, NAME)) {
            known.take(told);
        }
        known.trust.clone()
    }
}

impl Known {
    fn take(&mut self, told: Option<Arc<ConfigMap>>) {
        let is_same = match (&self.told, &told) {
            (Some(Some(before)), Some(now)) => Arc::ptr_eq(before, now),
            (Some(None), None) => true,
            _ => false,
        };
        if is_same {
            return;
        }
        let data = told.as_ref().and_then(|map| map.data.as_ref());
        let trust = data.context("it is not there").and_then(Trust::read);
        self.told = Some(told);
        self.trust = match trust {
            Ok(trust) => {
                self.complaint.is_over();
                tracing::info!(names = ?trust.names, "ConfigMap {NAMESPACE}/{NAME} says whom to believe");
                Some(Arc::new(trust))
            }
            Err(error) => {
                let problem = format!("{error:#}");
                if self.complaint.is_new(&problem) {
                    tracing::warn!(problem, "ConfigMap {NAMESPACE}/{NAME}: nobody is believed");
                }
                None
            }
        };
    }
}

/// What the ConfigMap says.
#[derive(Debug)]
struct Trust {
    authorities: ClientAuthorities,
    /// Common names; any if there is none.
    names: Vec<String>,
    users: Vec<HeaderName>,
    uids: Vec<HeaderName>,
    groups: Vec<HeaderName>,
    /// In lower case.
    extra_prefixes: Vec<String>,
}

impl Trust {
    /// # Errors
    /// Something is missing or is not what it should be; the key.
    fn read(data: &BTreeMap<String, String>) -> anyhow::Result<Self> {
        const CA: &str = "requestheader-client-ca-file";
        const USERS: &str = "requestheader-username-headers";
        let pem = data.get(CA).with_context(|| format!("no {CA}"))?;
        let users = headers(data, USERS)?;
        anyhow::ensure!(!users.is_empty(), "no {USERS}");
        let prefixes = list(data, "requestheader-extra-headers-prefix")?;
        Ok(Self {
            authorities: ClientAuthorities::of(pem.as_bytes()).context(CA)?,
            names: list(data, "requestheader-allowed-names")?,
            users,
            uids: headers(data, "requestheader-uid-headers")?,
            groups: headers(data, "requestheader-group-headers")?,
            extra_prefixes: prefixes.iter().map(|prefix| prefix.to_ascii_lowercase()).collect(),
        })
    }

    fn authenticate(&self, chain: &ClientChain, sent: &HeaderMap) -> Result<UserInfo, Failure> {
        let refused =
            |why: &str| Failure::new(Cause::Unauthenticated, format!("Unauthorized: {why}"));
        let name = self.authorities.common_name(chain).map_err(|error| {
            tracing::debug!(%error, "a caller that is not the front proxy");
            refused("only the API server's front proxy may ask here; ask the API server")
        })?;
        let is_allowed = |name: &String| self.names.contains(name);
        if !self.names.is_empty() && !name.as_ref().is_some_and(is_allowed) {
            tracing::debug!(?name, "a caller whose name is not allowed");
            return Err(refused(
                "the certificate's common name is not one of requestheader-allowed-names",
            ));
        }
        self.user(sent).ok_or_else(|| refused("the headers name no user, or are not text"))
    }

    /// None where there is no user or something is no text.
    fn user(&self, sent: &HeaderMap) -> Option<UserInfo> {
        let username = values(sent, &self.users)?.into_iter().next()?;
        let extra = self.extra(sent)?;
        Some(UserInfo {
            username: Some(username),
            uid: values(sent, &self.uids)?.into_iter().next(),
            groups: Some(values(sent, &self.groups)?).filter(|groups| !groups.is_empty()),
            extra: Some(extra).filter(|extra| !extra.is_empty()),
        })
    }

    /// The keys are in lower case, since headers' names are, and percent-encoded.
    fn extra(&self, sent: &HeaderMap) -> Option<BTreeMap<String, Vec<String>>> {
        let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for name in sent.keys() {
            let key = self.extra_prefixes.iter().find_map(|one| name.as_str().strip_prefix(one));
            let Some(key) = key.filter(|key| !key.is_empty()) else { continue };
            let decoded = percent_decode_str(key).decode_utf8();
            // As the API server has it: what cannot be decoded stands as it is.
            let key = decoded.map_or_else(|_| key.to_owned(), |key| key.into_owned());
            let found = sent.get_all(name).iter().map(text).collect::<Option<Vec<_>>>()?;
            extra.entry(key).or_default().extend(found);
        }
        Some(extra)
    }
}

/// What is in these headers, in their order, and not empty. None where it is no text.
fn values(sent: &HeaderMap, names: &[HeaderName]) -> Option<Vec<String>> {
    let found = names.iter().flat_map(|name| sent.get_all(name)).map(text);
    let found: Vec<String> = found.collect::<Option<_>>()?;
    Some(found.into_iter().filter(|value| !value.is_empty()).collect())
}

fn text(value: &HeaderValue) -> Option<String> {
    str::from_utf8(value.as_bytes()).ok().map(str::to_owned)
}

/// A list in JSON. A key that is not there is an empty one.
fn list(data: &BTreeMap<String, String>, key: &str) -> anyhow::Result<Vec<String>> {
    let Some(json) = data.get(key).filter(|json| !json.is_empty()) else { return Ok(Vec::new()) };
    let list: Option<Vec<String>> =
        serde_json::from_str(json).with_context(|| format!("{key} is no list of strings"))?;
    let list = list.unwrap_or_default();
    anyhow::ensure!(list.len() <= MAX_LIST, "{key} has more than {MAX_LIST} entries");
    anyhow::ensure!(list.iter().all(|entry| !entry.is_empty()), "{key} has an empty entry");
    Ok(list)
}

fn headers(data: &BTreeMap<String, String>, key: &str) -> anyhow::Result<Vec<HeaderName>> {
    let names = list(data, key)?.into_iter();
    let names = names.map(|name| HeaderName::from_bytes(name.as_bytes()));
    names.collect::<Result<_, _>>().with_context(|| format!("{key}: not the name of a header"))
}

#[cfg(test)]
mod tests;
