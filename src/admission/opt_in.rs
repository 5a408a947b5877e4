//! The annotation with which a pod defers volumes to its container runtime. The webhooks set it on
//! new pods for the volumes that the policy covers, and validate changes as KEP-2857 requires for
//! its field: volumes can be added until the pod is initialized, and never removed.
//!
//! A pod's annotations change through the pod, its status, and a Binding: the API server copies a
//! Binding's annotations when a scheduler binds the pod. Ephemeral containers and resizes do not
//! change them.

use kube::core::gvk::GroupVersionKind;
use serde_json::json;

use super::deferral::Entries;
use super::validator::Validator;
use super::volumes::{self, Scope};
use kubernetes::admission::{Allowed, Refusal, ReviewRequest, Set};
use kubernetes::defer_annotation::{self, ANNOTATION};
use kubernetes::pod::{Pod, PodSpec, Volume};
use telemetry::peer::Peer;

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
    request: ReviewRequest<Pod>,
) -> Result<Allowed, Refusal> {
    let is_new = Scope::of(&request) == Scope::Pod;
    let Some(pod) = request.object.filter(|_| is_new) else { return Ok(Allowed::default()) };
    let Some(spec) = pod.spec.as_ref().filter(|spec| spec.runtime_class_name.is_some()) else {
        return Ok(Allowed::default());
    };
    let policy = validator.policy()?;
    let Some(entries) = policy.deferral.of_runtime(spec) else { return Ok(Allowed::default()) };
    let sender = Sender {
        validator,
        peer: request.peer,
        namespace: volumes::namespace(request.namespace.as_deref())?,
    };
    let (named, devices) = (defer_annotation::names(&pod), defer_annotation::only_devices(&pod));
    let mut all: Vec<&str> = named.iter().copied().collect();
    for (index, volume) in spec.volumes.iter().enumerate() {
        let name = volume.name.as_str();
        let is_candidate = !named.contains(name) && !devices.contains(name);
        if is_candidate && sender.is_covered(spec, entries, (index, volume)).await? {
            all.push(name);
        }
    }
    Ok(match all.len() > named.len() {
        true => Allowed { changes: vec![annotation(&pod, &all.join(","))], ..Allowed::default() },
        false => Allowed::default(),
    })
}

/// For whom lookups are made.
struct Sender<'a> {
    validator: &'a Validator,
    peer: Peer,
    namespace: &'a str,
}

impl Sender<'_> {
    /// Whether the policy defers the volume: an entry for its StorageClass supports all that the
    /// pod needs, and the class belongs to the driver.
    async fn is_covered(
        &self,
        spec: &PodSpec,
        entries: Entries<'_>,
        (index, volume): (usize, &Volume),
    ) -> Result<bool, Refusal> {
        let Validator { driver, claims, .. } = self.validator;
        if volumes::is_of(volume, driver) {
            return Ok(volumes::may_be_deferred(volume) && entries.cover(spec, "", &volume.name));
        }
        if !entries.have_classes() {
            return Ok(false);
        }
        let class = claims.class(self.peer, self.namespace, index, volume).await?;
        match class.filter(|class| !class.is_empty() && entries.cover(spec, class, &volume.name)) {
            Some(class) => claims.is_of_driver(self.peer, driver, index, &class).await,
            None => Ok(false),
        }
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
/// policy: a runtime without an entry mounts nothing, and the pod would write to the node's disk. A
/// Binding is read as a pod without a spec.
pub fn validate(validator: &Validator, request: &ReviewRequest<Pod>) -> Result<Allowed, Refusal> {
    let Some(pod) = &request.object else { return Ok(Allowed::default()) };
    if request.kind.kind == BINDING {
        return binding(pod);
    }
    let before = request.old_object.as_ref();
    if let Some(problem) = defer_annotation::problem(pod, before) {
        return Err(Refusal::invalid(problem));
    }
    let names = defer_annotation::names(pod);
    let is_new = before.is_none_or(|before| defer_annotation::names(before) != names);
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
fn binding(object: &Pod) -> Result<Allowed, Refusal> {
    match defer_annotation::value(object) {
        None => Ok(Allowed::default()),
        Some(_) => Err(Refusal::invalid(format!(
            "metadata.annotations[{ANNOTATION}]: cannot be set by a Binding; annotate the pod before it is bound"
        ))),
    }
}
