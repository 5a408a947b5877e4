//! How long sessions last: a default and a maximum, from a ConfigMap that may change at any time (KEP-3314, session
//! design: "a mechanism will be provided to configure the expiry time, for example, via a ConfigMap").

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::watcher;
use kube::{Api, Client};

use crate::kubernetes::cache::{Cache, Key};
use crate::telemetry::complaint::Complaint;
use crate::telemetry::shutdown::Shutdown;

/// Keys of the ConfigMap; durations such as 90m.
pub const DEFAULT_KEY: &str = "defaultLifetime";
pub const MAXIMUM_KEY: &str = "maximumLifetime";
/// What holds where the ConfigMap or a key of it is not there.
const BUILT_IN: Limits =
    Limits { default: Duration::from_secs(3600), maximum: Duration::from_secs(24 * 3600) };
/// The longest maximum: ten years.
const LONGEST: Duration = Duration::from_secs(315_360_000);

/// What lifetimes there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub default: Duration,
    pub maximum: Duration,
}

impl Limits {
    /// The lifetime of a session for which so many seconds are asked.
    pub fn grant(self, seconds: Option<i64>) -> Duration {
        let asked = seconds.and_then(|seconds| u64::try_from(seconds).ok());
        asked.map_or(self.default, Duration::from_secs).min(self.maximum)
    }

    fn read(data: &BTreeMap<String, String>) -> Result<Self, String> {
        let time = |key: &str, otherwise| match data.get(key).map(|text| text.trim()) {
            None | Some("") => Ok(otherwise),
            Some(text) => match humantime::parse_duration(text) {
                Ok(time) if time >= Duration::from_secs(1) && time <= LONGEST => Ok(time),
                _ => Err(format!("{key}: {text:?} is not a duration from 1s to 3650days")),
            },
        };
        let maximum = time(MAXIMUM_KEY, BUILT_IN.maximum)?;
        let default = time(DEFAULT_KEY, BUILT_IN.default.min(maximum))?;
        if default > maximum {
            return Err(format!("{DEFAULT_KEY} is longer than {MAXIMUM_KEY}"));
        }
        Ok(Self { default, maximum })
    }
}

/// The limits as they are now. Cheap to clone.
#[derive(Clone)]
pub struct Lifetimes {
    maps: Cache<ConfigMap>,
    key: Key,
    known: Arc<Mutex<Known>>,
}

#[derive(Debug)]
struct Known {
    limits: Limits,
    /// Of what is wrong with the ConfigMap.
    complaint: Complaint,
}

impl Lifetimes {
    /// Begins to watch the ConfigMap.
    pub fn start(client: &Client, namespace: &str, name: &str, shutdown: Shutdown) -> Self {
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
        let one = maps.clone();
        let select = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let maps = Cache::start(maps, move |_| one.clone(), select, |_| None, shutdown);
        let known =
            Arc::new(Mutex::new(Known { limits: BUILT_IN, complaint: Complaint::default() }));
        Self { maps, key: Key::new(namespace, name), known }
    }

    /// Whether the watch has told of it, or that there is none.
    pub fn is_known(&self) -> bool {
        self.maps.is_live()
    }

    /// What the ConfigMap says; while it says nonsense, or is not known, what it said before.
    pub fn current(&self) -> Limits {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(found) = self.maps.told(&self.key) else { return known.limits };
        let data = found.and_then(|map| map.data.clone()).unwrap_or_default();
        match Limits::read(&data) {
            Ok(limits) => {
                if known.limits != limits {
                    tracing::info!(?limits, "lifetimes of sessions");
                    known.limits = limits;
                }
                known.complaint.is_over();
            }
            Err(problem) => {
                if known.complaint.is_new(&problem) {
                    let Key { namespace, name } = &self.key;
                    tracing::warn!(problem, limits = ?known.limits, "ConfigMap {namespace}/{name} is not taken");
                }
            }
        }
        known.limits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(entries: &[(&str, &str)]) -> Result<Limits, String> {
        let entries = entries.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Limits::read(&entries.collect())
    }

    #[test]
    fn a_missing_map_or_key_means_what_is_built_in() {
        assert_eq!(read(&[]), Ok(BUILT_IN));
        let short = read(&[(MAXIMUM_KEY, "10m")]).unwrap();
        assert_eq!(short.default, Duration::from_secs(600), "the default keeps to the maximum");
    }

    #[test]
    fn nonsense_is_told_by_key() {
        for (key, value) in [
            (DEFAULT_KEY, "soon"),
            (DEFAULT_KEY, "0s"),
            (MAXIMUM_KEY, "-1h"),
            (MAXIMUM_KEY, "11years"),
            (DEFAULT_KEY, "48h"),
        ] {
            assert!(read(&[(key, value)]).unwrap_err().contains(key), "{key} {value}");
        }
    }

    #[test]
    fn a_session_lasts_as_long_as_is_asked_up_to_the_maximum() {
        let limits = read(&[(DEFAULT_KEY, "10m"), (MAXIMUM_KEY, "1h")]).unwrap();
        let seconds = |asked| limits.grant(asked).as_secs();
        assert_eq!((seconds(None), seconds(Some(60)), seconds(Some(7200))), (600, 60, 3600));
    }
}
