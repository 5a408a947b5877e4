//! What is served over HTTPS, path by path.

use std::time::Duration;

use axum::Router;
use k8s_openapi::api::core::v1::Pod;
use kube::core::admission::AdmissionRequest;

use super::judge::Judge;
use super::metrics::Metrics;
use super::volumes::{self, Asked};
use super::{opt_in, read_only};
use crate::kubernetes::admission::{Allowed, Refusal, Webhook};
use crate::kubernetes::https::Limits;

/// Sets what a pod with volumes of content needs.
pub const MUTATE_POD: &str = "/mutate-pod";
/// Holds pods to the policy.
pub const VALIDATE_POD: &str = "/validate-pod";
/// Names the volumes that a pod's runtime mounts.
pub const MUTATE_DEFERRAL: &str = "/mutate-deferral";
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
    let driver = judge.driver.clone();
    let mutate = move |request| {
        let mended = mend(&driver, &request);
        async move { Ok(mended) }
    };
    let of_deferrals = judge.clone();
    let defer = move |request| {
        let judge = of_deferrals.clone();
        async move { opt_in::set(&judge, request).await }
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
        .route(MUTATE_DEFERRAL, pods("mutate_deferral").route(defer))
        .route(VALIDATE_POD, pods("validate_pod").route(validate))
        .route(VALIDATE_DEFERRAL, opt_ins.route(keep))
}

fn mend(driver: &str, request: &AdmissionRequest<Pod>) -> Allowed {
    let spec = request.object.as_ref().and_then(|pod| pod.spec.as_ref());
    spec.map(|spec| read_only::mend(spec, driver, &Asked::by(request))).unwrap_or_default()
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
        Asked::Whole => {
            judge.volumes(volumes::namespace(request.namespace.as_deref())?, &spec).await?
        }
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
