//! The OpenAPI v2 and v3 schemas of a VolumeSnapshotDelta, generated from the types, for `kubectl
//! explain` and client-side validation. Decoding uses the same schema to find unknown fields
//! ([`known`]).

use std::sync::LazyLock;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use kubernetes::snapshot_delta::{
    API_VERSION, GROUP, KIND, PLURAL, VERSION, VolumeSnapshotDeltaSpec, VolumeSnapshotDeltaStatus,
};

/// Name of the schema in both documents.
const NAME: &str = "io.k8s.storage.cbt.v1alpha1.VolumeSnapshotDelta";
/// Path of the v3 document of the group version.
pub const V3_PATH: &str = "/openapi/v3/apis/cbt.storage.k8s.io/v1alpha1";

/// A document and its ETag.
pub struct Document {
    pub body: String,
    /// ETag (RFC 9110, section 8.8.3).
    pub etag: String,
}

impl Document {
    fn new(value: &Value) -> Self {
        let body = value.to_string();
        let hash: String = hash(&body);
        Self { body, etag: format!("\"{hash}\"") }
    }
}

fn hash(body: &str) -> String {
    Sha256::digest(body).iter().take(16).map(|byte| format!("{byte:02X}")).collect()
}

/// /openapi/v2
pub static V2: LazyLock<Document> = LazyLock::new(|| {
    let reference = json!({ "$ref": format!("#/definitions/{NAME}") });
    let mut operation = operation(|code, description| {
        (code.to_owned(), json!({ "description": description, "schema": reference }))
    });
    operation["consumes"] = json!(["application/json"]);
    operation["produces"] = json!(["application/json"]);
    let query = parameters().into_iter().map(|(name, place, description)| {
        let required = place == "path";
        json!({
            "name": name, "in": place, "type": "string", "uniqueItems": true, "required": required,
            "description": description,
        })
    });
    let body = json!({ "name": "body", "in": "body", "required": true, "schema": reference });
    operation["parameters"] = query.chain([body]).collect();
    Document::new(&json!({
        "swagger": "2.0",
        "info": info(),
        "paths": { path(): { "post": operation } },
        "definitions": { NAME: *SCHEMA },
    }))
});

/// /openapi/v3/apis/GROUP/VERSION
pub static V3: LazyLock<Document> = LazyLock::new(|| {
    let reference = json!({ "$ref": format!("#/components/schemas/{NAME}") });
    let content = json!({ "application/json": { "schema": reference } });
    let mut operation = operation(|code, description| {
        (code.to_owned(), json!({ "description": description, "content": content }))
    });
    operation["requestBody"] = json!({ "required": true, "content": content });
    let parameters = parameters().into_iter().map(|(name, place, description)| {
        json!({
            "name": name, "in": place, "required": place == "path", "description": description,
            "schema": { "type": "string" },
        })
    });
    operation["parameters"] = parameters.collect();
    Document::new(&json!({
        "openapi": "3.0.0",
        "info": info(),
        "paths": { path(): { "post": operation } },
        "components": { "schemas": { NAME: *SCHEMA } },
    }))
});

/// /openapi/v3: the list of documents.
pub static V3_ROOT: LazyLock<Document> = LazyLock::new(|| {
    let url = format!("{V3_PATH}?hash={}", hash(&V3.body));
    let group_version = format!("apis/{API_VERSION}");
    Document::new(&json!({ "paths": { group_version: { "serverRelativeURL": url } } }))
});

/// The fields of an object's schema, with their schemas. `None` if any field is allowed.
pub fn known(schema: &Value) -> Option<&Map<String, Value>> {
    schema.get("properties").and_then(Value::as_object)
}

/// The complete schema of a VolumeSnapshotDelta, without references.
pub static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    json!({
        "type": "object",
        "description": "Requests the blocks that differ between two VolumeSnapshots of its namespace, or that one holds; the status \
            has the result. It can only be created and is never stored.",
        "required": ["spec"],
        "properties": {
            "apiVersion": text(&format!("{API_VERSION}.")),
            "kind": text(&format!("{KIND}.")),
            "metadata": metadata(),
            "spec": of::<VolumeSnapshotDeltaSpec>(),
            "status": of::<VolumeSnapshotDeltaStatus>(),
        },
        "x-kubernetes-group-version-kind": [gvk()],
    })
});

fn of<T: JsonSchema>() -> Value {
    let mut settings = SchemaSettings::openapi3();
    settings.inline_subschemas = true;
    settings.meta_schema = None;
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    plain(&mut schema);
    schema
}

/// Removes keywords that Kubernetes clients do not know, and zero defaults.
fn plain(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            // Under "properties" the keys are field names, which may equal keywords.
            if map.get("type").is_some_and(Value::is_string) {
                for word in ["title", "nullable", "default"] {
                    map.remove(word);
                }
            }
            if map.get("format").is_some_and(|format| format == "uint64") {
                map.insert("format".into(), "int64".into());
            }
            map.values_mut().for_each(plain);
        }
        Value::Array(list) => list.iter_mut().for_each(plain),
        _ => {}
    }
}

fn gvk() -> Value {
    json!({ "group": GROUP, "version": VERSION, "kind": KIND })
}

fn info() -> Value {
    json!({ "title": "csi-loopback", "version": concat!("v", env!("CARGO_PKG_VERSION")) })
}

fn path() -> String {
    format!("/apis/{API_VERSION}/namespaces/{{namespace}}/{PLURAL}")
}

fn operation(response: impl Fn(&str, &str) -> (String, Value)) -> Value {
    let responses: Map<String, Value> =
        [response("201", "Created: the response has the result; nothing is stored")]
            .into_iter()
            .collect();
    json!({
        "operationId": "createCbtStorageV1alpha1NamespacedVolumeSnapshotDelta",
        "description": "create a VolumeSnapshotDelta",
        "tags": ["cbtStorage_v1alpha1"],
        "responses": responses,
        "x-kubernetes-action": "post",
        "x-kubernetes-group-version-kind": gvk(),
    })
}

/// Name, location and description.
fn parameters() -> [(&'static str, &'static str, &'static str); 5] {
    [
        ("namespace", "path", "Namespace of the VolumeSnapshots."),
        ("pretty", "query", "Has no effect."),
        ("dryRun", "query", "All: has no effect, because nothing is stored."),
        ("fieldManager", "query", "Has no effect, because nothing is stored."),
        (
            "fieldValidation",
            "query",
            "Treatment of unknown or duplicate fields: Strict refuses them, Warn (the default) returns a warning, Ignore \
             ignores them.",
        ),
    ]
}

fn text(description: &str) -> Value {
    json!({ "type": "string", "description": description })
}

fn texts(description: &str) -> Value {
    json!({ "type": "array", "description": description, "items": { "type": "string" } })
}

fn map(description: &str) -> Value {
    json!({
        "type": "object", "description": description, "additionalProperties": { "type": "string" },
    })
}

fn time(description: &str) -> Value {
    json!({ "type": "string", "format": "date-time", "description": description })
}

fn number(description: &str) -> Value {
    json!({ "type": "integer", "format": "int64", "description": description })
}

/// ObjectMeta of meta/v1. It is accepted completely and returned unchanged.
fn metadata() -> Value {
    let owner = json!({
        "type": "object",
        "required": ["apiVersion", "kind", "name", "uid"],
        "properties": {
            "apiVersion": text("API version of the owner."), "kind": text("Kind of the owner."),
            "name": text("Name of the owner."), "uid": text("UID of the owner."),
            "controller": { "type": "boolean", "description": "Whether the owner is the controller." },
            "blockOwnerDeletion": { "type": "boolean", "description": "Whether the owner's deletion waits." },
        },
    });
    let managed = json!({
        "type": "object",
        "properties": {
            "apiVersion": text("API version of the fields."), "fieldsType": text("FieldsV1."),
            "fieldsV1": { "type": "object", "description": "The fields." },
            "manager": text("The field manager."), "operation": text("The operation."),
            "subresource": text("The subresource."), "time": time("Time of the last write."),
        },
    });
    json!({
        "type": "object",
        "description": "Standard object metadata. Nothing is stored; it is returned unchanged.",
        "properties": {
            "name": text("Name. Optional, and need not be unique."),
            "generateName": text("Has no effect: no name is generated."),
            "namespace": text("Namespace of the VolumeSnapshots."),
            "labels": map("Labels."),
            "annotations": map("Annotations."),
            "finalizers": texts("Have no effect."),
            "ownerReferences": { "type": "array", "description": "Have no effect.", "items": owner },
            "managedFields": { "type": "array", "description": "Have no effect.", "items": managed },
            "uid": text("Has no effect."),
            "resourceVersion": text("Has no effect."),
            "selfLink": text("Has no effect."),
            "generation": number("Has no effect."),
            "creationTimestamp": time("Has no effect."),
            "deletionTimestamp": time("Has no effect."),
            "deletionGracePeriodSeconds": number("Has no effect."),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_describes_every_field() {
        let spec = known(&SCHEMA["properties"]["spec"]).unwrap();
        let names: Vec<&str> = spec.keys().map(String::as_str).collect();
        let expected = [
            "baseVolumeSnapshotName",
            "limit",
            "mode",
            "offset",
            "secretRef",
            "targetVolumeSnapshotName",
        ];
        assert_eq!(names, expected);
        fn visit(path: &str, schema: &Value) {
            assert!(schema.get("$ref").is_none() && schema.get("anyOf").is_none(), "{path}");
            assert!(schema["type"].is_string(), "{path}: {schema}");
            for (name, field) in known(schema).into_iter().flatten() {
                assert!(
                    field["description"].is_string() || path.contains("References"),
                    "{path}.{name}"
                );
                visit(&format!("{path}.{name}"), field);
            }
        }
        visit("", &SCHEMA);
        let blocks = &SCHEMA["properties"]["status"]["properties"]["changedBlocks"];
        assert!(known(&blocks["items"]).unwrap().contains_key("blockSizeBytes"), "{blocks}");
        assert_eq!(spec["limit"]["format"], "int64");
    }

    #[test]
    fn a_document_keeps_its_etag() {
        assert!(V2.etag.starts_with('"') && V2.etag != V3.etag);
        assert!(V3_ROOT.body.contains(&format!("{V3_PATH}?hash=")));
        let v2: Value = serde_json::from_str(&V2.body).unwrap();
        assert_eq!(v2["definitions"][NAME], *SCHEMA);
    }
}
