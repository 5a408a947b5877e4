//! What is served over HTTPS, path by path.

use std::time::Duration;

use axum::Router;
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, Operation};
use kube::core::gvk::GroupVersionKind;
use serde::Deserialize;

use super::judge::Judge;
use super::metrics::Metrics;
use super::volumes::Asked;
use super::{opt_in, read_only};
use crate::kubernetes::admission::{Allowed, Refusal, Webhook};
use crate::kubernetes::https::Limits;
use crate::kubernetes::name;

/// Sets what a pod with volumes of content needs, and which volumes its runtime mounts.
pub const MUTATE_POD: &str = "/mutate-pod";
/// Holds pods to the policy.
pub const VALIDATE_POD: &str = "/validate-pod";
/// Keeps what a pod says of mounts by its runtime as the proposal has it: settable until it is initialised, and never unset.
pub const VALIDATE_DEFERRAL: &str = "/validate-deferral";
/// Warns of templates whose pods will be refused.
pub const VALIDATE_WORKLOAD: &str = "/validate-workload";

/// The API server takes objects of 3 MiB of JSON, and sends at most two at once, before and after.
pub const LIMITS: Limits = Limits { body: 7 << 20, request: Duration::from_millis(4500) };
/// How long a judgement may take: the API server waits 5 s.
const JUDGEMENT: Duration = Duration::from_secs(4);

/// Kinds that have a template of pods, by API group and version, and where.
const WORKLOADS: [(&str, &str, &str, &str); 8] = [
    ("apps", "v1", "Deployment", "/spec/template"),
    ("apps", "v1", "StatefulSet", "/spec/template"),
    ("apps", "v1", "DaemonSet", "/spec/template"),
    ("apps", "v1", "ReplicaSet", "/spec/template"),
    ("", "v1", "ReplicationController", "/spec/template"),
    ("batch", "v1", "Job", "/spec/template"),
    ("batch", "v1", "CronJob", "/spec/jobTemplate/spec/template"),
    ("", "v1", "PodTemplate", "/template"),
];

pub fn routes(judge: &Judge, metrics: &Metrics) -> Router {
    let pods = |webhook| Webhook::of::<Pod>(JUDGEMENT).counted(metrics.count(webhook));
    let kinds =
        WORKLOADS.map(|(group, version, kind, _)| GroupVersionKind::gvk(group, version, kind));
    let workloads =
        Webhook::of_kinds(&kinds, JUDGEMENT).advising().counted(metrics.count("validate_workload"));
    let opt_ins = Webhook::of_kinds(&opt_in::kinds(), JUDGEMENT);
    let opt_ins = opt_ins.counted(metrics.count("validate_deferral"));
    let of_mended = judge.clone();
    let mutate = move |request| {
        let mended = mend(&of_mended, &request);
        async move { mended }
    };
    let of_pods = judge.clone();
    let validate = move |request| {
        let judge = of_pods.clone();
        async move { pod(&judge, request).await }
    };
    let of_workloads = judge.clone();
    let advise = move |request| {
        let judge = of_workloads.clone();
        async move { workload(&judge, request).await }
    };
    Router::new()
        .route(MUTATE_POD, pods("mutate_pod").route(mutate))
        .route(VALIDATE_POD, pods("validate_pod").route(validate))
        .route(VALIDATE_DEFERRAL, opt_ins.route(|request| async move { opt_in::judge(&request) }))
        .route(VALIDATE_WORKLOAD, workloads.route(advise))
}

fn mend(judge: &Judge, request: &AdmissionRequest<Pod>) -> Result<Allowed, Refusal> {
    let asked = Asked::by(request);
    let Some(spec) = request.object.as_ref().and_then(|pod| pod.spec.as_ref()) else {
        return Ok(Allowed::default());
    };
    let mut mended = read_only::mend(spec, &judge.driver, &asked);
    // Of a pod that the policy says nothing of it need not be known.
    if asked == Asked::Whole && spec.runtime_class_name.is_some() {
        mended.changes.extend(judge.policy()?.deferral.mend(spec, &judge.driver));
    }
    Ok(mended)
}

async fn pod(judge: &Judge, request: AdmissionRequest<Pod>) -> Result<Allowed, Refusal> {
    let asked = Asked::by(&request);
    if asked == Asked::Nothing {
        return Ok(Allowed::default());
    }
    let Some(spec) = request.object.and_then(|pod| pod.spec) else {
        return Err(Refusal::invalid("the review has no pod to be judged"));
    };
    let mut findings = match asked {
        Asked::Whole => judge.volumes(namespace(request.namespace.as_deref())?, &spec).await?,
        _ => Default::default(),
    };
    // Whoever changes pods behind the webhook that sets it may have undone it.
    for problem in read_only::problems(&spec, &judge.driver, &asked) {
        findings.malformed(problem);
    }
    match findings.refusal() {
        Some(refusal) => Err(refusal),
        None => Ok(Allowed { warnings: findings.warnings, ..Allowed::default() }),
    }
}

fn namespace(said: Option<&str>) -> Result<&str, Refusal> {
    let found = said.filter(|name| name::is_namespace(name));
    found.ok_or_else(|| Refusal::invalid("metadata.namespace: is missing or no name"))
}

async fn workload(
    judge: &Judge,
    request: AdmissionRequest<DynamicObject>,
) -> Result<Allowed, Refusal> {
    let makes_pods = matches!(request.operation, Operation::Create | Operation::Update);
    let (Some(object), true) = (&request.object, makes_pods) else { return Ok(Allowed::default()) };
    let kind = &request.kind;
    let mut known =
        WORKLOADS.iter().filter(|(group, _, name, _)| kind.group == *group && kind.kind == *name);
    let template = known.next().and_then(|(.., path)| object.data.pointer(path));
    // What the API server does not take either is for it to say.
    let template = template.and_then(|template| PodTemplateSpec::deserialize(template).ok());
    let Some(spec) = template.and_then(|template| template.spec) else {
        return Ok(Allowed::default());
    };
    let findings = judge.volumes(namespace(request.namespace.as_deref())?, &spec).await?;
    let refused = findings.problems.into_iter();
    let refused = refused.map(|problem| format!("pods will be refused: {}", problem.message));
    let mut warnings: Vec<_> = refused.chain(findings.warnings).collect();
    warnings.extend(read_only::advice(&spec, &judge.driver));
    Ok(Allowed { warnings, ..Allowed::default() })
}
