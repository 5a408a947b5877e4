//! Valid names of Kubernetes objects. Names become parts of URLs at the API server: a name that
//! passes these checks cannot address anything else.

use super::cache::Key;

/// Maximum bytes of a namespace's name (RFC 1123 label), and of other names (RFC 1123 subdomain).
const MAX_LABEL: usize = 63;
const MAX_SUBDOMAIN: usize = 253;

/// Whether a namespace can have this name.
pub fn is_namespace(text: &str) -> bool {
    text.len() <= MAX_LABEL && is_label(text)
}

/// Whether an object can have this name.
pub fn is_object(text: &str) -> bool {
    text.len() <= MAX_SUBDOMAIN && text.split('.').all(is_label)
}

fn is_label(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    let ends = [bytes.first(), bytes.last()];
    ends.iter().all(|end| end.is_some_and(|byte| plain(*byte)))
        && bytes.iter().all(|byte| plain(*byte) || *byte == b'-')
}

/// Parses the name of an object on the command line.
pub fn object(text: &str) -> Result<String, String> {
    if is_object(text) {
        return Ok(text.to_owned());
    }
    Err(format!(
        "is not a valid Kubernetes name: use up to {MAX_SUBDOMAIN} of a-z, 0-9, '-' and '.'"
    ))
}

/// Parses NAMESPACE/NAME on the command line.
pub fn namespaced(text: &str) -> Result<Key, String> {
    match text.split_once('/') {
        Some((namespace, name)) if is_namespace(namespace) && is_object(name) => {
            Ok(Key::new(namespace, name))
        }
        _ => Err("is not NAMESPACE/NAME of a Kubernetes object".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_kubernetes_names_are_accepted() {
        let long = "x".repeat(63);
        for good in ["a", "db-1", "0", "a-b-c", long.as_str()] {
            assert!(is_object(good) && is_namespace(good), "{good}");
        }
        assert!(is_object("a.b-c.d") && !is_namespace("a.b-c.d"));
        assert!(is_object(&format!("{long}x")) && !is_namespace(&format!("{long}x")));
        let longer = "x".repeat(254);
        for bad in [
            "", ".", "..", "a/b", "A", "a_b", "-a", "a-", "a..b", "é", "a?b", "a%2fb", "a b",
            &longer,
        ] {
            assert!(!is_object(bad) && !is_namespace(bad) && object(bad).is_err(), "{bad}");
        }
    }
}
