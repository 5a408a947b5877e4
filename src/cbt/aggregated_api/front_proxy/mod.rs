//! Authenticates the user that the API server names in headers (front proxy). The headers are only
//! valid with a client certificate of the request-header authority with an allowed name. The
//! ConfigMap kube-system/extension-apiserver-authentication, which the API server maintains,
//! contains both and the names of the headers. There are no other ways to authenticate: no tokens,
//! no anonymous user.
//!
//! The current content of the ConfigMap applies. While the watch is not running, it is the last
//! known content. If the ConfigMap is missing or invalid, all requests are refused.

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
use kubernetes::cache::{Cache, Key};
use kubernetes::tls::{ClientAuthorities, ClientChain};
use telemetry::rate_limited_log::RateLimitedLog;
use telemetry::shutdown::Shutdown;

/// The API server's ConfigMap.
const NAMESPACE: &str = "kube-system";
const NAME: &str = "extension-apiserver-authentication";
/// Maximum entries in one of the ConfigMap's lists.
const MAX_LIST: usize = 100;
/// Delay of a retry while the configuration is unknown.
const RETRY: Duration = Duration::from_secs(1);

/// Authenticates requests. Clones share the watch.
#[derive(Clone)]
pub struct FrontProxy {
    maps: Cache<ConfigMap>,
    known: Arc<Mutex<Known>>,
}

/// The configuration from the last report of the ConfigMap.
#[derive(Default)]
struct Known {
    reported: Option<Option<Arc<ConfigMap>>>,
    trust: Option<Arc<Trust>>,
    error_log: RateLimitedLog,
}

impl FrontProxy {
    /// Starts to watch the ConfigMap.
    pub fn start(client: &Client, shutdown: Shutdown) -> Self {
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
        let one = maps.clone();
        let select = watcher::Config::default().fields(&format!("metadata.name={NAME}"));
        let maps = Cache::start(maps, move |_| one.clone(), select, |_| None, shutdown);
        Self { maps, known: Arc::default() }
    }

    /// Whether the configuration is known and valid.
    pub fn is_known(&self) -> bool {
        self.trust().is_some()
    }

    /// The user in whose name the API server sends the request.
    ///
    /// # Errors
    /// The caller is not the API server, or the configuration is not known yet.
    pub fn authenticate(
        &self,
        chain: &ClientChain,
        headers: &HeaderMap,
    ) -> Result<UserInfo, Failure> {
        let Some(trust) = self.trust() else {
            let message = format!(
                "requests cannot be authenticated: ConfigMap {NAMESPACE}/{NAME} is missing or invalid; retry"
            );
            return Err(Failure::new(Cause::ApiServer, message).after(RETRY));
        };
        trust.authenticate(chain, headers)
    }

    fn trust(&self) -> Option<Arc<Trust>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reported) = self.maps.cached(&Key::new(NAMESPACE, NAME)) {
            known.update(reported);
        }
        known.trust.clone()
    }
}

impl Known {
    fn update(&mut self, reported: Option<Arc<ConfigMap>>) {
        let is_same = match (&self.reported, &reported) {
            (Some(Some(before)), Some(now)) => Arc::ptr_eq(before, now),
            (Some(None), None) => true,
            _ => false,
        };
        if is_same {
            return;
        }
        let data = reported.as_ref().and_then(|map| map.data.as_ref());
        let trust = data.context("the ConfigMap does not exist").and_then(Trust::read);
        self.reported = Some(reported);
        self.trust = match trust {
            Ok(trust) => {
                self.error_log.clear();
                tracing::info!(names = ?trust.names, "read the front proxy's configuration from ConfigMap {NAMESPACE}/{NAME}");
                Some(Arc::new(trust))
            }
            Err(error) => {
                let problem = format!("{error:#}");
                if self.error_log.is_new(&problem) {
                    tracing::warn!(
                        problem,
                        "invalid ConfigMap {NAMESPACE}/{NAME}: refusing all requests"
                    );
                }
                None
            }
        };
    }
}

/// Content of the ConfigMap.
#[derive(Debug)]
struct Trust {
    authorities: ClientAuthorities,
    /// Allowed common names; empty: any name.
    names: Vec<String>,
    users: Vec<HeaderName>,
    uids: Vec<HeaderName>,
    groups: Vec<HeaderName>,
    /// In lowercase.
    extra_prefixes: Vec<String>,
}

impl Trust {
    /// # Errors
    /// A key is missing or has an invalid value.
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
            tracing::debug!(%error, "refused a caller that is not the front proxy");
            refused("only the API server's front proxy may call this server; send the request to the API server")
        })?;
        let is_allowed = |name: &String| self.names.contains(name);
        if !self.names.is_empty() && !name.as_ref().is_some_and(is_allowed) {
            tracing::debug!(?name, "refused a caller whose name is not allowed");
            return Err(refused(
                "the certificate's common name is not one of requestheader-allowed-names",
            ));
        }
        self.user(sent).ok_or_else(|| refused("the headers name no user or are not text"))
    }

    /// The user in the headers. `None` if there is no user or a value is not text.
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

    /// Keys are percent-encoded, and in lowercase like all header names.
    fn extra(&self, sent: &HeaderMap) -> Option<BTreeMap<String, Vec<String>>> {
        let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for name in sent.keys() {
            let key = self.extra_prefixes.iter().find_map(|one| name.as_str().strip_prefix(one));
            let Some(key) = key.filter(|key| !key.is_empty()) else { continue };
            let decoded = percent_decode_str(key).decode_utf8();
            // Like the API server, keep a key that cannot be decoded.
            let key = decoded.map_or_else(|_| key.to_owned(), |key| key.into_owned());
            let found = sent.get_all(name).iter().map(text).collect::<Option<Vec<_>>>()?;
            extra.entry(key).or_default().extend(found);
        }
        Some(extra)
    }
}

/// The non-empty values of these headers, in order. `None` if a value is not text.
fn values(sent: &HeaderMap, names: &[HeaderName]) -> Option<Vec<String>> {
    let found = names.iter().flat_map(|name| sent.get_all(name)).map(text);
    let found: Vec<String> = found.collect::<Option<_>>()?;
    Some(found.into_iter().filter(|value| !value.is_empty()).collect())
}

fn text(value: &HeaderValue) -> Option<String> {
    str::from_utf8(value.as_bytes()).ok().map(str::to_owned)
}

/// A list in JSON. A missing key is an empty list.
fn list(data: &BTreeMap<String, String>, key: &str) -> anyhow::Result<Vec<String>> {
    let Some(json) = data.get(key).filter(|json| !json.is_empty()) else { return Ok(Vec::new()) };
    let list: Option<Vec<String>> =
        serde_json::from_str(json).with_context(|| format!("{key} is not a list of strings"))?;
    let list = list.unwrap_or_default();
    anyhow::ensure!(list.len() <= MAX_LIST, "{key} has more than {MAX_LIST} entries");
    anyhow::ensure!(list.iter().all(|entry| !entry.is_empty()), "{key} has an empty entry");
    Ok(list)
}

fn headers(data: &BTreeMap<String, String>, key: &str) -> anyhow::Result<Vec<HeaderName>> {
    let names = list(data, key)?.into_iter();
    let names = names.map(|name| HeaderName::from_bytes(name.as_bytes()));
    names.collect::<Result<_, _>>().with_context(|| format!("{key}: invalid header name"))
}

#[cfg(test)]
mod tests;
