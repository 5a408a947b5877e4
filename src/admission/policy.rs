//! What pods may ask of inline volumes, namespace by namespace: the flags, and above them a ConfigMap that may change at any time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::watcher;
use kube::{Api, Client};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use super::args::{Level, PolicyArgs};
use super::deferral::{self, Deferral};
use crate::grpc::cut;
use crate::kubernetes::cache::{Cache, Key};
use crate::kubernetes::name;
use crate::quantity;
use crate::telemetry::complaint::Complaint;
use crate::telemetry::shutdown::Shutdown;

/// Key of the ConfigMap.
const KEY: &str = "policy.yaml";
/// Nodes and events of the document. A ConfigMap of the largest size holds no more namespaces than these describe.
const MAX_EVENTS: usize = 500_000;
/// Bytes of what is told of a bad document.
const MAX_TOLD: usize = 512;

/// What holds for one namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    pub allowed: bool,
    /// In bytes; `None` for whatever the driver makes.
    pub max_size: Option<u64>,
}

/// What holds everywhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// What a namespace's Pod Security level has to allow; `None` for what the CSIDriver object says.
    pub volume_profile: Option<Level>,
    /// Level of namespaces that say none.
    pub default_pod_security: Level,
    /// Which volumes container runtimes mount.
    pub deferral: Deferral,
    default: Rules,
    namespaces: BTreeMap<String, Said>,
}

/// What the document says of one namespace, or of all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Said {
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
    default: Option<Said>,
    #[serde(default)]
    namespaces: Option<BTreeMap<String, Option<Said>>>,
}

/// A quantity, or a number of bytes.
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

impl Said {
    /// What holds where this says nothing is as in `otherwise`.
    fn over(&self, otherwise: &Rules) -> Rules {
        Rules {
            allowed: self.allowed.unwrap_or(otherwise.allowed),
            max_size: self.max_size.or(otherwise.max_size),
        }
    }
}

impl Policy {
    /// What the flags say.
    pub fn of_flags(args: &PolicyArgs) -> Self {
        Self {
            volume_profile: args.volume_profile,
            default_pod_security: args.default_pod_security,
            deferral: Deferral::default(),
            default: Rules { allowed: args.inline_allowed, max_size: args.max_size },
            namespaces: BTreeMap::new(),
        }
    }

    /// What a document says, and where it says nothing what holds without it.
    ///
    /// # Errors
    /// It says something else; where and what.
    fn read(text: &str, without: &Self) -> Result<Self, String> {
        let document = document(text).map_err(|problem| cut(&problem, MAX_TOLD))?;
        let mut namespaces = BTreeMap::new();
        for (namespace, said) in document.namespaces.unwrap_or_default() {
            if !name::is_namespace(&namespace) {
                let shown = cut(&namespace, 64);
                return Err(format!("namespaces: {shown:?} is not the name of a namespace"));
            }
            namespaces.insert(namespace, said.unwrap_or_default());
        }
        Ok(Self {
            volume_profile: document.volume_profile.or(without.volume_profile),
            default_pod_security: document
                .default_pod_security
                .unwrap_or(without.default_pod_security),
            deferral: Deferral::read(document.deferral.unwrap_or_default())?,
            default: document.default.unwrap_or_default().over(&without.default),
            namespaces,
        })
    }

    /// What holds for a namespace, and whether it is judged by the level of its Pod Security too: so it is unless the policy says
    /// of this very namespace whether inline volumes are allowed.
    pub fn of(&self, namespace: &str) -> (Rules, bool) {
        match self.namespaces.get(namespace) {
            Some(said) => (said.over(&self.default), said.allowed.is_none()),
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
            // Nobody needs them here, and with them little text says much.
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

/// Why there is no policy; for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unknown {
    Nonsense(String),
    Unheard(String),
}

/// The policy as it is now. Cheap to clone.
#[derive(Clone)]
pub struct Policies {
    maps: Cache<ConfigMap>,
    key: Key,
    flags: Arc<Policy>,
    known: Arc<Mutex<Known>>,
}

#[derive(Debug, Default)]
struct Known {
    /// What was read last without an error.
    policy: Option<Arc<Policy>>,
    /// What was looked at last: each document is read once.
    looked_at: Option<Option<Arc<ConfigMap>>>,
    complaint: Complaint,
    problem: Option<String>,
}

impl Policies {
    /// Begins to watch the ConfigMap.
    pub fn start(client: &Client, namespace: &str, args: &PolicyArgs, shutdown: Shutdown) -> Self {
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
        let one = maps.clone();
        let select =
            watcher::Config::default().fields(&format!("metadata.name={}", args.config_map));
        Self {
            maps: Cache::start(maps, move |_| one.clone(), select, |_| None, shutdown),
            key: Key::new(namespace, &args.config_map),
            flags: Arc::new(Policy::of_flags(args)),
            known: Arc::default(),
        }
    }

    /// What the ConfigMap says; while it says nonsense, or the API server is away, what it said before.
    ///
    /// # Errors
    /// It has said nothing but nonsense, or nothing yet.
    pub fn current(&self) -> Result<Arc<Policy>, Unknown> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = self.maps.told(&self.key) {
            known.look(found, &self.key, &self.flags);
        }
        let Key { namespace, name } = &self.key;
        known.policy.clone().ok_or_else(|| match &known.problem {
            Some(problem) => {
                Unknown::Nonsense(format!("ConfigMap {namespace}/{name} is not taken: {problem}"))
            }
            None => Unknown::Unheard(format!(
                "the API server has not told the ConfigMap {namespace}/{name} yet; try again"
            )),
        })
    }
}

impl Policies {
    /// Whether what the ConfigMap says is what holds.
    pub fn is_taken(&self) -> bool {
        let is_known = self.current().is_ok();
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        is_known && known.problem.is_none()
    }
}

impl Known {
    fn look(&mut self, found: Option<Arc<ConfigMap>>, key: &Key, flags: &Arc<Policy>) {
        let same = match (&self.looked_at, &found) {
            (Some(Some(before)), Some(now)) => Arc::ptr_eq(before, now),
            (Some(None), None) => true,
            _ => false,
        };
        if same {
            return;
        }
        let text = found.as_ref().and_then(|map| map.data.as_ref()?.get(KEY));
        match text.map_or(Ok(flags.clone()), |text| Policy::read(text, flags).map(Arc::new)) {
            Ok(policy) => {
                if self.policy.as_ref() != Some(&policy) {
                    tracing::info!(named = policy.namespaces.len(), default = ?policy.default, "policy of inline volumes");
                }
                self.complaint.is_over();
                (self.policy, self.problem) = (Some(policy), None);
            }
            Err(problem) => {
                if self.complaint.is_new(&problem) {
                    let (Key { namespace, name }, before) = (key, self.policy.is_some());
                    let problem = format!("{KEY}: {problem}");
                    tracing::warn!(problem, before, "ConfigMap {namespace}/{name} is not taken");
                }
                self.problem = Some(format!("{KEY}: {problem}"));
            }
        }
        self.looked_at = Some(found);
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
        Policy::read(text, &flags())
    }

    #[test]
    fn what_is_not_said_is_as_in_the_default_and_there_as_the_flags_have_it() {
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
    fn nonsense_is_told_with_its_place() {
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
            let told = read(text).expect_err(text);
            assert!(told.contains(place), "{text}: {told}");
        }
    }

    #[test]
    fn little_text_cannot_say_much() {
        let aliases = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n";
        assert!(read(aliases).is_err());
        let deep = format!("default: {}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(read(&deep).unwrap_err().len() < 2 * MAX_TOLD);
        assert!(read("--- {}\n--- {}\n").is_err());
    }

    #[test]
    fn nonsense_keeps_what_held_before_and_at_the_start_nothing_is_known() {
        let map = |text: &str| {
            let data = Some([(KEY.to_owned(), text.to_owned())].into());
            Some(Arc::new(ConfigMap { data, ..ConfigMap::default() }))
        };
        let (mut known, key, flags) = (Known::default(), Key::new("n", "c"), Arc::new(flags()));
        known.look(map("nonsense"), &key, &flags);
        assert!(known.policy.is_none() && known.problem.is_some());
        known.look(map("default: {maxSize: 1Ki}"), &key, &flags);
        known.look(map("default: {maxSize: x}"), &key, &flags);
        assert_eq!(known.policy.clone().unwrap().of("n").0.max_size, Some(1024));
        known.look(None, &key, &flags);
        assert_eq!(known.policy, Some(flags));
    }
}
