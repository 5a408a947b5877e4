//! What objects of Kubernetes can be called. Names become parts of URLs at the API server: what passes here can
//! name nothing else there.

/// The longest name of a namespace (RFC 1123 label), and of other objects (RFC 1123 subdomain), in bytes.
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

/// The name of an object, for the command line.
pub fn object(text: &str) -> Result<String, String> {
    if is_object(text) {
        return Ok(text.to_owned());
    }
    Err(format!("is not a name in Kubernetes: up to {MAX_SUBDOMAIN} of a-z, 0-9, '-' and '.'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_kubernetes_allows_is_a_name() {
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
