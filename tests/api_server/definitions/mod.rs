//! Which objects the API server accepts and refuses, by the CRDs in deploy/crds alone. No
//! controller, no session manager and no webhook runs.

mod driver;
mod session;

use kube::Api;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};
use support::cluster::Cluster;
use support::cluster::programs::stdout_of;

const SOON: &str = "2030-01-01T00:00:00Z";

/// The API server's response to such an object, as a dry run.
fn verdict<K>(cluster: &Cluster, namespace: Option<&str>, mut object: Value) -> Result<(), String>
where
    K: kube::Resource<DynamicType = ()>,
{
    object["apiVersion"] = json!(K::api_version(&()));
    object["kind"] = json!(K::kind(&()));
    let kind = ApiResource::erase::<K>(&());
    let api: Api<DynamicObject> = match namespace {
        Some(namespace) => Api::namespaced_with(cluster.client(), namespace, &kind),
        None => Api::all_with(cluster.client(), &kind),
    };
    let name = object["metadata"]["name"].as_str().unwrap_or("x").to_owned();
    object["metadata"]["name"] = json!(name);
    let params = PatchParams { dry_run: true, ..PatchParams::apply("test").validation_strict() };
    let answer = cluster.block_on(api.patch(&name, &params, &Patch::Apply(&object)));
    answer.map(drop).map_err(|error| error.to_string())
}

/// An object that must be refused with these words.
#[track_caller]
fn refused<K>(cluster: &Cluster, namespace: Option<&str>, object: Value, words: &str)
where
    K: kube::Resource<DynamicType = ()>,
{
    is_error(verdict::<K>(cluster, namespace, object.clone()), &object, words);
}

/// The response to `what`, which must be an error with these words.
#[track_caller]
fn is_error<T, E: ToString>(answer: Result<T, E>, what: &Value, words: &str) {
    let error = answer.err().unwrap_or_else(|| panic!("taken: {what}")).to_string();
    assert!(error.contains(words), "{what}: {error}");
}

/// The words of each line of `kubectl get`. An empty column has none.
fn table(cluster: &Cluster, arguments: &[&str]) -> Vec<Vec<String>> {
    let text = stdout_of(cluster.kubectl(&[&["get"], arguments].concat()));
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
    text.lines().map(words).collect()
}

/// Each field has these words in its description.
fn explains(cluster: &Cluster, fields: &[(&str, &str)]) {
    for (field, words) in fields {
        let text = stdout_of(cluster.kubectl(&["explain", field]));
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase();
        assert!(text.contains(&words.to_lowercase()), "{field}: {text}");
    }
}
