//! The policy: which inline volumes pods may have, per namespace, and which volumes are deferred. A
//! ConfigMap, which may change at any time, overrides the flags.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::watcher;
use kube::{Api, Client};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use super::args::{Level, PolicyArgs};
use super::deferral::{self, Deferral};
use common::quantity;
use common::text::truncate;
use kubernetes::cache::{Cache, Key};
use kubernetes::name;
use telemetry::rate_limited_log::RateLimitedLog;
use telemetry::shutdown::Shutdown;

/// Key of the policy in the ConfigMap.
const KEY: &str = "policy.yaml";
/// Limit of YAML nodes and of YAML events. A ConfigMap of the maximum size stays below it.
const MAX_EVENTS: usize = 500_000;
/// Maximum bytes of a parse error in a message.
const MAX_PROBLEM: usize = 512;

/// Rules for one namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    pub allowed: bool,
    /// Maximum size in bytes. `None`: the driver's limit applies.
    pub max_size: Option<u64>,
}

/// Rules for all namespaces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Pod Security level that inline volumes require. `None`: the CSIDriver object determines it.
    pub volume_profile: Option<Level>,
    /// Level of namespaces without the label.
    pub default_pod_security: Level,
    /// Which volumes container runtimes mount.
    pub deferral: Deferral,
    default: Rules,
    namespaces: BTreeMap<String, PartialRules>,
}

/// Rules as the document has them for one namespace or as default; missing fields inherit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PartialRules {
    allowed: Option<bool>,
    #[serde(default, deserialize_with = "size")]
    max_size: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Document {
    volume_profile: Option<Level>,
    default_pod_security: Option<Level>,
    #[serde(default)]
    deferral: Option<Vec<deferral::Entry>>,
    #[serde(default)]
    default: Option<PartialRules>,
    #[serde(default)]
    namespaces: Option<BTreeMap<String, Option<PartialRules>>>,
}

/// Parses a quantity or a number of bytes.
fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    match serde_json::Value::deserialize(deserializer)? {
        serde_json::Value::Null => Ok(None),
        serde_json::Value::String(text) => {
            quantity::parse(&text).map(Some).map_err(D::Error::custom)
        }
        serde_json::Value::Number(number) => match number.as_u64() {
            Some(bytes) => Ok(Some(bytes)),
            None => Err(D::Error::custom(format!("{number} is not a size"))),
        },
        _ => Err(D::Error::custom("is not a size")),
    }
}

impl PartialRules {
    /// Fills missing fields from `default`.
    fn with_default(&self, default: &Rules) -> Rules {
        Rules {
            allowed: self.allowed.unwrap_or(default.allowed),
            max_size: self.max_size.or(default.max_size),
        }
    }
}

impl Policy {
    /// The policy of the flags, without a ConfigMap.
    pub fn of_flags(args: &PolicyArgs) -> Self {
        Self {
            volume_profile: args.volume_profile,
            default_pod_security: args.default_pod_security,
            deferral: Deferral::default(),
            default: Rules { allowed: args.inline_allowed, max_size: args.max_size },
            namespaces: BTreeMap::new(),
        }
    }

    /// Parses a document; missing fields are as in `flags`.
    ///
    /// # Errors
    /// The document is invalid. The message names the field.
    fn parse(text: &str, flags: &Self) -> Result<Self, String> {
        let document = document(text).map_err(|problem| truncate(&problem, MAX_PROBLEM))?;
        let mut namespaces = BTreeMap::new();
        for (namespace, rules) in document.namespaces.unwrap_or_default() {
            if !name::is_namespace(&namespace) {
                let shown = truncate(&namespace, 64);
                return Err(format!("namespaces: {shown:?} is not a valid namespace name"));
            }
            namespaces.insert(namespace, rules.unwrap_or_default());
        }
        Ok(Self {
            volume_profile: document.volume_profile.or(flags.volume_profile),
            default_pod_security: document
                .default_pod_security
                .unwrap_or(flags.default_pod_security),
            deferral: Deferral::read(document.deferral.unwrap_or_default())?,
            default: document.default.unwrap_or_default().with_default(&flags.default),
            namespaces,
        })
    }

    /// Returns the rules for a namespace, and whether its Pod Security level is checked too. It is
    /// checked unless the policy sets `allowed` for this namespace.
    pub fn of(&self, namespace: &str) -> (Rules, bool) {
        match self.namespaces.get(namespace) {
            Some(rules) => (rules.with_default(&self.default), rules.allowed.is_none()),
            None => (self.default, true),
        }
    }
}

fn document(text: &str) -> Result<Document, String> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: MAX_EVENTS,
            max_nodes: MAX_EVENTS,
            max_depth: 16,
            // Aliases are not needed, and expand short text into a large document.
            max_aliases: 0,
            max_anchors: 0,
            max_documents: 1,
        },
        strict_booleans: true,
        with_snippet: false,
    };
    let value: Option<serde_json::Value> =
        serde_saphyr::from_str_with_options(text, options).map_err(|error| error.to_string())?;
    match value {
        None | Some(serde_json::Value::Null) => Ok(Document::default()),
        Some(value) => serde_path_to_error::deserialize(value)
            .map_err(|error| format!("{}: {}", error.path().clone(), error.into_inner())),
    }
}

/// Why no policy is in effect. The message is for the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicyError {
    Invalid(String),
    NotLoaded(String),
}

/// The current policy, from flags and ConfigMap. Clones share the cache.
#[derive(Clone)]
pub struct Policies {
    maps: Cache<ConfigMap>,
    key: Key,
    flags: Arc<Policy>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// The last valid policy.
    policy: Option<Arc<Policy>>,
    /// The ConfigMap that was parsed last, so that each version is parsed once.
    last_seen: Option<Option<Arc<ConfigMap>>>,
    error_log: RateLimitedLog,
    problem: Option<String>,
}

impl Policies {
    /// Starts to watch the ConfigMap.
    pub fn start(client: &Client, namespace: &str, args: &PolicyArgs, shutdown: Shutdown) -> Self {
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
        let one = maps.clone();
        let select =
            watcher::Config::default().fields(&format!("metadata.name={}", args.config_map));
        Self {
            maps: Cache::start(maps, move |_| one.clone(), select, |_| None, shutdown),
            key: Key::new(namespace, &args.config_map),
            flags: Arc::new(Policy::of_flags(args)),
            state: Arc::default(),
        }
    }

    /// Returns the current policy. While the ConfigMap is invalid or the API server is unavailable,
    /// this is the last valid policy.
    ///
    /// # Errors
    /// No valid policy has been loaded yet.
    pub fn current(&self) -> Result<Arc<Policy>, PolicyError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = self.maps.cached(&self.key) {
            state.update(found, &self.key, &self.flags);
        }
        let Key { namespace, name } = &self.key;
        state.policy.clone().ok_or_else(|| match &state.problem {
            Some(problem) => PolicyError::Invalid(format!(
                "the ConfigMap {namespace}/{name} is invalid: {problem}"
            )),
            None => PolicyError::NotLoaded(format!(
                "the ConfigMap {namespace}/{name} is not loaded yet; try again"
            )),
        })
    }
}

impl Policies {
    /// Whether the policy in effect is that of the current ConfigMap.
    pub fn is_current(&self) -> bool {
        let is_loaded = self.current().is_ok();
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        is_loaded && state.problem.is_none()
    }
}

impl State {
    fn update(&mut self, found: Option<Arc<ConfigMap>>, key: &Key, flags: &Arc<Policy>) {
        let same = match (&self.last_seen, &found) {
            (Some(Some(last)), Some(found)) => Arc::ptr_eq(last, found),
            (Some(None), None) => true,
            _ => false,
        };
        if same {
            return;
        }
        let text = found.as_ref().and_then(|map| map.data.as_ref()?.get(KEY));
        match text.map_or(Ok(flags.clone()), |text| Policy::parse(text, flags).map(Arc::new)) {
            Ok(policy) => {
                if self.policy.as_ref() != Some(&policy) {
                    tracing::info!(named = policy.namespaces.len(), default = ?policy.default, "policy loaded");
                }
                self.error_log.clear();
                (self.policy, self.problem) = (Some(policy), None);
            }
            Err(problem) => {
                if self.error_log.is_new(&problem) {
                    let (Key { namespace, name }, before) = (key, self.policy.is_some());
                    let problem = format!("{KEY}: {problem}");
                    tracing::warn!(
                        problem,
                        before,
                        "ConfigMap {namespace}/{name} is invalid; keeping the current policy"
                    );
                }
                self.problem = Some(format!("{KEY}: {problem}"));
            }
        }
        self.last_seen = Some(found);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags() -> Policy {
        Policy {
            volume_profile: None,
            default_pod_security: Level::Privileged,
            deferral: Deferral::default(),
            default: Rules { allowed: true, max_size: Some(1 << 30) },
            namespaces: BTreeMap::new(),
        }
    }

    fn read(text: &str) -> Result<Policy, String> {
        Policy::parse(text, &flags())
    }

    #[test]
    fn missing_fields_inherit_from_default_and_flags() {
        for nothing in [
            "",
            "# nothing\n",
            "{}",
            "null",
            "default:",
            "namespaces: {}",
            "deferral:",
            "deferral: []",
        ] {
            assert_eq!(read(nothing), Ok(flags()), "{nothing:?}");
        }
        let policy = read(
            "volumeProfile: baseline\ndefaultPodSecurity: restricted\n\
             namespaces:\n  a: {allowed: false}\n  b: {maxSize: 2Gi}\n  c:\n  d: {maxSize: 4096}\n",
        );
        let policy = policy.unwrap();
        assert_eq!(policy.volume_profile, Some(Level::Baseline));
        assert_eq!(policy.default_pod_security, Level::Restricted);
        let (a, by_level) = policy.of("a");
        assert!(!a.allowed && !by_level && a.max_size == Some(1 << 30));
        let (b, by_level) = policy.of("b");
        assert!(b.allowed && by_level && b.max_size == Some(2 << 30));
        assert_eq!(policy.of("c"), policy.of("elsewhere"));
        assert_eq!(policy.of("d").0.max_size, Some(4096));
    }

    #[test]
    fn parse_errors_name_the_field() {
        for (text, place) in [
            ("defaults: {}", "defaults"),
            ("default: {maxsize: 1Gi}", "default"),
            ("default: {maxSize: much}", "default.maxSize"),
            ("default: {maxSize: -1}", "default.maxSize"),
            ("namespaces: {a: {attributes: [size]}}", "namespaces.a"),
            ("default: {fromSnapshot: none}", "default"),
            ("namespaces: {a: {allowed: \"true\"}}", "namespaces.a.allowed"),
            ("namespaces: {a: {allowed: maybe}}", "namespaces.a.allowed"),
            ("namespaces: {A_b: {}}", "A_b"),
            ("volumeProfile: open", "volumeProfile"),
            ("deferral: {}", "deferral"),
            ("deferral: [{storageClass: \"\"}]", "deferral[0]"),
            ("deferral: [{runtimeClass: k}]", "deferral[0]"),
            ("deferral: [{storageClass: \"\", runtimeClass: \"\"}]", "deferral[0].runtimeClass"),
            ("deferral: [{storageClass: A_b, runtimeClass: k}]", "deferral[0].storageClass"),
            ("deferral: [{storageClass: a, runtimeClass: k, subpath: true}]", "deferral[0]"),
            (
                "deferral: [{storageClass: a, runtimeClass: k, subPath: \"true\"}]",
                "deferral[0].subPath",
            ),
            (
                "deferral: [{storageClass: a, runtimeClass: k, fsGroup: true}]",
                "deferral[0].fsGroupChangePolicies",
            ),
            (
                "deferral: [{storageClass: a, runtimeClass: k, fsGroup: true, fsGroupChangePolicies: []}]",
                "deferral[0].fsGroupChangePolicies",
            ),
            (
                "deferral: [{storageClass: a, runtimeClass: k, fsGroupChangePolicies: [Always]}]",
                "deferral[0].fsGroupChangePolicies",
            ),
            (
                "deferral: [{storageClass: a, runtimeClass: k, fsGroup: true, fsGroupChangePolicies: [None]}]",
                "deferral[0].fsGroupChangePolicies[0]",
            ),
            (
                "deferral: [{storageClass: a, runtimeClass: k}, {storageClass: a, runtimeClass: k, subPath: true}]",
                "deferral[1].storageClass",
            ),
            ("[]", ""),
            ("namespaces: {a: {}, a: {}}", "a"),
            ("a: [", "line"),
        ] {
            let problem = read(text).expect_err(text);
            assert!(problem.contains(place), "{text}: {problem}");
        }
    }

    #[test]
    fn short_text_cannot_expand_into_large_documents() {
        let aliases = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n";
        assert!(read(aliases).is_err());
        let deep = format!("default: {}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(read(&deep).unwrap_err().len() < 2 * MAX_PROBLEM);
        assert!(read("--- {}\n--- {}\n").is_err());
    }
}
