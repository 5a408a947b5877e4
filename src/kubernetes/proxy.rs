//! The HTTP proxy to the API server: `proxy-url` of the kubeconfig's cluster, or else HTTPS_PROXY
//! unless NO_PROXY names the API server. As in Go's net/http, `proxy-url` ignores NO_PROXY.

use std::net::IpAddr;

use anyhow::Context as _;
use axum::http::{HeaderValue, Uri};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kube::config::Kubeconfig;
use percent_encoding::percent_decode_str;

/// The proxy for a server. `given` is the kubeconfig's.
///
/// # Errors
/// The proxy's URL is not usable.
pub fn of(server: &Uri, given: Option<&str>) -> anyhow::Result<Option<Uri>> {
    let variable = |names: [&str; 2]| {
        let found = names.iter().find_map(|name| std::env::var(name).ok());
        found.filter(|value| !value.is_empty())
    };
    let excluded = variable(["NO_PROXY", "no_proxy"]).unwrap_or_default();
    chosen(server, given, variable(["HTTPS_PROXY", "https_proxy"]).as_deref(), &excluded)
}

/// `proxy-url` of the kubeconfig's current cluster.
pub fn given(kubeconfig: &Kubeconfig) -> Option<String> {
    let current = kubeconfig.current_context.as_deref()?;
    let context = kubeconfig.contexts.iter().find(|context| context.name == current)?;
    let cluster = &context.context.as_ref()?.cluster;
    let cluster = kubeconfig.clusters.iter().find(|one| one.name == *cluster)?;
    cluster.cluster.as_ref()?.proxy_url.clone().filter(|url| !url.is_empty())
}

/// The value of Proxy-Authorization for user and password in the proxy's URL.
pub fn authorization(proxy: &Uri) -> Option<HeaderValue> {
    let (user, _) = proxy.authority()?.as_str().rsplit_once('@')?;
    let plain: Vec<u8> = percent_decode_str(user).collect();
    let mut value = HeaderValue::try_from(format!("Basic {}", STANDARD.encode(plain))).ok()?;
    value.set_sensitive(true);
    Some(value)
}

fn chosen(
    server: &Uri,
    given: Option<&str>,
    https_proxy: Option<&str>,
    no_proxy: &str,
) -> anyhow::Result<Option<Uri>> {
    let (source, url) = match (given, https_proxy) {
        (Some(url), _) => ("proxy-url of the kubeconfig", url),
        (None, Some(url)) if !is_excluded(server, no_proxy) => ("HTTPS_PROXY", url),
        (None, _) => return Ok(None),
    };
    // As in Go, a scheme is optional.
    let full = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let proxy: Uri = full.parse().with_context(|| format!("{source}: is not a URL"))?;
    match proxy.scheme_str() {
        Some("http" | "https") => Ok(Some(proxy)),
        _ => anyhow::bail!("{source}: only proxies with http or https are supported"),
    }
}

/// Whether NO_PROXY names the server: `*`, an address, a network, or a domain with all below it,
/// each with an optional port.
fn is_excluded(server: &Uri, no_proxy: &str) -> bool {
    let host = server.host().unwrap_or_default().trim_matches(['[', ']']).to_ascii_lowercase();
    let port = server.port_u16().unwrap_or(443);
    let address: Option<IpAddr> = host.parse().ok();
    // As in Go: never for the machine itself.
    if host == "localhost" || address.is_some_and(|address| address.is_loopback()) {
        return true;
    }
    no_proxy.split(',').map(|entry| entry.trim().to_ascii_lowercase()).any(|entry| {
        if entry == "*" {
            return true;
        }
        if let (Some(address), Some((network, bits))) = (address, entry.split_once('/')) {
            return is_within(address, network, bits);
        }
        let (name, of_port) = with_port(&entry);
        if name.is_empty() || of_port.is_some_and(|of_port| of_port != port) {
            return false;
        }
        if let Some(address) = address {
            return name.trim_matches(['[', ']']).parse() == Ok(address);
        }
        // `.a.b` and `*.a.b` are only the names below it.
        match name.strip_prefix('*').unwrap_or(name).strip_prefix('.') {
            Some(domain) => host.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.')),
            None => {
                let below = host.strip_suffix(name);
                below.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            }
        }
    })
}

/// An entry without its port. An IPv6 address with a port is in brackets.
fn with_port(entry: &str) -> (&str, Option<u16>) {
    match entry.rsplit_once(':') {
        Some((name, port)) if !name.contains(':') || name.ends_with(']') => {
            (name, port.parse().ok().or(Some(0)))
        }
        _ => (entry, None),
    }
}

fn is_within(address: IpAddr, network: &str, bits: &str) -> bool {
    let (Ok(network), Ok(bits)) = (network.parse::<IpAddr>(), bits.parse::<u32>()) else {
        return false;
    };
    let same = |one: u128, other: u128, all: u32| {
        bits <= all && (bits == 0 || (one ^ other) >> (all - bits) == 0)
    };
    match (address, network) {
        (IpAddr::V4(one), IpAddr::V4(other)) => {
            same(one.to_bits().into(), other.to_bits().into(), 32)
        }
        (IpAddr::V6(one), IpAddr::V6(other)) => same(one.to_bits(), other.to_bits(), 128),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uri(text: &str) -> Uri {
        text.parse().unwrap()
    }

    #[test]
    fn no_proxy_names_the_api_server_and_not_the_proxy() {
        let proxy = Some("http://proxy.corp:3128");
        for (server, no_proxy, direct) in [
            ("https://10.96.0.1:443", "", false),
            ("https://10.96.0.1:443", "proxy.corp", false),
            ("https://10.96.0.1:443", "10.96.0.1", true),
            ("https://10.96.0.1:443", "10.96.0.1:6443", false),
            ("https://10.96.0.1:443", "localhost, 10.96.0.0/12", true),
            ("https://10.112.0.1:443", "10.96.0.0/12", false),
            ("https://10.96.0.1:443", "10.96.0.0/99,10.96.0.0/x,/", false),
            ("https://[fd00::1]:6443", "fd00::/16", true),
            ("https://[fd00::1]:6443", "[fd00::1]:6443", true),
            ("https://[fd00::1]:6443", "10.0.0.0/0", false),
            ("https://api.corp", "corp", true),
            ("https://api.corp", ".corp:443", true),
            ("https://api.corp", "*.corp", true),
            ("https://corp", ".corp", false),
            ("https://apicorp", "corp", false),
            ("https://API.Corp", "api.CORP", true),
            ("https://api.corp", "*", true),
            ("https://127.0.0.1:6443", "", true),
            ("https://localhost:6443", "", true),
        ] {
            let found = chosen(&uri(server), None, proxy, no_proxy).unwrap();
            assert_eq!(found.is_none(), direct, "{server} with {no_proxy:?}");
        }
        let given = chosen(&uri("https://localhost"), Some("https://p:1"), proxy, "*").unwrap();
        assert_eq!(given, Some(uri("https://p:1")));
        let bare = chosen(&uri("https://api.corp"), None, Some("p:3128"), "").unwrap();
        assert_eq!(bare, Some(uri("http://p:3128")));
    }

    #[test]
    fn an_unusable_proxy_is_named() {
        for (given, variable, named) in [
            (Some("socks5://p:1"), None, "proxy-url"),
            (None, Some("ftp://p:1"), "HTTPS_PROXY"),
            (None, Some("http://:::"), "HTTPS_PROXY"),
        ] {
            let error = chosen(&uri("https://api.corp"), given, variable, "").unwrap_err();
            assert!(error.to_string().contains(named), "{error}");
        }
    }

    #[test]
    fn user_and_password_of_the_proxy_are_decoded() {
        let value = authorization(&uri("http://us%40er:pa%3Ass@p:1")).unwrap();
        assert_eq!(value, format!("Basic {}", STANDARD.encode("us@er:pa:ss")).as_str());
        assert_eq!(authorization(&uri("http://p:1")), None);
    }
}
