//! What is served over HTTPS, path by path.

use std::time::Duration;

use axum::Router;
use k8s_openapi::api::core::v1::Pod;
use kube::core::admission::AdmissionRequest;

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

/// The API server takes objects of 3 MiB of JSON, and sends at most two at once, before and after.
pub const LIMITS: Limits = Limits { body: 7 << 20, request: Duration::from_millis(4500) };
/// How long a judgement may take: the API server waits 5 s.
const JUDGEMENT: Duration = Duration::from_secs(4);

pub fn routes(judge: &Judge, metrics: &Metrics) -> Router {
    let pods = |webhook| Webhook::of::<Pod>(JUDGEMENT).counted(metrics.count(webhook));
    let opt_ins = Webhook::of_kinds(&opt_in::kinds(), JUDGEMENT);
    let opt_ins = opt_ins.counted(metrics.count("validate_deferral"));
    let of_mended = judge.clone();
    let mutate = move |request| {
        let mended = mend(&of_mended, &request);
        async move { mended }
    };
    let of_opt_ins = judge.clone();
    let keep = move |request| {
        let judged = opt_in::judge(&of_opt_ins, &request);
        async move { judged }
    };
    let of_pods = judge.clone();
    let validate = move |request| {
        let judge = of_pods.clone();
        async move { pod(&judge, request).await }
    };
    Router::new()
        .route(MUTATE_POD, pods("mutate_pod").route(mutate))
        .route(VALIDATE_POD, pods("validate_pod").route(validate))
        .route(VALIDATE_DEFERRAL, opt_ins.route(keep))
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
