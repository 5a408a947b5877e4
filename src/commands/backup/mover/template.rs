//! What a user sets of a mover pod (`--pod-template`): part of a PodTemplateSpec, merged into the
//! pod of the Job as a JSON merge patch (RFC 7386). Only fields that do not change what the pod
//! does are accepted, and only known ones.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::PodTemplateSpec;
use serde_json::{Map, Value, json};

use super::job::CONTAINER;

/// Bytes of a file, events and depth of its YAML: far more than any template needs.
const MAX_BYTES: u64 = 64 << 10;
const MAX_EVENTS: usize = 10_000;
const MAX_DEPTH: usize = 32;

/// Fields of the pod's metadata, of its spec and of its container.
const METADATA: [&str; 2] = ["annotations", "labels"];
const SPEC: [&str; 11] = [
    "affinity",
    "containers",
    "dnsConfig",
    "dnsPolicy",
    "hostAliases",
    "imagePullSecrets",
    "nodeSelector",
    "priorityClassName",
    "runtimeClassName",
    "securityContext",
    "tolerations",
];
const OF_CONTAINER: [&str; 5] = ["env", "imagePullPolicy", "name", "resources", "securityContext"];

#[derive(Debug, Default)]
pub struct Template {
    metadata: Value,
    spec: Value,
    container: Value,
}

impl Template {
    /// # Errors
    /// The file cannot be read, or has a field that is unknown or belongs to the mover.
    pub fn read(path: &Path) -> Result<Self> {
        let what = || format!("--pod-template {}", path.display());
        let mut text = String::new();
        let file = File::open(path).with_context(what)?;
        file.take(MAX_BYTES + 1).read_to_string(&mut text).with_context(what)?;
        ensure!(text.len() as u64 <= MAX_BYTES, "{} has more than {MAX_BYTES} bytes", what());
        Self::parse(&text).with_context(what)
    }

    fn parse(text: &str) -> Result<Self> {
        let options = serde_saphyr::options! {
            budget: serde_saphyr::budget! {
                max_events: MAX_EVENTS,
                max_nodes: MAX_EVENTS,
                max_depth: MAX_DEPTH,
                // Aliases expand short text into a large document.
                max_aliases: 0,
                max_anchors: 0,
                max_documents: 1,
            },
            with_snippet: false,
        };
        let document: Value = serde_saphyr::from_str_with_options(text, options)?;
        let fields = object(&document, "the template")?;
        let typed: PodTemplateSpec = serde_path_to_error::deserialize(named(&document))
            .map_err(|error| anyhow::anyhow!("{}: {}", error.path(), error.inner()))?;
        check_known(&document, &serde_json::to_value(typed)?, "")?;
        let (mut metadata, mut spec) = (Value::Null, Value::Null);
        for (field, value) in fields {
            match field.as_str() {
                "metadata" => metadata = allowed(value, field, &METADATA)?,
                "spec" => spec = allowed(value, field, &SPEC)?,
                _ => bail!("{field} cannot be set; metadata and spec can"),
            }
        }
        let containers = spec.as_object_mut().and_then(|spec| spec.remove("containers"));
        let container = match containers.as_ref().and_then(Value::as_array).map(Vec::as_slice) {
            None => Value::Null,
            Some([one]) if one["name"] == CONTAINER => {
                allowed(one, "spec.containers[0]", &OF_CONTAINER)?
            }
            Some(_) => bail!("spec.containers can only have one, with the name {CONTAINER}"),
        };
        Ok(Self { metadata, spec, container })
    }

    /// Merges it into a pod template.
    pub fn apply(&self, pod: &mut Value) {
        merge(&mut pod["metadata"], &self.metadata);
        merge(&mut pod["spec"]["containers"][0], &self.container);
        merge(&mut pod["spec"], &self.spec);
    }
}

/// Without containers a PodSpec is not valid, and a template may have none.
fn named(document: &Value) -> Value {
    let mut document = document.clone();
    if let Some(spec) = document.get_mut("spec").and_then(Value::as_object_mut) {
        spec.entry("containers").or_insert_with(|| json!([]));
    }
    document
}

fn object<'v>(value: &'v Value, what: &str) -> Result<&'v Map<String, Value>> {
    value.as_object().with_context(|| format!("{what} is no object"))
}

fn allowed(value: &Value, what: &str, fields: &[&str]) -> Result<Value> {
    match object(value, what)?.keys().find(|field| !fields.contains(&field.as_str())) {
        Some(field) => bail!("{what}.{field} cannot be set; {} can", fields.join(", ")),
        None => Ok(value.clone()),
    }
}

/// # Errors
/// A field that the API does not have: reading and writing has lost it. `null` removes a field.
fn check_known(given: &Value, read: &Value, path: &str) -> Result<()> {
    match (given, read) {
        (Value::Object(given), read) => given.iter().try_for_each(|(field, value)| {
            let path = format!("{path}.{field}");
            match read.get(field) {
                _ if value.is_null() => Ok(()),
                Some(read) => check_known(value, read, &path),
                None if is_empty(value) => Ok(()),
                None => bail!("{} is no field of a pod", path.trim_start_matches('.')),
            }
        }),
        (Value::Array(given), Value::Array(read)) => {
            let mut pairs = given.iter().zip(read).enumerate();
            pairs.try_for_each(|(at, (given, read))| {
                check_known(given, read, &format!("{path}[{at}]"))
            })
        }
        _ => Ok(()),
    }
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

/// RFC 7386. A template that does not have the part is `null`, and changes nothing.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else { return };
    if !target.is_object() {
        *target = json!({});
    }
    for (field, value) in patch {
        match value {
            Value::Null => drop(target.as_object_mut().and_then(|target| target.remove(field))),
            Value::Object(_) => merge(&mut target[field], value),
            _ => target[field] = value.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Value {
        json!({
            "metadata": {"labels": {"a": "b"}},
            "spec": {
                "tolerations": [{"operator": "Exists"}],
                "containers": [{"name": "mover", "image": "i", "securityContext": {"runAsUser": 0}}],
            },
        })
    }

    #[test]
    fn a_template_is_merged_into_the_pod() {
        let text = "
metadata: {labels: {team: backup}, annotations: {a: b}}
spec:
  tolerations: []
  nodeSelector: {disk: fast}
  containers:
    - name: mover
      resources: {limits: {memory: 1Gi}}
      securityContext: {runAsUser: null, runAsNonRoot: true}
";
        let mut pod = pod();
        Template::parse(text).unwrap().apply(&mut pod);
        let expected = json!({
            "metadata": {"labels": {"a": "b", "team": "backup"}, "annotations": {"a": "b"}},
            "spec": {
                "tolerations": [],
                "nodeSelector": {"disk": "fast"},
                "containers": [{
                    "name": "mover", "image": "i",
                    "resources": {"limits": {"memory": "1Gi"}},
                    "securityContext": {"runAsNonRoot": true},
                }],
            },
        });
        assert_eq!(pod, expected);
        let mut unchanged = self::pod();
        Template::default().apply(&mut unchanged);
        assert_eq!(unchanged, self::pod());
    }

    #[test]
    fn fields_of_the_mover_and_unknown_ones_are_refused() {
        for (text, words) in [
            ("spec: {serviceAccountName: a}", "spec.serviceAccountName cannot be set"),
            ("spec: {restartPolicy: Always}", "spec.restartPolicy cannot be set"),
            ("spec: {containers: [{name: mover, args: [a]}]}", "spec.containers[0].args cannot"),
            ("spec: {containers: [{name: other}]}", "with the name mover"),
            ("spec: {containers: [{name: mover}, {name: b}]}", "with the name mover"),
            ("spec: {toleration: []}", "spec.toleration"),
            ("spec: {tolerations: [{key: b, kee: a}]}", "spec.tolerations[0].kee is no field"),
            ("spec: {tolerations: 7}", "spec.tolerations"),
            ("kind: Pod", "kind"),
            ("[]", "no object"),
            ("a: &a [*a]", ""),
        ] {
            let error = format!("{:#}", Template::parse(text).map(drop).unwrap_err());
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
