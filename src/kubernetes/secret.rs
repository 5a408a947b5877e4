//! The content of a Secret for a driver, in a type that does not print.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;

use k8s_openapi::api::core::v1::Secret;
use serde::{Deserialize, Deserializer, Serialize};

use super::bounded::Map;

/// Replacement of a secret value in a text.
const HIDDEN: &str = "[hidden]";
/// Minimum length of hidden values: hiding shorter ones would make texts unreadable.
const SHORTEST_HIDDEN: usize = 4;

/// Names and values, which are never printed.
#[derive(Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Secrets(HashMap<String, String>);

impl<'de> Deserialize<'de> for Secrets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let entries = Map::deserialize(deserializer)?;
        Ok(Self(entries.into_inner().into_iter().collect()))
    }
}

impl Secrets {
    /// All entries of a Secret. `None` if a value is not UTF-8 text, the only type that CSI
    /// accepts.
    pub fn of(secret: Secret) -> Option<Self> {
        let entries = secret.data.unwrap_or_default().into_iter();
        let texts =
            entries.map(|(key, value)| String::from_utf8(value.0).map(|value| (key, value)));
        texts.collect::<Result<_, _>>().ok().map(Self)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The values, only for the request to the driver.
    pub fn reveal(&self) -> HashMap<String, String> {
        self.0.clone()
    }

    /// Replaces all values in `text`, in case a driver quotes them. The longest one first: a value
    /// that is a part of another would leave the rest of it readable.
    pub fn hide(&self, text: &str) -> String {
        let values = self.0.values().filter(|value| value.len() >= SHORTEST_HIDDEN);
        let mut values: Vec<_> = values.collect();
        values.sort_unstable_by_key(|value| Reverse(value.len()));
        values.iter().fold(text.to_owned(), |text, value| text.replace(value.as_str(), HIDDEN))
    }
}

impl FromIterator<(String, String)> for Secrets {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(entries: I) -> Self {
        Self(entries.into_iter().collect())
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} secrets", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_values_are_hidden_in_a_text() {
        let entries = [("user", "backup-user"), ("key", "hunter2"), ("x", "abc")];
        let secrets = Secrets(entries.map(|(key, value)| (key.into(), value.into())).into());
        let text = secrets.hide("login of backup-user with hunter2 failed (abc)");
        assert_eq!(text, "login of [hidden] with [hidden] failed (abc)");
        assert_eq!(format!("{secrets:?}"), "3 secrets");
    }

    #[test]
    fn a_value_that_is_part_of_another_leaves_nothing_of_it() {
        // Many values, because the order of a map is random.
        let entries: [(String, String); 9] =
            std::array::from_fn(|one| (one.to_string(), "hunter2-and-more"[..8 + one].to_owned()));
        let secrets = Secrets(entries.into());
        assert_eq!(secrets.hide("hunter2-and-more, hunter2-and"), "[hidden], [hidden]");
    }
}
