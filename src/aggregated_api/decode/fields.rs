//! Fields of a JSON object that its description does not know.

use serde_json::Value;

use crate::aggregated_api::openapi::{SCHEMA, known};
use crate::grpc::cut;

/// What is told of one object, at most, and how long each is, in bytes.
const MAX_UNKNOWN: usize = 20;
pub const MAX_TOLD: usize = 1024;

/// Other names of fields, by their paths.
const ALIASES: [&str; 2] =
    ["spec.volumeSnapshotDeltaSecretRef", "spec.VolumeSnapshotDeltaSecretRef"];
/// What is not looked into: it is dropped.
const DROPPED: &str = "status";

/// The unknown fields of an object, in the API server's words.
pub fn unknown(value: &Value) -> Vec<String> {
    let mut unknown = Vec::new();
    look("", value, &SCHEMA, &mut unknown);
    let reported = unknown.iter().take(MAX_UNKNOWN);
    reported.map(|path| cut(&format!("unknown field {path:?}"), MAX_TOLD)).collect()
}

fn look(path: &str, value: &Value, schema: &Value, unknown: &mut Vec<String>) {
    if unknown.len() >= MAX_UNKNOWN {
        return;
    }
    if let (Value::Array(list), Some(items)) = (value, schema.get("items")) {
        for (at, one) in list.iter().enumerate() {
            look(&format!("{path}[{at}]"), one, items, unknown);
        }
    }
    let (Some(object), Some(fields)) = (value.as_object(), known(schema)) else { return };
    for (name, field) in object {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        match fields.get(name) {
            _ if path == DROPPED => {}
            Some(schema) => look(&path, field, schema, unknown),
            None if ALIASES.contains(&path.as_str()) => {
                look(&path, field, &fields["secretRef"], unknown);
            }
            None => unknown.push(path),
        }
    }
}
