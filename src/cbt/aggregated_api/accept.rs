//! Content negotiation (`Accept`). Only JSON is supported.

use axum::http::{HeaderMap, header};

use super::failure::{Cause, Failure};

/// A representation of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// The object itself.
    Plain,
    /// The discovery document of all groups, apidiscovery.k8s.io v2 or v2beta1.
    Discovery(&'static str),
}

/// The first requested form that is among `offered`. Without an Accept header it is
/// [`Form::Plain`].
///
/// # Errors
/// No requested form is offered.
pub fn negotiate(headers: &HeaderMap, offered: &[Form]) -> Result<Form, Failure> {
    let requested = headers.get_all(header::ACCEPT).iter();
    let requested: Vec<&str> = requested
        .filter_map(|value| value.to_str().ok())
        .flat_map(|list| list.split(','))
        .collect();
    if requested.iter().all(|one| one.trim().is_empty()) && !headers.contains_key(header::ACCEPT) {
        return Ok(Form::Plain);
    }
    let form = requested.iter().find_map(|one| form(one).filter(|form| offered.contains(form)));
    form.ok_or_else(|| {
        Failure::new(Cause::NotAcceptable, "Accept: only application/json is supported")
    })
}

fn form(requested: &str) -> Option<Form> {
    let mut parts = requested.split(';').map(str::trim);
    let media = parts.next()?.to_ascii_lowercase();
    if !["application/json", "application/*", "*/*"].contains(&media.as_str()) {
        return None;
    }
    let (mut kind, mut group, mut version) = ("", "", "");
    for part in parts {
        match part.split_once('=') {
            Some(("as", value)) => kind = value,
            Some(("g", value)) => group = value,
            Some(("v", value)) => version = value,
            Some(("q", value)) if value.parse() == Ok(0.0) => return None,
            _ => {}
        }
    }
    match (kind, group, version) {
        ("", _, _) => Some(Form::Plain),
        ("APIGroupDiscoveryList", "apidiscovery.k8s.io", "v2") => Some(Form::Discovery("v2")),
        ("APIGroupDiscoveryList", "apidiscovery.k8s.io", "v2beta1") => {
            Some(Form::Discovery("v2beta1"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn requested(accept: &'static str, offered: &[Form]) -> Option<Form> {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT, HeaderValue::from_static(accept));
        negotiate(&headers, offered).ok()
    }

    #[test]
    fn the_first_offered_form_is_chosen() {
        let both = [Form::Plain, Form::Discovery("v2")];
        let whole = "application/json;as=APIGroupDiscoveryList;v=v2;g=apidiscovery.k8s.io";
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
        let kubectl =
            "application/json;as=APIGroupDiscoveryList;v=v2;g=apidiscovery.k8s.io,application/json";
        let printing = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
        assert_eq!(negotiate(&HeaderMap::new(), &both).ok(), Some(Form::Plain));
        for (accept, form) in [
            ("application/json", Some(Form::Plain)),
            ("*/*", Some(Form::Plain)),
            ("text/html, application/*;q=0.8", Some(Form::Plain)),
            (whole, Some(Form::Discovery("v2"))),
            (kubectl, Some(Form::Discovery("v2"))),
            (table, None),
            (printing, Some(Form::Plain)),
            ("application/vnd.kubernetes.protobuf,application/json", Some(Form::Plain)),
            ("application/vnd.kubernetes.protobuf", None),
            ("application/yaml", None),
            ("application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1", None),
            ("application/json;q=0", None),
            ("", None),
        ] {
            assert_eq!(requested(accept, &both), form, "{accept}");
        }
        assert_eq!(requested(kubectl, &[Form::Plain]), Some(Form::Plain));
    }
}
