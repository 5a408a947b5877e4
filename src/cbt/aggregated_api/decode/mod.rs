//! Decodes a VolumeSnapshotDelta from a request. An error names the field. Unknown fields are
//! errors, warnings or ignored, as `fieldValidation` requests, in the API server's wording. A
//! duplicate field is always an error.

mod fields;

use axum::http::{HeaderMap, header};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde_json::Value;

use super::failure::{Cause, Failure};
use common::text::truncate;
use kubernetes::name;
use kubernetes::snapshot_delta::{
    API_VERSION, GROUP, KIND, VERSION, VolumeSnapshotDelta, VolumeSnapshotDeltaSpec, or_default,
};

/// Maximum bytes of a request's body.
pub const MAX_BODY: usize = 64 << 10;
/// Maximum owners, and finalizers, of an object, none of which has an effect.
const MAX_LISTED: usize = 64;
/// Maximum bytes of a request's query.
const MAX_QUERY: usize = 4 << 10;

/// Treatment of unknown fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Validation {
    Strict,
    Warn,
    Ignore,
}

/// The fields that are read. The status is not: only the server writes it.
#[derive(Deserialize)]
struct Sent {
    #[serde(default, deserialize_with = "or_default")]
    metadata: ObjectMeta,
    spec: VolumeSnapshotDeltaSpec,
}

/// A decoded request.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodedRequest {
    pub delta: VolumeSnapshotDelta,
    /// Texts of `Warning` headers.
    pub warnings: Vec<String>,
}

/// Decodes a request to create an object in `namespace`.
///
/// # Errors
/// The request is not valid; the failure names the field.
pub fn decode(
    headers: &HeaderMap,
    query: Option<&str>,
    namespace: &str,
    body: &[u8],
) -> Result<DecodedRequest, Failure> {
    is_json(headers)?;
    let validation = validation(query.unwrap_or_default())?;
    if body.len() > MAX_BODY {
        return Err(Failure::new(
            Cause::TooLarge,
            format!("the body is larger than {MAX_BODY} bytes"),
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
    // From the bytes: a `Value` keeps only the last of duplicate fields.
    let sent = &mut serde_json::Deserializer::from_slice(body);
    let Sent { metadata, spec } = serde_path_to_error::deserialize(sent).map_err(|error| {
        let (path, error) = (error.path().to_string(), error.into_inner());
        malformed(format!("{path}: {error}"))
    })?;
    let (api_version, kind) = (API_VERSION.to_owned(), KIND.to_owned());
    let metadata = bounded(metadata)?;
    let delta = VolumeSnapshotDelta { api_version, kind, metadata, spec, status: None };
    Ok(DecodedRequest { delta: checked(delta, namespace)?, warnings })
}

/// Limits what a request keeps in memory of lists whose small elements become large.
fn bounded(mut metadata: ObjectMeta) -> Result<ObjectMeta, Failure> {
    // Only the API server writes them.
    metadata.managed_fields = None;
    let owners = metadata.owner_references.as_ref().map_or(0, Vec::len);
    let finalizers = metadata.finalizers.as_ref().map_or(0, Vec::len);
    for (field, count) in [("ownerReferences", owners), ("finalizers", finalizers)] {
        if count > MAX_LISTED {
            let message =
                format!("metadata.{field}: has {count} entries, and the maximum is {MAX_LISTED}");
            return Err(malformed(message));
        }
    }
    Ok(metadata)
}

fn malformed(message: String) -> Failure {
    Failure::new(Cause::Malformed, truncate(&message, fields::MAX_MESSAGE_BYTES))
}

fn invalid(name: Option<&str>, message: &str) -> Failure {
    Failure::new(Cause::Invalid, message).of(GROUP, KIND, name.unwrap_or_default())
}

/// As in the API server, a missing Content-Type means JSON.
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
    Err(Failure::new(Cause::MediaType, "Content-Type: only application/json in UTF-8 is supported"))
}

fn validation(query: &str) -> Result<Validation, Failure> {
    if query.len() > MAX_QUERY {
        return Err(malformed(format!("the query is larger than {MAX_QUERY} bytes")));
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
            // Nothing is stored, so it has no effect.
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

/// Reports numbers out of range as such, and not as a wrong type.
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
            "metadata.namespace: does not match the namespace of the request's path".into(),
        ));
    }
    let own = delta.metadata.name.clone().filter(|name| !name.is_empty());
    let own = own.as_deref();
    let is_prefix = |text: &str| name::is_object(text.trim_end_matches(['-', '.']));
    let prefix = delta.metadata.generate_name.as_deref().filter(|prefix| !prefix.is_empty());
    if own.is_some_and(|own| !name::is_object(own)) {
        return Err(invalid(own, "metadata.name: is not a valid Kubernetes name"));
    }
    if prefix.is_some_and(|prefix| !is_prefix(prefix)) {
        return Err(invalid(
            own,
            "metadata.generateName: is not a valid prefix of a Kubernetes name",
        ));
    }
    match delta.spec.mode.as_deref() {
        None | Some("" | "block") => {}
        Some(_) => return Err(invalid(own, "spec.mode: must be \"block\"")),
    }
    if delta.spec.target_volume_snapshot_name.is_empty() {
        let message =
            "spec.targetVolumeSnapshotName: is required; set it to the name of a VolumeSnapshot";
        return Err(invalid(own, message));
    }
    Ok(delta)
}

#[cfg(test)]
mod tests;
