//! The lifetimes of sessions: a default and a maximum from a ConfigMap that may change at any time
//! (KEP-3314, session design: "a mechanism will be provided to configure the expiry time, for
//! example, via a ConfigMap").

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::watcher;
use kube::{Api, Client};

use kubernetes::cache::{Cache, Key};
use telemetry::rate_limited_log::RateLimitedLog;
use telemetry::shutdown::Shutdown;

/// Keys of the ConfigMap. Values are durations such as 90m.
pub const DEFAULT_KEY: &str = "defaultLifetime";
pub const MAXIMUM_KEY: &str = "maximumLifetime";
/// Limits without the ConfigMap or a key.
const BUILT_IN: Limits =
    Limits { default: Duration::from_secs(3600), maximum: Duration::from_secs(24 * 3600) };
/// Maximum value: ten years.
const LONGEST: Duration = Duration::from_secs(315_360_000);

/// Default and maximum lifetime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub default: Duration,
    pub maximum: Duration,
}

impl Limits {
    /// The lifetime of a session with this request.
    pub fn grant(self, seconds: Option<i64>) -> Duration {
        let requested = seconds.and_then(|seconds| u64::try_from(seconds).ok());
        requested.map_or(self.default, Duration::from_secs).min(self.maximum)
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

/// The current limits. Clones share the watch.
#[derive(Clone)]
pub struct Lifetimes {
    maps: Cache<ConfigMap>,
    key: Key,
    known: Arc<Mutex<Known>>,
}

#[derive(Debug)]
struct Known {
    limits: Limits,
    /// Errors in the ConfigMap.
    error_log: RateLimitedLog,
}

impl Lifetimes {
    /// Starts to watch the ConfigMap.
    pub fn start(client: &Client, namespace: &str, name: &str, shutdown: Shutdown) -> Self {
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
        let one = maps.clone();
        let select = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let maps = Cache::start(maps, move |_| one.clone(), select, |_| None, shutdown);
        let known =
            Arc::new(Mutex::new(Known { limits: BUILT_IN, error_log: RateLimitedLog::default() }));
        Self { maps, key: Key::new(namespace, name), known }
    }

    /// Whether the watch has reported the ConfigMap, or that it does not exist.
    pub fn is_known(&self) -> bool {
        self.maps.is_live()
    }

    /// The limits in the ConfigMap. While it is invalid or unknown, the last valid limits.
    pub fn current(&self) -> Limits {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(found) = self.maps.cached(&self.key) else { return known.limits };
        let data = found.and_then(|map| map.data.clone()).unwrap_or_default();
        match Limits::read(&data) {
            Ok(limits) => {
                if known.limits != limits {
                    tracing::info!(?limits, "read the lifetimes of sessions");
                    known.limits = limits;
                }
                known.error_log.clear();
            }
            Err(problem) => {
                if known.error_log.is_new(&problem) {
                    let Key { namespace, name } = &self.key;
                    tracing::warn!(problem, limits = ?known.limits, "rejected ConfigMap {namespace}/{name}; keeping the current limits");
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
    fn a_missing_map_or_key_means_the_built_in_value() {
        assert_eq!(read(&[]), Ok(BUILT_IN));
        let short = read(&[(MAXIMUM_KEY, "10m")]).unwrap();
        assert_eq!(
            short.default,
            Duration::from_secs(600),
            "the default is limited by the maximum"
        );
    }

    #[test]
    fn an_invalid_value_is_an_error_with_its_key() {
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
    fn a_requested_lifetime_is_limited_by_the_maximum() {
        let limits = read(&[(DEFAULT_KEY, "10m"), (MAXIMUM_KEY, "1h")]).unwrap();
        let seconds = |requested| limits.grant(requested).as_secs();
        assert_eq!((seconds(None), seconds(Some(60)), seconds(Some(7200))), (600, 60, 3600));
    }
}
