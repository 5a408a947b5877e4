//! What a VolumeSnapshotDelta looks like, for `kubectl explain` and for whoever checks an object before it is sent: OpenAPI v2 and v3,
//! made from the types. The same description says which fields there are when one is read ([`known`]).

use std::sync::LazyLock;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::kubernetes::snapshot_delta::{
    API_VERSION, GROUP, KIND, PLURAL, VERSION, VolumeSnapshotDeltaSpec, VolumeSnapshotDeltaStatus,
};

/// Of the object, in both documents.
const NAME: &str = "io.k8s.storage.cbt.v1alpha1.VolumeSnapshotDelta";
/// Of the OpenAPI documents; v3's is per group version.
pub const V3_PATH: &str = "/openapi/v3/apis/cbt.storage.k8s.io/v1alpha1";

/// A document, and what identifies it as long as it is the same.
pub struct Document {
    pub body: String,
    /// An ETag (RFC 9110, section 8.8.3).
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
    let mut operation = operation(|code, says| {
        (code.to_owned(), json!({ "description": says, "schema": reference }))
    });
    operation["consumes"] = json!(["application/json"]);
    operation["produces"] = json!(["application/json"]);
    let query = parameters().into_iter().map(|(name, place, says)| {
        let required = place == "path";
        json!({
            "name": name, "in": place, "type": "string", "uniqueItems": true, "required": required,
            "description": says,
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
    let mut operation = operation(|code, says| {
        (code.to_owned(), json!({ "description": says, "content": content }))
    });
    operation["requestBody"] = json!({ "required": true, "content": content });
    let parameters = parameters().into_iter().map(|(name, place, says)| {
        json!({
            "name": name, "in": place, "required": place == "path", "description": says,
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

/// /openapi/v3: where the documents are.
pub static V3_ROOT: LazyLock<Document> = LazyLock::new(|| {
    let url = format!("{V3_PATH}?hash={}", hash(&V3.body));
    let group_version = format!("apis/{API_VERSION}");
    Document::new(&json!({ "paths": { group_version: { "serverRelativeURL": url } } }))
});

/// Fields that `schema`, an object's, knows, with the schema of each. None where any field is good.
pub fn known(schema: &Value) -> Option<&Map<String, Value>> {
    schema.get("properties").and_then(Value::as_object)
}

/// Of a VolumeSnapshotDelta, whole: nothing in it refers to anything else.
pub static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    json!({
        "type": "object",
        "description": "Asks for the blocks that differ between two VolumeSnapshots of its namespace, or that one holds, and is \
            answered in its status. It can only be created and is never stored.",
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

/// Leaves out what clients of Kubernetes do not know, and what the type's zero says already.
fn plain(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            // A field can have any name; what is under "properties" are fields.
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
        [response("201", "Created: answered, and not stored")].into_iter().collect();
    json!({
        "operationId": "createCbtStorageV1alpha1NamespacedVolumeSnapshotDelta",
        "description": "create a VolumeSnapshotDelta",
        "tags": ["cbtStorage_v1alpha1"],
        "responses": responses,
        "x-kubernetes-action": "post",
        "x-kubernetes-group-version-kind": gvk(),
    })
}

/// Name, place and meaning.
fn parameters() -> [(&'static str, &'static str, &'static str); 5] {
    [
        ("namespace", "path", "Namespace of the VolumeSnapshots."),
        ("pretty", "query", "Has no effect."),
        ("dryRun", "query", "All: has no effect, since nothing is stored in any case."),
        ("fieldManager", "query", "Has no effect, since nothing is stored."),
        (
            "fieldValidation",
            "query",
            "What becomes of fields that are unknown or there twice: Strict refuses them, Warn (the default) warns, Ignore ignores \
             them.",
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

/// ObjectMeta of meta/v1. All of it is taken, and comes back as it was sent.
fn metadata() -> Value {
    let owner = json!({
        "type": "object",
        "required": ["apiVersion", "kind", "name", "uid"],
        "properties": {
            "apiVersion": text("Of the owner."), "kind": text("Of the owner."),
            "name": text("Of the owner."), "uid": text("Of the owner."),
            "controller": { "type": "boolean", "description": "Whether it is the controller." },
            "blockOwnerDeletion": { "type": "boolean", "description": "Whether it waits." },
        },
    });
    let managed = json!({
        "type": "object",
        "properties": {
            "apiVersion": text("Of the fields."), "fieldsType": text("FieldsV1."),
            "fieldsV1": { "type": "object", "description": "The fields." },
            "manager": text("Who manages them."), "operation": text("How they were written."),
            "subresource": text("By which they were written."), "time": time("When."),
        },
    });
    json!({
        "type": "object",
        "description": "Standard object's metadata. Nothing is stored: it comes back as it was sent.",
        "properties": {
            "name": text("Name, which need not be given and need not be new."),
            "generateName": text("Has no effect: no name is made."),
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
    fn the_description_has_every_field_of_the_types_with_words() {
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
        fn look(path: &str, schema: &Value) {
            assert!(schema.get("$ref").is_none() && schema.get("anyOf").is_none(), "{path}");
            assert!(schema["type"].is_string(), "{path}: {schema}");
            for (name, field) in known(schema).into_iter().flatten() {
                assert!(
                    field["description"].is_string() || path.contains("References"),
                    "{path}.{name}"
                );
                look(&format!("{path}.{name}"), field);
            }
        }
        look("", &SCHEMA);
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
