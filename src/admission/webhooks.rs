//! The HTTPS endpoints of the webhooks.

use std::time::Duration;

use axum::Router;

use super::metrics::Metrics;
use super::validator::Validator;
use super::volumes::{self, Scope};
use super::{opt_in, read_only};
use kubernetes::admission::{Allowed, Refusal, ReviewRequest, Webhook};
use kubernetes::https::Limits;
use kubernetes::pod::Pod;

/// Makes content volumes of a pod read-only.
pub const MUTATE_POD: &str = "/mutate-pod";
/// Validates the volumes of pods against the policy.
pub const VALIDATE_POD: &str = "/validate-pod";
/// Sets the annotation that names the volumes which the pod's runtime mounts.
pub const MUTATE_DEFERRAL: &str = "/mutate-deferral";
/// Validates changes of that annotation as KEP-2857 requires for its field: volumes can be added
/// until the pod is initialized, and never removed.
pub const VALIDATE_DEFERRAL: &str = "/validate-deferral";

/// The API server accepts objects of 3 MiB of JSON, and a review contains at most two, old and new.
pub const LIMITS: Limits = Limits { body: 7 << 20, request: Duration::from_millis(4500) };
/// Maximum duration of a review: the API server waits 5 s.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(4);

pub fn routes(validator: &Validator, metrics: &Metrics) -> Router {
    let pods = |webhook| Webhook::of::<Pod>(REVIEW_TIMEOUT).observed_by(metrics.count(webhook));
    let opt_ins = Webhook::of_kinds(&opt_in::kinds(), REVIEW_TIMEOUT);
    let opt_ins = opt_ins.observed_by(metrics.count("validate_deferral"));
    let driver = validator.driver.clone();
    let read_only = move |request: ReviewRequest<Pod>| {
        let response = mutate(&driver, &request);
        async move { Ok(response) }
    };
    let for_deferral = validator.clone();
    let defer = move |request| {
        let validator = for_deferral.clone();
        async move { opt_in::annotate(&validator, request).await }
    };
    let for_opt_in = validator.clone();
    let keep = move |request: ReviewRequest<Pod>| {
        let response = opt_in::validate(&for_opt_in, &request);
        async move { response }
    };
    let for_validation = validator.clone();
    let validate = move |request| {
        let validator = for_validation.clone();
        async move { pod(&validator, request).await }
    };
    Router::new()
        .route(MUTATE_POD, pods("mutate_pod").route(read_only))
        .route(MUTATE_DEFERRAL, pods("mutate_deferral").route(defer))
        .route(VALIDATE_POD, pods("validate_pod").route(validate))
        .route(VALIDATE_DEFERRAL, opt_ins.route(keep))
}

fn mutate(driver: &str, request: &ReviewRequest<Pod>) -> Allowed {
    let spec = request.object.as_ref().and_then(|pod| pod.spec.as_ref());
    spec.map(|spec| read_only::mutate(spec, driver, &Scope::of(request))).unwrap_or_default()
}

async fn pod(validator: &Validator, request: ReviewRequest<Pod>) -> Result<Allowed, Refusal> {
    let scope = Scope::of(&request);
    if scope == Scope::Nothing {
        return Ok(Allowed::default());
    }
    let Some(spec) = request.object.and_then(|pod| pod.spec) else {
        return Err(Refusal::invalid("the admission review contains no pod"));
    };
    let mut findings = match scope {
        Scope::Pod => {
            let namespace = volumes::namespace(request.namespace.as_deref())?;
            validator.volumes(request.peer, namespace, &spec).await?
        }
        _ => Default::default(),
    };
    // A mutating webhook that runs after ours may have undone the change.
    for problem in read_only::problems(&spec, &validator.driver, &scope) {
        findings.malformed(problem);
    }
    match findings.refusal() {
        Some(refusal) => Err(refusal),
        None => Ok(Allowed { warnings: findings.warnings, ..Allowed::default() }),
    }
}
