use axum::http::HeaderValue;
use serde_json::json;

use super::*;

fn headers(kind: &'static str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers
}

fn decoded(query: &str, body: &str) -> Result<DecodedRequest, Failure> {
    decode(&headers("application/json"), Some(query), "apps", body.as_bytes())
}

fn object(spec: &Value) -> Value {
    json!({ "apiVersion": API_VERSION, "kind": KIND, "metadata": { "name": "d" }, "spec": spec })
}

fn with(spec: &Value) -> Result<DecodedRequest, Failure> {
    decoded("", &object(spec).to_string())
}

const TARGET: &str = "targetVolumeSnapshotName";

#[test]
fn a_request_is_decoded() {
    let spec = json!({
        "baseVolumeSnapshotName": "a", TARGET: "b", "limit": 10, "offset": u64::MAX, "mode": "block",
        "volumeSnapshotDeltaSecretRef": { "name": "s" },
    });
    let request = with(&spec).unwrap();
    assert!(request.warnings.is_empty(), "{:?}", request.warnings);
    assert_eq!(request.delta.metadata.namespace.as_deref(), Some("apps"));
    let spec = request.delta.spec;
    assert_eq!((spec.limit, spec.offset), (10, u64::MAX));
    assert_eq!(spec.secret_ref.unwrap().name, "s");
}

#[test]
fn null_means_the_default() {
    let spec =
        json!({ TARGET: "b", "baseVolumeSnapshotName": null, "limit": null, "secretRef": null });
    let mut sent = object(&spec);
    sent["metadata"]["creationTimestamp"] = Value::Null;
    sent["status"] = Value::Null;
    let request = decoded("fieldValidation=Strict", &sent.to_string()).unwrap();
    assert_eq!(request.delta.spec.limit, 0);
}

#[test]
fn lists_without_effect_are_bounded() {
    for field in ["ownerReferences", "finalizers"] {
        for (count, taken) in [(MAX_LISTED, true), (MAX_LISTED + 1, false)] {
            let mut sent = object(&json!({ TARGET: "b" }));
            sent["metadata"]["managedFields"] = json!(vec![json!({}); 5000]);
            sent["metadata"][field] = match field {
                "finalizers" => json!(vec!["f"; count]),
                _ => json!(vec![
                    json!({ "apiVersion": "v1", "kind": "K", "name": "n", "uid": "u" });
                    count
                ]),
            };
            match decoded("", &sent.to_string()) {
                Ok(request) => assert!(taken && request.delta.metadata.managed_fields.is_none()),
                Err(refused) => {
                    assert!(!taken && refused.message.contains(field), "{}", refused.message);
                }
            }
        }
    }
}

#[test]
fn a_status_in_a_request_is_dropped() {
    let mut sent = object(&json!({ TARGET: "b" }));
    sent["status"] = json!({ "state": 77, "nonsense": [1] });
    assert_eq!(decoded("fieldValidation=Strict", &sent.to_string()).unwrap().delta.status, None);
}

#[test]
fn unknown_fields_are_errors_warnings_or_ignored() {
    let body = format!(
        r#"{{"apiVersion":"{API_VERSION}","kind":"{KIND}","extra":1,"metadata":{{"nmae":"x"}},
            "spec":{{"limit":2,"secretRef":{{"name":"s","key":"k"}},"{TARGET}":"b"}}}}"#
    );
    let unknown = [
        r#"unknown field "extra""#,
        r#"unknown field "metadata.nmae""#,
        r#"unknown field "spec.secretRef.key""#,
    ];
    let refused = decoded("fieldValidation=Strict", &body).unwrap_err();
    assert_eq!(refused.cause, Cause::Malformed);
    for (query, expected) in
        [("fieldValidation=Ignore", &[][..]), ("", &unknown), ("fieldValidation=Warn", &unknown)]
    {
        let request = decoded(query, &body).unwrap();
        assert_eq!(request.warnings, expected, "{query}");
        let spec = request.delta.spec;
        assert_eq!((spec.limit, spec.target_volume_snapshot_name.as_str()), (2, "b"));
    }
    for one in unknown {
        assert!(refused.message.contains(one), "{}", refused.message);
    }
}

#[test]
fn a_duplicate_field_is_refused_with_its_name() {
    let head = format!(r#""apiVersion":"{API_VERSION}","kind":"{KIND}""#);
    for (body, words) in [
        (
            format!(r#"{{{head},"spec":{{"{TARGET}":"a","limit":1,"limit":2}}}}"#),
            "spec: duplicate field `limit`",
        ),
        (
            format!(r#"{{{head},"spec":{{"{TARGET}":"a"}},"spec":{{"{TARGET}":"b"}}}}"#),
            "duplicate field `spec`",
        ),
    ] {
        for query in ["", "fieldValidation=Strict", "fieldValidation=Ignore"] {
            let refused = decoded(query, &body).unwrap_err();
            assert_eq!(refused.cause, Cause::Malformed);
            assert!(refused.message.contains(words), "{}", refused.message);
        }
    }
}

#[test]
fn many_unknown_fields_do_not_make_a_long_response() {
    let spec: String = (0..5000).map(|at| format!(r#""x{at}":1,"#)).collect();
    let body = format!(
        r#"{{"apiVersion":"{API_VERSION}","kind":"{KIND}","spec":{{{spec}"{TARGET}":"b"}}}}"#
    );
    assert!(body.len() < MAX_BODY);
    assert_eq!(decoded("", &body).unwrap().warnings.len(), 20);
    let refused = decoded("fieldValidation=Strict", &body).unwrap_err();
    assert!(refused.message.len() <= 1100, "{}", refused.message.len());
}

#[test]
fn an_invalid_field_is_refused_with_its_name() {
    for (spec, field) in [
        (json!({}), "targetVolumeSnapshotName"),
        (json!({ TARGET: "" }), "spec.targetVolumeSnapshotName"),
        (json!({ TARGET: "b", "mode": "file" }), "spec.mode"),
        (json!({ TARGET: "b", "limit": -1 }), "spec.limit"),
        (json!({ TARGET: "b", "limit": 1.5 }), "spec.limit"),
        (json!({ TARGET: "b", "offset": 1e30 }), "spec.offset"),
        (json!({ TARGET: "b", "offset": "7" }), "spec.offset"),
        (json!({ TARGET: 7 }), "spec.targetVolumeSnapshotName"),
        (json!({ TARGET: "b", "secretRef": {} }), "spec.secretRef"),
        (json!([]), "spec"),
        (json!(null), "spec"),
    ] {
        let failure = with(&spec).expect_err(field);
        assert!(failure.message.contains(field), "{spec}: {failure}");
        assert!(matches!(failure.cause, Cause::Invalid | Cause::Malformed), "{spec}");
    }
    let cause = |spec: Value| with(&spec).unwrap_err().cause;
    assert_eq!(cause(json!({ TARGET: "b", "limit": -1 })), Cause::Invalid);
    assert_eq!(cause(json!({ TARGET: "b", "mode": "file" })), Cause::Invalid);
    assert_eq!(cause(json!({ TARGET: "b", "offset": "7" })), Cause::Malformed);
}

#[test]
fn another_object_or_namespace_is_refused() {
    let changed = |field: &str, value: Value| {
        let mut sent = object(&json!({ TARGET: "b" }));
        sent.as_object_mut().unwrap().insert(field.to_owned(), value);
        decoded("", &sent.to_string()).unwrap_err()
    };
    for (field, value) in [
        ("apiVersion", json!("cbt.storage.k8s.io/v1alpha2")),
        ("apiVersion", json!(null)),
        ("kind", json!("VolumeSnapshot")),
        ("metadata", json!({ "namespace": "other" })),
        ("metadata", json!({ "labels": { "a": 1 } })),
        ("metadata", json!([])),
    ] {
        let failure = changed(field, value.clone());
        assert_eq!(failure.cause, Cause::Malformed, "{value}");
        assert!(failure.message.contains(field), "{value}: {failure}");
    }
    for metadata in [json!({ "name": "a/b" }), json!({ "generateName": "A-" })] {
        assert_eq!(changed("metadata", metadata).cause, Cause::Invalid);
    }
    let mut sent = object(&json!({ TARGET: "b" }));
    sent["metadata"] = json!({ "generateName": "d-", "namespace": "apps" });
    assert!(decoded("dryRun=All&fieldManager=x", &sent.to_string()).is_ok());
}

#[test]
fn garbage_is_refused() {
    let deep = "[".repeat(60_000);
    let deep_object = r#"{"a":"#.repeat(10_000);
    let doubled = "{}".repeat(2);
    for body in ["", "{", "null", "[]", "7", "\u{0}", &deep, &deep_object, &doubled] {
        let failure = decoded("", body).unwrap_err();
        assert_eq!(failure.cause, Cause::Malformed);
        assert!(failure.message.len() < 2000);
    }
    let large = " ".repeat(MAX_BODY + 1);
    assert_eq!(decoded("", &large).unwrap_err().cause, Cause::TooLarge);
    assert_eq!(decoded("fieldValidation=Hard", "{}").unwrap_err().cause, Cause::Invalid);
    assert_eq!(decoded("dryRun=Some", "{}").unwrap_err().cause, Cause::Invalid);
    for kind in ["application/yaml", "text/plain", "application/json; charset=latin-1", ""] {
        let failure = decode(&headers(kind), None, "apps", b"{}").unwrap_err();
        assert_eq!(failure.cause, Cause::MediaType, "{kind}");
    }
    let sent = object(&json!({ TARGET: "b" })).to_string();
    for kind in [
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON;charset=\"UTF-8\"",
    ] {
        assert!(decode(&headers(kind), None, "apps", sent.as_bytes()).is_ok(), "{kind}");
    }
}
