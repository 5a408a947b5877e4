//! The discovery documents: group, version, resource, and the server's own version. Other versions
//! of the group are CustomResourceDefinitions, which the API server reports itself.

use serde_json::{Value, json};

use kubernetes::snapshot_delta::{API_VERSION, GROUP, KIND, PLURAL, VERSION};

const SINGULAR: &str = "volumesnapshotdelta";
const SHORT: &str = "vsd";

fn api_group() -> Value {
    let version = json!({ "groupVersion": API_VERSION, "version": VERSION });
    json!({ "name": GROUP, "versions": [version], "preferredVersion": version })
}

/// /apis/GROUP
pub fn group() -> Value {
    let mut group = api_group();
    group["kind"] = json!("APIGroup");
    group["apiVersion"] = json!("v1");
    group
}

/// /apis
pub fn groups() -> Value {
    json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": [api_group()] })
}

/// /apis/GROUP/VERSION
pub fn resources() -> Value {
    json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": API_VERSION,
        "resources": [{
            "name": PLURAL, "singularName": SINGULAR, "namespaced": true, "kind": KIND,
            "verbs": ["create"], "shortNames": [SHORT],
        }],
    })
}

/// /apis in the format of this version of apidiscovery.k8s.io.
pub fn discovery(version: &str) -> Value {
    let resource = json!({
        "resource": PLURAL,
        "responseKind": { "group": GROUP, "version": VERSION, "kind": KIND },
        "scope": "Namespaced",
        "singularResource": SINGULAR,
        "verbs": ["create"],
        "shortNames": [SHORT],
    });
    json!({
        "kind": "APIGroupDiscoveryList",
        "apiVersion": format!("apidiscovery.k8s.io/{version}"),
        "metadata": {},
        "items": [{
            "metadata": { "name": GROUP, "creationTimestamp": null },
            "versions": [{ "version": VERSION, "resources": [resource], "freshness": "Current" }],
        }],
    })
}

/// /version
pub fn version() -> Value {
    json!({
        "major": env!("CARGO_PKG_VERSION_MAJOR"),
        "minor": env!("CARGO_PKG_VERSION_MINOR"),
        "gitVersion": concat!("v", env!("CARGO_PKG_VERSION")),
        "gitCommit": "", "gitTreeState": "", "buildDate": "", "goVersion": "", "compiler": "rustc",
        "platform": format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH),
    })
}
