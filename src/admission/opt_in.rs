//! The annotation by which a pod leaves volumes to its runtime. It is set when the pod is created, for the volumes that the policy
//! covers; and it is kept as KEP-2857 has the field that it stands for: settable until the pod is initialised, and never unset.
//!
//! Annotations of a pod change by way of the pod, of its status, and of a Binding, from which the API server copies them when a
//! scheduler binds the pod. (By way of its ephemeral containers and of a resize they do not.)

use k8s_openapi::api::core::v1::{Pod, PodSpec, Volume};
use kube::core::DynamicObject;
use kube::core::admission::AdmissionRequest;
use kube::core::gvk::GroupVersionKind;
use serde_json::json;

use super::deferral::Entries;
use super::judge::Judge;
use super::volumes::{self, Asked};
use crate::kubernetes::admission::{Allowed, Refusal, Set};
use crate::kubernetes::defer_annotation::{self, ANNOTATION};

const POD: &str = "Pod";
const BINDING: &str = "Binding";

/// What is sent here.
pub fn kinds() -> [GroupVersionKind; 2] {
    [POD, BINDING].map(|kind| GroupVersionKind::gvk("", "v1", kind))
}

/// Names the volumes that the policy leaves to the runtime of a pod that is created, besides those that the pod names itself.
///
/// # Errors
/// The policy has entries for the runtime, and what they depend on is not known.
pub async fn set(judge: &Judge, request: AdmissionRequest<Pod>) -> Result<Allowed, Refusal> {
    let is_whole = Asked::by(&request) == Asked::Whole;
    let Some(pod) = request.object.filter(|_| is_whole) else { return Ok(Allowed::default()) };
    let Some(spec) = pod.spec.as_ref().filter(|spec| spec.runtime_class_name.is_some()) else {
        return Ok(Allowed::default());
    };
    let policy = judge.policy()?;
    let Some(entries) = policy.deferral.of_runtime(spec) else { return Ok(Allowed::default()) };
    let namespace = volumes::namespace(request.namespace.as_deref())?;
    let (named, devices) = (defer_annotation::names(&pod), defer_annotation::only_devices(&pod));
    let mut all: Vec<&str> = named.iter().copied().collect();
    for (index, volume) in spec.volumes.iter().flatten().enumerate() {
        let name = volume.name.as_str();
        let is_open = !named.contains(name) && !devices.contains(name);
        if is_open && is_covered(judge, namespace, spec, entries, (index, volume)).await? {
            all.push(name);
        }
    }
    Ok(match all.len() > named.len() {
        true => Allowed { changes: vec![annotate(&pod, &all.join(","))], ..Allowed::default() },
        false => Allowed::default(),
    })
}

/// Whether the policy leaves the volume to the runtime: an entry of its class, which is the driver's, has all that the pod needs.
async fn is_covered(
    judge: &Judge,
    namespace: &str,
    spec: &PodSpec,
    entries: Entries<'_>,
    (index, volume): (usize, &Volume),
) -> Result<bool, Refusal> {
    if volumes::is_of(volume, &judge.driver) {
        return Ok(volumes::may_be_deferred(volume) && entries.cover(spec, "", &volume.name));
    }
    if !entries.have_classes() {
        return Ok(false);
    }
    let class = judge.claims.class(namespace, index, volume).await?;
    match class.filter(|class| !class.is_empty() && entries.cover(spec, class, &volume.name)) {
        Some(class) => judge.claims.is_of_driver(&judge.driver, index, &class).await,
        None => Ok(false),
    }
}

fn annotate(pod: &Pod, value: &str) -> Set {
    match pod.metadata.annotations.is_some() {
        true => Set::new(["metadata", "annotations", ANNOTATION], value),
        // What holds the field has to be there.
        false => Set::new(["metadata", "annotations"], json!({ ANNOTATION: value })),
    }
}

/// Holds what a pod says to the rules of the field, and to the policy of `judge`: a runtime that has no entry there mounts nothing,
/// and the pod would write to the node's disk.
pub fn judge(judge: &Judge, request: &AdmissionRequest<DynamicObject>) -> Result<Allowed, Refusal> {
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
    match judge.policy()?.deferral.lacks(spec, &names) {
        Some(lack) => {
            Err(Refusal::not_allowed(format!("metadata.annotations[{ANNOTATION}]: {lack}")))
        }
        None => Ok(Allowed::default()),
    }
}

/// It shows neither the pod's volumes nor what the pod has named already, which it would replace.
fn binding(object: &DynamicObject) -> Result<Allowed, Refusal> {
    let mut named = object.metadata.annotations.iter().flat_map(|all| all.keys());
    match named.any(|name| name == ANNOTATION) {
        false => Ok(Allowed::default()),
        true => Err(Refusal::invalid(format!(
            "metadata.annotations[{ANNOTATION}]: a Binding names no volumes; annotate the pod before it is bound"
        ))),
    }
}

fn pod(object: &DynamicObject) -> Result<Pod, Refusal> {
    let parsed = object.clone().try_parse();
    parsed.map_err(|error| Refusal::invalid(format!("not a pod: {error}")))
}
