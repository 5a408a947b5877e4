//! Finds fields of a JSON object that are not in its schema.

use serde_json::Value;

use crate::aggregated_api::openapi::{SCHEMA, known};
use common::text::truncate;

/// Maximum number of reported fields of an object, and maximum bytes of each message.
const MAX_UNKNOWN: usize = 20;
pub const MAX_MESSAGE_BYTES: usize = 1024;

/// Paths of alternative names of fields.
const ALIASES: [&str; 2] =
    ["spec.volumeSnapshotDeltaSecretRef", "spec.VolumeSnapshotDeltaSecretRef"];
/// A field that is ignored, with its content.
const DROPPED: &str = "status";

/// The unknown fields of an object, in the API server's wording.
pub fn unknown(value: &Value) -> Vec<String> {
    let mut unknown = Vec::new();
    visit("", value, &SCHEMA, &mut unknown);
    let reported = unknown.iter().take(MAX_UNKNOWN);
    reported.map(|path| truncate(&format!("unknown field {path:?}"), MAX_MESSAGE_BYTES)).collect()
}

fn visit(path: &str, value: &Value, schema: &Value, unknown: &mut Vec<String>) {
    if unknown.len() >= MAX_UNKNOWN {
        return;
    }
    if let (Value::Array(list), Some(items)) = (value, schema.get("items")) {
        for (at, one) in list.iter().enumerate() {
            visit(&format!("{path}[{at}]"), one, items, unknown);
        }
    }
    let (Some(object), Some(fields)) = (value.as_object(), known(schema)) else { return };
    for (name, field) in object {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        match fields.get(name) {
            _ if path == DROPPED => {}
            Some(schema) => visit(&path, field, schema, unknown),
            None if ALIASES.contains(&path.as_str()) => {
                visit(&path, field, &fields["secretRef"], unknown);
            }
            None => unknown.push(path),
        }
    }
}
