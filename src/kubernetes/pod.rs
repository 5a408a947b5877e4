//! A pod with the fields that this project reads. Pods come from any client, and all pods of a node
//! are cached: what is not in these types takes no memory.

use std::borrow::Cow;
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use kube::core::NamespaceResourceScope;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::bounded::{List, Map, Present};
use super::defer_annotation::ANNOTATION;

/// Annotations with which kubelet marks the mirror pod of a static pod: the static pod's uid, and
/// that it is a mirror.
pub const CONFIG_HASH: &str = "kubernetes.io/config.hash";
pub const MIRROR: &str = "kubernetes.io/config.mirror";
/// The annotations that are kept.
const KEPT: [&str; 3] = [ANNOTATION, CONFIG_HASH, MIRROR];
/// Maximum bytes of a kept annotation: the API server's limit for all of an object.
const MAX_ANNOTATION: usize = 256 << 10;
/// The owner of a mirror pod, the only one that is kept.
const NODE: &str = "Node";

#[derive(Debug, Clone, Default, Deserialize)]
pub struct Pod {
    /// Only identity, version, the kept annotations, and a Node as owner.
    #[serde(default, deserialize_with = "metadata")]
    pub metadata: ObjectMeta,
    #[serde(default)]
    pub spec: Option<PodSpec>,
    #[serde(default)]
    pub status: Option<PodStatus>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec {
    #[serde(default)]
    pub runtime_class_name: Option<String>,
    #[serde(default)]
    pub host_users: Option<bool>,
    #[serde(default)]
    pub security_context: Option<PodSecurityContext>,
    #[serde(default)]
    pub volumes: List<Volume>,
    #[serde(default)]
    pub containers: List<Container>,
    #[serde(default)]
    pub init_containers: List<Container>,
    #[serde(default)]
    pub ephemeral_containers: List<Container>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSecurityContext {
    #[serde(default)]
    pub fs_group: Option<i64>,
    #[serde(default)]
    pub fs_group_change_policy: Option<String>,
    #[serde(default)]
    pub se_linux_options: Option<Present>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Container {
    #[serde(default)]
    pub name: String,
    #[serde(default)]
    pub security_context: Option<SecurityContext>,
    #[serde(default)]
    pub volume_mounts: List<VolumeMount>,
    #[serde(default)]
    pub volume_devices: List<VolumeDevice>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SecurityContext {
    #[serde(default)]
    pub se_linux_options: Option<Present>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeMount {
    #[serde(default)]
    pub name: String,
    #[serde(default)]
    pub read_only: Option<bool>,
    #[serde(default)]
    pub sub_path: Option<String>,
    #[serde(default)]
    pub sub_path_expr: Option<String>,
    #[serde(default)]
    pub mount_propagation: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
pub struct VolumeDevice {
    #[serde(default)]
    pub name: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    #[serde(default)]
    pub name: String,
    // Most volumes are of other kinds.
    #[serde(default)]
    pub csi: Option<Box<InlineSource>>,
    #[serde(default)]
    pub persistent_volume_claim: Option<ClaimSource>,
    #[serde(default)]
    pub ephemeral: Option<EphemeralSource>,
}

/// `volumes[].csi`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InlineSource {
    #[serde(default)]
    pub driver: String,
    #[serde(default)]
    pub read_only: Option<bool>,
    #[serde(default)]
    pub volume_attributes: Map<String>,
    #[serde(default)]
    pub node_publish_secret_ref: Option<Present>,
}

/// `volumes[].persistentVolumeClaim`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimSource {
    #[serde(default)]
    pub claim_name: String,
}

/// `volumes[].ephemeral`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EphemeralSource {
    #[serde(default)]
    pub volume_claim_template: Option<ClaimTemplate>,
}

#[derive(Debug, Clone, Default, Deserialize)]
pub struct ClaimTemplate {
    #[serde(default)]
    pub spec: ClaimSpec,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimSpec {
    #[serde(default)]
    pub storage_class_name: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
pub struct PodStatus {
    #[serde(default)]
    pub conditions: List<PodCondition>,
}

#[derive(Debug, Clone, Default, Deserialize)]
pub struct PodCondition {
    #[serde(rename = "type", default)]
    pub type_: String,
    #[serde(default)]
    pub status: String,
}

impl Resource for Pod {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "Pod".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "pods".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// The fields of an ObjectMeta that are read.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    namespace: Option<String>,
    #[serde(default)]
    uid: Option<String>,
    #[serde(default)]
    resource_version: Option<String>,
    #[serde(default)]
    annotations: Option<Annotations>,
    #[serde(default)]
    owner_references: List<Owner>,
}

#[derive(Debug, Default, Deserialize)]
struct Owner {
    #[serde(default)]
    kind: String,
}

fn metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    let read = Option::<Metadata>::deserialize(deserializer)?.unwrap_or_default();
    let of_node = read.owner_references.iter().any(|owner| owner.kind == NODE);
    let node = || vec![OwnerReference { kind: NODE.to_owned(), ..OwnerReference::default() }];
    Ok(ObjectMeta {
        name: read.name,
        namespace: read.namespace,
        uid: read.uid,
        resource_version: read.resource_version,
        annotations: read.annotations.map(|kept| kept.0.into_iter().collect()),
        owner_references: of_node.then(node),
        ..ObjectMeta::default()
    })
}

/// The annotations of [`KEPT`]. The number of others is not limited: they take no memory.
#[derive(Debug, Default)]
struct Annotations(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Annotations {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(AnnotationsVisitor)
    }
}

struct AnnotationsVisitor;

impl<'de> Visitor<'de> for AnnotationsVisitor {
    type Value = Annotations;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut all: A) -> Result<Annotations, A::Error> {
        let mut kept: Vec<(String, String)> = Vec::new();
        while let Some(key) = all.next_key::<String>()? {
            if !KEPT.contains(&key.as_str()) {
                all.next_value::<IgnoredAny>()?;
                continue;
            }
            let value: String = all.next_value()?;
            if kept.iter().any(|(known, _)| *known == key) {
                return Err(A::Error::custom(format!("{key}: occurs twice")));
            }
            if value.len() > MAX_ANNOTATION {
                return Err(A::Error::custom(format!(
                    "{key}: has more than {MAX_ANNOTATION} bytes"
                )));
            }
            kept.push((key, value));
        }
        Ok(Annotations(kept))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::bounded::parse;

    fn read(pod: &Value) -> Result<Pod, String> {
        let parsed = parse(pod.to_string().as_bytes());
        parsed.map(|parsed| parsed.value).map_err(|error| error.to_string())
    }

    #[test]
    fn only_annotations_that_are_used_are_kept() {
        let mut annotations: serde_json::Map<String, Value> =
            (0..20_000).map(|number| (format!("a/{number}"), "x".into())).collect();
        annotations.insert(ANNOTATION.into(), "data".into());
        let owners =
            json!([{ "kind": "ReplicaSet", "name": "r" }, { "kind": "Node", "name": "n" }]);
        let metadata = json!({
            "name": "p", "namespace": "n", "uid": "u", "annotations": annotations,
            "ownerReferences": owners, "labels": { "a": "b" }, "managedFields": [{}, {}],
        });
        let pod = read(&json!({ "metadata": metadata })).unwrap();
        let kept = pod.metadata.annotations.unwrap();
        assert_eq!(kept.into_iter().collect::<Vec<_>>(), [(ANNOTATION.into(), "data".into())]);
        assert_eq!(pod.metadata.owner_references.unwrap()[0].kind, "Node");
        assert!(pod.metadata.labels.is_none() && pod.metadata.managed_fields.is_none());
        // No annotations differ from none that is kept.
        assert_eq!(read(&json!({ "metadata": {} })).unwrap().metadata.annotations, None);
        let other = json!({ "metadata": { "annotations": { "a": "b" } } });
        assert_eq!(read(&other).unwrap().metadata.annotations, Some([].into()));
        let long = "x".repeat(MAX_ANNOTATION + 1);
        let long = read(&json!({ "metadata": { "annotations": { ANNOTATION: long } } }));
        assert!(long.unwrap_err().contains(ANNOTATION));
    }
}
