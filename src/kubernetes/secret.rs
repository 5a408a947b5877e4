//! What is in a Secret, on its way to a driver: shown to nobody else.

use std::collections::HashMap;
use std::fmt;

use k8s_openapi::api::core::v1::Secret;
use serde::{Deserialize, Serialize};

/// What a text shows in the place of a secret.
const HIDDEN: &str = "[hidden]";
/// Values that are shorter say nothing and would hide half of any text.
const SHORTEST_HIDDEN: usize = 4;

/// Names and values; never shown.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secrets(HashMap<String, String>);

impl Secrets {
    /// All entries of a Secret.
    ///
    /// Nothing where a value is no text (UTF-8), which is all that CSI takes.
    pub fn of(secret: Secret) -> Option<Self> {
        let entries = secret.data.unwrap_or_default().into_iter();
        let texts =
            entries.map(|(key, value)| String::from_utf8(value.0).map(|value| (key, value)));
        texts.collect::<Result<_, _>>().ok().map(Self)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// For the driver's request, and nothing else.
    pub fn reveal(&self) -> HashMap<String, String> {
        self.0.clone()
    }

    /// `text` without any of the values, should a driver repeat them.
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
    fn a_text_loses_every_value_of_a_secret() {
        let entries = [("user", "backup-user"), ("key", "hunter2"), ("x", "abc")];
        let secrets = Secrets(entries.map(|(key, value)| (key.into(), value.into())).into());
        let said = secrets.hide("login of backup-user with hunter2 failed (abc)");
        assert_eq!(said, "login of [hidden] with [hidden] failed (abc)");
        assert_eq!(format!("{secrets:?}"), "3 secrets");
    }
}
