//! What a pod says of mounts by its runtime, in its annotation: kept as KEP-2857 has the field in whose place it is, settable until the
//! pod is initialised, and never unset.
//!
//! Annotations of a pod change by way of the pod, of its status, and of a Binding, from which the API server copies them when a
//! scheduler binds the pod. (By way of its ephemeral containers and of a resize they do not.)

use k8s_openapi::api::core::v1::Pod;
use kube::core::DynamicObject;
use kube::core::admission::AdmissionRequest;
use kube::core::gvk::GroupVersionKind;

use super::judge::Judge;
use crate::kubernetes::admission::{Allowed, Refusal};
use crate::kubernetes::defer_annotation::{self, ANNOTATION};

const POD: &str = "Pod";
const BINDING: &str = "Binding";

/// What is sent here.
pub fn kinds() -> [GroupVersionKind; 2] {
    [POD, BINDING].map(|kind| GroupVersionKind::gvk("", "v1", kind))
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
    match judge.policy()?.deferral.lacks_runtime(pod.spec.as_ref()) {
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
