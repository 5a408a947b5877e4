//! The content of a Secret for a driver, in a type that does not print.

use std::collections::HashMap;
use std::fmt;

use k8s_openapi::api::core::v1::Secret;
use serde::{Deserialize, Serialize};

/// Replacement of a secret value in a text.
const HIDDEN: &str = "[hidden]";
/// Minimum length of hidden values: hiding shorter ones would make texts unreadable.
const SHORTEST_HIDDEN: usize = 4;

/// Names and values, which are never printed.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secrets(HashMap<String, String>);

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

    /// Replaces all values in `text`, in case a driver quotes them.
    pub fn hide(&self, text: &str) -> String {
        let values = self.0.values().filter(|value| value.len() >= SHORTEST_HIDDEN);
        values.fold(text.to_owned(), |text, value| text.replace(value.as_str(), HIDDEN))
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
}
