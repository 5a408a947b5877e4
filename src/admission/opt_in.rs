//! The annotation with which a pod defers volumes to its container runtime. The webhooks set it on
//! new pods for the volumes that the policy covers, and validate changes as KEP-2857 requires for
//! its field: volumes can be added until the pod is initialized, and never removed.
//!
//! A pod's annotations change through the pod, its status, and a Binding: the API server copies a
//! Binding's annotations when a scheduler binds the pod. Ephemeral containers and resizes do not
//! change them.

use k8s_openapi::api::core::v1::{Pod, PodSpec, Volume};
use kube::core::DynamicObject;
use kube::core::admission::AdmissionRequest;
use kube::core::gvk::GroupVersionKind;
use serde_json::json;

use super::deferral::Entries;
use super::validator::Validator;
use super::volumes::{self, Scope};
use crate::kubernetes::admission::{Allowed, Refusal, Set};
use crate::kubernetes::defer_annotation::{self, ANNOTATION};

const POD: &str = "Pod";
const BINDING: &str = "Binding";

/// The kinds that the webhook configuration sends.
pub fn kinds() -> [GroupVersionKind; 2] {
    [POD, BINDING].map(|kind| GroupVersionKind::gvk("", "v1", kind))
}

/// Adds to the annotation of a new pod the volumes that the policy defers, and keeps those that the
/// pod names itself.
///
/// # Errors
/// The policy has entries for the RuntimeClass, and a claim or StorageClass is unknown.
pub async fn annotate(
    validator: &Validator,
    request: AdmissionRequest<Pod>,
) -> Result<Allowed, Refusal> {
    let is_new = Scope::of(&request) == Scope::Pod;
    let Some(pod) = request.object.filter(|_| is_new) else { return Ok(Allowed::default()) };
    let Some(spec) = pod.spec.as_ref().filter(|spec| spec.runtime_class_name.is_some()) else {
        return Ok(Allowed::default());
    };
    let policy = validator.policy()?;
    let Some(entries) = policy.deferral.of_runtime(spec) else { return Ok(Allowed::default()) };
    let namespace = volumes::namespace(request.namespace.as_deref())?;
    let (named, devices) = (defer_annotation::names(&pod), defer_annotation::only_devices(&pod));
    let mut all: Vec<&str> = named.iter().copied().collect();
    for (index, volume) in spec.volumes.iter().flatten().enumerate() {
        let name = volume.name.as_str();
        let is_candidate = !named.contains(name) && !devices.contains(name);
        if is_candidate && is_covered(validator, namespace, spec, entries, (index, volume)).await? {
            all.push(name);
        }
    }
    Ok(match all.len() > named.len() {
        true => Allowed { changes: vec![annotation(&pod, &all.join(","))], ..Allowed::default() },
        false => Allowed::default(),
    })
}

/// Whether the policy defers the volume: an entry for its StorageClass supports all that the pod
/// needs, and the class belongs to the driver.
async fn is_covered(
    validator: &Validator,
    namespace: &str,
    spec: &PodSpec,
    entries: Entries<'_>,
    (index, volume): (usize, &Volume),
) -> Result<bool, Refusal> {
    if volumes::is_of(volume, &validator.driver) {
        return Ok(volumes::may_be_deferred(volume) && entries.cover(spec, "", &volume.name));
    }
    if !entries.have_classes() {
        return Ok(false);
    }
    let class = validator.claims.class(namespace, index, volume).await?;
    match class.filter(|class| !class.is_empty() && entries.cover(spec, class, &volume.name)) {
        Some(class) => validator.claims.is_of_driver(&validator.driver, index, &class).await,
        None => Ok(false),
    }
}

fn annotation(pod: &Pod, value: &str) -> Set {
    match pod.metadata.annotations.is_some() {
        true => Set::new(["metadata", "annotations", ANNOTATION], value),
        // A JSON patch cannot add to a missing object.
        false => Set::new(["metadata", "annotations"], json!({ ANNOTATION: value })),
    }
}

/// Validates changes of the annotation against the rules of the proposed field, and against the
/// policy: a runtime without an entry mounts nothing, and the pod would write to the node's disk.
pub fn validate(
    validator: &Validator,
    request: &AdmissionRequest<DynamicObject>,
) -> Result<Allowed, Refusal> {
    let Some(object) = &request.object else { return Ok(Allowed::default()) };
    if request.kind.kind == BINDING {
        return binding(object);
    }
    let before = request.old_object.as_ref().map(pod).transpose()?;
    let pod = pod(object)?;
    if let Some(problem) = defer_annotation::problem(&pod, before.as_ref()) {
        return Err(Refusal::invalid(problem));
    }
    let names = defer_annotation::names(&pod);
    let is_new = before.is_none_or(|before| defer_annotation::names(&before) != names);
    if names.is_empty() || !is_new {
        return Ok(Allowed::default());
    }
    let spec = pod.spec.as_ref().ok_or_else(|| Refusal::invalid("spec: is missing"))?;
    match validator.policy()?.deferral.unsupported(spec, &names) {
        Some(problem) => {
            Err(Refusal::not_allowed(format!("metadata.annotations[{ANNOTATION}]: {problem}")))
        }
        None => Ok(Allowed::default()),
    }
}

/// A Binding shows neither the pod's volumes nor the current annotation, which it would replace.
fn binding(object: &DynamicObject) -> Result<Allowed, Refusal> {
    let mut named = object.metadata.annotations.iter().flat_map(|all| all.keys());
    match named.any(|name| name == ANNOTATION) {
        false => Ok(Allowed::default()),
        true => Err(Refusal::invalid(format!(
            "metadata.annotations[{ANNOTATION}]: cannot be set by a Binding; annotate the pod before it is bound"
        ))),
    }
}

fn pod(object: &DynamicObject) -> Result<Pod, Refusal> {
    let parsed = object.clone().try_parse();
    parsed.map_err(|error| Refusal::invalid(format!("the object is not a Pod: {error}")))
}
