//! Reads a VolumeSnapshotDelta from a request. A wrong field is refused by its name. Unknown fields are refused, warned of or ignored, as
//! `fieldValidation` asks, in the API server's own words; a field that is there twice is always refused.

mod fields;

use axum::http::{HeaderMap, header};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde_json::Value;

use super::failure::{Cause, Failure};
use crate::grpc::cut;
use crate::kubernetes::name;
use crate::kubernetes::snapshot_delta::{
    API_VERSION, GROUP, KIND, VERSION, VolumeSnapshotDelta, VolumeSnapshotDeltaSpec, or_default,
};

/// Bytes of a request's body.
pub const MAX_BODY: usize = 64 << 10;
/// Bytes of a request's query.
const MAX_QUERY: usize = 4 << 10;

/// What becomes of unknown fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Validation {
    Strict,
    Warn,
    Ignore,
}

/// What is read of the object: its status is the server's to write, whatever was sent.
#[derive(Deserialize)]
struct Sent {
    #[serde(default, deserialize_with = "or_default")]
    metadata: ObjectMeta,
    spec: VolumeSnapshotDeltaSpec,
}

/// What was asked, and what is to be said about how.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    pub delta: VolumeSnapshotDelta,
    /// For `Warning` headers.
    pub warnings: Vec<String>,
}

/// Reads a request to create one in `namespace`.
///
/// # Errors
/// It is not JSON, or none that could be answered; which field, and why.
pub fn decode(
    headers: &HeaderMap,
    query: Option<&str>,
    namespace: &str,
    body: &[u8],
) -> Result<Asked, Failure> {
    is_json(headers)?;
    let validation = validation(query.unwrap_or_default())?;
    if body.len() > MAX_BODY {
        return Err(Failure::new(
            Cause::TooLarge,
            format!("the body has more than {MAX_BODY} bytes"),
        ));
    }
    let value = serde_json::from_slice(body);
    let value = value.map_err(|error| malformed(format!("the body is not JSON: {error}")))?;
    check_type(&value)?;
    let warnings = match validation {
        Validation::Ignore => Vec::new(),
        Validation::Strict | Validation::Warn => fields::unknown(&value),
    };
    if validation == Validation::Strict && !warnings.is_empty() {
        return Err(malformed(format!(
            "{KIND} in version \"{VERSION}\" cannot be handled as a {KIND}: strict decoding error: {}",
            warnings.join(", ")
        )));
    }
    check_numbers(&value["spec"])?;
    // Of the bytes: a `Value` has only the last of fields with the same name.
    let sent = &mut serde_json::Deserializer::from_slice(body);
    let Sent { metadata, spec } = serde_path_to_error::deserialize(sent).map_err(|error| {
        let (path, error) = (error.path().to_string(), error.into_inner());
        malformed(format!("{path}: {error}"))
    })?;
    let (api_version, kind) = (API_VERSION.to_owned(), KIND.to_owned());
    let delta = VolumeSnapshotDelta { api_version, kind, metadata, spec, status: None };
    Ok(Asked { delta: checked(delta, namespace)?, warnings })
}

fn malformed(message: String) -> Failure {
    Failure::new(Cause::Malformed, cut(&message, fields::MAX_TOLD))
}

fn invalid(name: Option<&str>, message: &str) -> Failure {
    Failure::new(Cause::Invalid, message).of(GROUP, KIND, name.unwrap_or_default())
}

/// Whoever says nothing sends JSON, as the API server has it.
fn is_json(headers: &HeaderMap) -> Result<(), Failure> {
    let Some(sent) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let sent = sent.to_str().ok();
    let mut parts = sent.unwrap_or_default().split(';').map(str::trim);
    let media = parts.next().unwrap_or_default();
    let charset =
        parts.filter_map(|part| part.split_once('=')).find(|(name, _)| *name == "charset");
    let is_utf8 =
        charset.is_none_or(|(_, set)| set.trim_matches('"').eq_ignore_ascii_case("utf-8"));
    if media.eq_ignore_ascii_case("application/json") && is_utf8 {
        return Ok(());
    }
    Err(Failure::new(Cause::MediaType, "Content-Type: only application/json is read (UTF-8)"))
}

fn validation(query: &str) -> Result<Validation, Failure> {
    if query.len() > MAX_QUERY {
        return Err(malformed(format!("the query has more than {MAX_QUERY} bytes")));
    }
    let mut chosen = Validation::Warn;
    for (key, value) in form_urlencoded::parse(query.as_bytes()) {
        match (&*key, &*value) {
            ("fieldValidation", "Strict") => chosen = Validation::Strict,
            ("fieldValidation", "Warn" | "") => chosen = Validation::Warn,
            ("fieldValidation", "Ignore") => chosen = Validation::Ignore,
            ("fieldValidation", _) => {
                let message = "fieldValidation: must be Strict, Warn or Ignore";
                return Err(Failure::new(Cause::Invalid, message));
            }
            // Nothing is stored in any case.
            ("dryRun", "All" | "") => {}
            ("dryRun", _) => return Err(Failure::new(Cause::Invalid, "dryRun: must be All")),
            _ => {}
        }
    }
    Ok(chosen)
}

fn check_type(value: &Value) -> Result<(), Failure> {
    if !value.is_object() {
        return Err(malformed("the body is not an object".into()));
    }
    for (field, expected) in [("apiVersion", API_VERSION), ("kind", KIND)] {
        match value.get(field).and_then(Value::as_str) {
            Some(found) if found == expected => {}
            _ => return Err(malformed(format!("{field}: must be {expected}"))),
        }
    }
    Ok(())
}

/// Numbers that are none of the range are told as such, and not as of a wrong type.
fn check_numbers(spec: &Value) -> Result<(), Failure> {
    for field in ["limit", "offset"] {
        match &spec[field] {
            Value::Number(number) if !number.is_u64() => {
                let message =
                    format!("spec.{field}: must be a whole number from 0 to {}", u64::MAX);
                return Err(invalid(None, &message));
            }
            _ => {}
        }
    }
    Ok(())
}

fn checked(
    mut delta: VolumeSnapshotDelta,
    namespace: &str,
) -> Result<VolumeSnapshotDelta, Failure> {
    let sent = delta.metadata.namespace.get_or_insert_default();
    if sent.is_empty() {
        namespace.clone_into(sent);
    } else if sent != namespace {
        return Err(malformed(
            "metadata.namespace: does not match the namespace that the request was sent to".into(),
        ));
    }
    let own = delta.metadata.name.clone().filter(|name| !name.is_empty());
    let own = own.as_deref();
    let is_prefix = |text: &str| name::is_object(text.trim_end_matches(['-', '.']));
    let prefix = delta.metadata.generate_name.as_deref().filter(|prefix| !prefix.is_empty());
    if own.is_some_and(|own| !name::is_object(own)) {
        return Err(invalid(own, "metadata.name: is not a name in Kubernetes"));
    }
    if prefix.is_some_and(|prefix| !is_prefix(prefix)) {
        return Err(invalid(own, "metadata.generateName: is not the beginning of a name"));
    }
    match delta.spec.mode.as_deref() {
        None | Some("" | "block") => {}
        Some(_) => return Err(invalid(own, "spec.mode: must be \"block\"")),
    }
    if delta.spec.target_volume_snapshot_name.is_empty() {
        let message = "spec.targetVolumeSnapshotName: is required; it names a VolumeSnapshot";
        return Err(invalid(own, message));
    }
    Ok(delta)
}

#[cfg(test)]
mod tests;
