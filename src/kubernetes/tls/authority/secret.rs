//! The Secret in which replicas find their authority. Its keys: `signing.crt`, `signing.key`; while it changes
//! `next.crt`, `next.key`, `next-published` (RFC 3339), `previous.crt`, `previous-until`; and `ca.crt`, the
//! bundle, for those who mount it. A label says that it is ours.

use std::collections::BTreeMap;
use std::time::SystemTime;

use anyhow::Context;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::ObjectMeta;

use super::super::certificates::Pair;
use super::state::{Ca, Found, Next, Previous, State};

/// Label of what this program keeps.
pub const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "csi-loopback-sidecar");

/// What the Secret holds, if there is one.
pub fn found(secret: Option<&Secret>) -> Found {
    let Some(secret) = secret else { return Found::Nothing };
    let data = secret.data.as_ref().filter(|data| !data.is_empty());
    let Some(data) = data else { return Found::Nothing };
    let label = secret.metadata.labels.as_ref().and_then(|labels| labels.get(MANAGED_BY.0));
    if label.is_none_or(|label| label != MANAGED_BY.1) {
        let keys = data.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        return Found::Foreign(format!("it has the keys {keys} and no label {}", MANAGED_BY.0));
    }
    match read(data) {
        Ok(state) => Found::Held(state),
        Err(error) => Found::Corrupt(format!("{error:#}")),
    }
}

fn read(data: &BTreeMap<String, ByteString>) -> anyhow::Result<State> {
    let signing = authority(data, "signing.crt", "signing.key")?.context("no signing.crt")?;
    let published = time(data, "next-published")?;
    let next = authority(data, "next.crt", "next.key")?.map(|ca| Next { ca, published });
    let until = time(data, "previous-until")?;
    let previous = match (text(data, "previous.crt")?, until) {
        (Some(cert), Some(until)) => {
            super::super::chain(cert.as_bytes()).context("previous.crt")?;
            Some(Previous { cert: cert.to_owned(), until })
        }
        _ => None,
    };
    Ok(State { signing, next, previous })
}

/// A certificate and its key, checked to belong together.
fn authority(
    data: &BTreeMap<String, ByteString>,
    cert: &str,
    key: &str,
) -> anyhow::Result<Option<Ca>> {
    let Some(cert_pem) = text(data, cert)? else { return Ok(None) };
    let key_pem = text(data, key)?.with_context(|| format!("no {key}"))?;
    let pair = Pair::from_pem(cert_pem.as_bytes(), key_pem.as_bytes()).context(cert.to_owned())?;
    let not_after = pair.not_after();
    Ok(Some(Ca { cert: cert_pem.to_owned(), key: key_pem.to_owned(), not_after }))
}

fn text<'a>(data: &'a BTreeMap<String, ByteString>, key: &str) -> anyhow::Result<Option<&'a str>> {
    let Some(ByteString(bytes)) = data.get(key) else { return Ok(None) };
    // The error of the conversion would tell of the content.
    std::str::from_utf8(bytes).map(Some).map_err(|_| anyhow::anyhow!("{key} is not text"))
}

fn time(data: &BTreeMap<String, ByteString>, key: &str) -> anyhow::Result<Option<SystemTime>> {
    let Some(text) = text(data, key)? else { return Ok(None) };
    humantime::parse_rfc3339(text).map(Some).with_context(|| format!("{key} is not a time"))
}

/// The Secret that holds `state`. With `before` it replaces that one and no later one.
pub fn holding(state: &State, name: &str, before: Option<&Secret>) -> Secret {
    let mut secret = before.cloned().unwrap_or_else(|| Secret {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        ..Secret::default()
    });
    let (key, value) = MANAGED_BY;
    let labels = secret.metadata.labels.get_or_insert_default();
    labels.insert(key.to_owned(), value.to_owned());
    let mut data = BTreeMap::new();
    let mut put = |key: &str, text: &str| {
        data.insert(key.to_owned(), ByteString(text.as_bytes().to_vec()));
    };
    put("ca.crt", &state.bundle());
    put("signing.crt", &state.signing.cert);
    put("signing.key", &state.signing.key);
    if let Some(Next { ca, published }) = &state.next {
        put("next.crt", &ca.cert);
        put("next.key", &ca.key);
        if let Some(published) = published {
            put("next-published", &humantime::format_rfc3339_millis(*published).to_string());
        }
    }
    if let Some(Previous { cert, until }) = &state.previous {
        put("previous.crt", cert);
        put("previous-until", &humantime::format_rfc3339_millis(*until).to_string());
    }
    secret.data = Some(data);
    secret
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::issue::new_authority;
    use super::*;

    fn state() -> State {
        let now = SystemTime::UNIX_EPOCH + Duration::from_millis(1_790_000_000_123);
        let ca = || new_authority(now, Duration::from_secs(3600)).unwrap();
        State {
            signing: ca(),
            next: Some(Next { ca: ca(), published: Some(now) }),
            previous: Some(Previous { cert: ca().cert, until: now }),
        }
    }

    #[test]
    fn what_is_written_is_what_is_read() {
        let all = state();
        let none = State { next: None, previous: None, ..all.clone() };
        let fresh = all.next.clone().map(|next| Next { published: None, ..next });
        let announced = State { next: fresh, previous: None, ..all.clone() };
        for state in [all, none, announced] {
            assert_eq!(found(Some(&holding(&state, "s", None))), Found::Held(state));
        }
    }

    #[test]
    fn a_secret_of_another_is_told_from_a_damaged_one_of_ours() {
        let good = holding(&state(), "s", None);
        let mut other = good.clone();
        other.metadata.labels = None;
        assert!(matches!(found(Some(&other)), Found::Foreign(why) if why.contains("signing.crt")));
        for key in ["signing.crt", "signing.key", "next.key", "next-published", "previous.crt"] {
            let mut damaged = good.clone();
            let data = damaged.data.as_mut().unwrap();
            data.insert(key.to_owned(), ByteString(b"\xffnonsense".to_vec()));
            assert!(
                matches!(found(Some(&damaged)), Found::Corrupt(why) if why.contains(key)
                || why.contains("crt")),
                "{key}"
            );
        }
        let mut mixed = good.clone();
        let data = mixed.data.as_mut().unwrap();
        data.insert("signing.key".into(), data["next.key"].clone());
        assert!(matches!(found(Some(&mixed)), Found::Corrupt(_)));
        let mut empty = other;
        empty.data = Some(BTreeMap::new());
        assert_eq!(found(Some(&empty)), Found::Nothing);
        assert_eq!(found(None), Found::Nothing);
    }

    #[test]
    fn no_key_is_shown() {
        let state = state();
        let shown = format!("{state:?}");
        assert!(!shown.contains("PRIVATE") && !shown.contains(&state.signing.key), "{shown}");
    }
}
