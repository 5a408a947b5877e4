//! The Secret in which replicas share their authority. Its keys: `signing.crt` and `signing.key`,
//! the authority that signs, and `ca.crt`, the certificates that clients must trust, which may be
//! more than the first one while an administrator replaces the authority. A label marks it as this
//! program's.

use std::collections::BTreeMap;

use anyhow::Context;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::ObjectMeta;

use super::super::certificates::Pair;
use super::issue::Ca;

/// Label of objects of this program. Its value comes from [`manager`]. It is not
/// app.kubernetes.io/managed-by, which belongs to the tool that installs the manifests: Helm sets that
/// label, and fails when another writer has changed it.
const MANAGED_BY: &str = "cbt.storage.k8s.io/managed-by";

/// Content of a valid Secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    pub signing: Ca,
    /// Certificates in PEM, including the certificate of `signing`.
    pub bundle: String,
}

/// Result of reading the Secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// No Secret, or one without data: an administrator may create it, so that the program needs no
    /// permission to create Secrets.
    Nothing,
    /// This program's, but unusable, with the reason.
    Corrupt(String),
    /// Another party's, with the reason.
    Foreign(String),
    Held(State),
}

impl State {
    pub fn new(signing: Ca) -> Self {
        let bundle = signing.cert.clone();
        Self { signing, bundle }
    }

    /// The same with another certificate of the authority.
    pub fn with(&self, signing: Ca) -> Self {
        let bundle = self.bundle.replace(self.signing.cert.trim(), signing.cert.trim());
        Self { signing, bundle }
    }
}

fn manager(mode: &str) -> String {
    format!("csi-loopback-{mode}")
}

/// Reads the Secret, if it exists.
pub fn found(secret: Option<&Secret>) -> Found {
    let Some(secret) = secret else { return Found::Nothing };
    let data = secret.data.as_ref().filter(|data| !data.is_empty());
    let Some(data) = data else { return Found::Nothing };
    let label = secret.metadata.labels.as_ref().and_then(|labels| labels.get(MANAGED_BY));
    if !label.is_some_and(|value| value.starts_with(&manager(""))) {
        let keys = data.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        return Found::Foreign(format!("it has the keys {keys} and no label {MANAGED_BY}"));
    }
    match read(data) {
        Ok(state) => Found::Held(state),
        Err(error) => Found::Corrupt(format!("{error:#}")),
    }
}

fn read(data: &BTreeMap<String, ByteString>) -> anyhow::Result<State> {
    let (cert, key) = (text(data, "signing.crt")?, text(data, "signing.key")?);
    let pair = Pair::from_pem(cert.as_bytes(), key.as_bytes()).context("signing.crt")?;
    let not_after = pair.not_after();
    let signing = Ca { cert: cert.to_owned(), key: key.to_owned(), not_after };
    // The signing certificate is always published, even if ca.crt lacks it.
    let bundle = text(data, "ca.crt").ok();
    let bundle = match bundle.filter(|pem| super::super::chain(pem.as_bytes()).is_ok()) {
        Some(bundle) if bundle.contains(cert.trim()) => bundle.to_owned(),
        Some(others) => format!("{}\n{others}", cert.trim_end()),
        None => cert.to_owned(),
    };
    Ok(State { signing, bundle })
}

fn text<'a>(data: &'a BTreeMap<String, ByteString>, key: &str) -> anyhow::Result<&'a str> {
    let ByteString(bytes) = data.get(key).with_context(|| format!("no {key}"))?;
    // The conversion's error would quote the content.
    std::str::from_utf8(bytes).map_err(|_| anyhow::anyhow!("{key} is not text"))
}

/// The Secret that holds `state`. With `before` the write replaces only that version.
pub fn holding(state: &State, name: &str, mode: &str, before: Option<&Secret>) -> Secret {
    let mut secret = before.cloned().unwrap_or_else(|| Secret {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        ..Secret::default()
    });
    let labels = secret.metadata.labels.get_or_insert_default();
    labels.insert(MANAGED_BY.to_owned(), manager(mode));
    let data = [
        ("ca.crt", &state.bundle),
        ("signing.crt", &state.signing.cert),
        ("signing.key", &state.signing.key),
    ];
    let data = data.map(|(key, text)| (key.to_owned(), ByteString(text.as_bytes().to_vec())));
    secret.data = Some(data.into());
    secret
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn ca() -> Ca {
        Ca::new("sidecar", SystemTime::now()).unwrap()
    }

    fn put(secret: &mut Secret, key: &str, text: &str) {
        secret.data.as_mut().unwrap().insert(key.into(), ByteString(text.as_bytes().to_vec()));
    }

    #[test]
    fn a_written_secret_is_read_back() {
        let state = State::new(ca());
        let secret = holding(&state, "s", "admission", None);
        assert_eq!(secret.metadata.labels.as_ref().unwrap()[MANAGED_BY], "csi-loopback-admission");
        assert_eq!(found(Some(&secret)), Found::Held(state));
    }

    #[test]
    fn the_label_of_the_installing_tool_is_kept() {
        let state = State::new(ca());
        let mut empty = Secret::default();
        let label = ("app.kubernetes.io/managed-by".to_owned(), "Helm".to_owned());
        empty.metadata.labels = Some([label.clone()].into());
        let secret = holding(&state, "s", "sidecar", Some(&empty));
        assert_eq!(secret.metadata.labels.as_ref().unwrap()[&label.0], label.1);
        assert_eq!(found(Some(&secret)), Found::Held(state));
    }

    #[test]
    fn the_signing_certificate_is_always_published() {
        let (old, new) = (ca(), ca());
        let mut secret = holding(&State::new(old.clone()), "s", "sidecar", None);
        let both = format!("{}{}", old.cert, new.cert);
        put(&mut secret, "ca.crt", &both);
        let held = |secret: &Secret| match found(Some(secret)) {
            Found::Held(state) => state,
            other => panic!("{other:?}"),
        };
        assert_eq!(held(&secret).bundle, both);
        put(&mut secret, "ca.crt", &new.cert);
        let bundle = held(&secret).bundle;
        assert!(bundle.contains(old.cert.trim()) && bundle.contains(new.cert.trim()), "{bundle}");
        put(&mut secret, "ca.crt", "nonsense");
        assert_eq!(held(&secret).bundle, old.cert);
        put(&mut secret, "ca.crt", &both);
        // A renewed certificate replaces the previous one.
        let renewed = held(&secret).with(ca());
        assert!(renewed.bundle.contains(renewed.signing.cert.trim()));
        assert!(!renewed.bundle.contains(old.cert.trim()));
    }

    #[test]
    fn a_foreign_secret_differs_from_a_damaged_own_one() {
        let good = holding(&State::new(ca()), "s", "sidecar", None);
        for label in [None, Some("helm")] {
            let mut other = good.clone();
            let label = label.map(|label| (MANAGED_BY.to_owned(), label.to_owned()));
            other.metadata.labels = Some(label.into_iter().collect());
            assert!(
                matches!(found(Some(&other)), Found::Foreign(why) if why.contains("signing.crt"))
            );
        }
        for key in ["signing.crt", "signing.key"] {
            let mut damaged = good.clone();
            put(&mut damaged, key, "nonsense");
            assert!(matches!(found(Some(&damaged)), Found::Corrupt(_)), "{key}");
        }
        let mut mixed = good.clone();
        put(&mut mixed, "signing.key", &ca().key);
        assert!(matches!(found(Some(&mixed)), Found::Corrupt(_)));
        let mut empty = good;
        (empty.metadata.labels, empty.data) = (None, Some(BTreeMap::new()));
        assert_eq!(found(Some(&empty)), Found::Nothing);
        assert_eq!(found(None), Found::Nothing);
    }
}
