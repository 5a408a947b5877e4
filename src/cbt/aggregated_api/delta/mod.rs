//! Creates the response to a VolumeSnapshotDelta, in this order: validation, rate limit,
//! permissions, resolution of names, one page from the driver's endpoint. One deadline applies to
//! all steps.

mod find;
pub mod metrics;
mod pages;
mod rate;
mod rights;

use std::time::Duration;

use k8s_openapi::api::authentication::v1::UserInfo;
use kube::Client;
use tokio::time::timeout;

use self::find::Finder;
use self::metrics::Metrics;
use self::pages::{Pages, Refused};
use self::rate::Rates;
use super::ROLE;
use super::endpoint::Endpoints;
use super::failure::{Cause, Failure};
use kubernetes::cbt_http::{self, Page};
use kubernetes::client::{self, Rate};
use kubernetes::name;
use kubernetes::review::Reviewer;
use kubernetes::snapshot_delta::{
    API_VERSION, DEFAULT_LIMIT, KIND, VolumeSnapshotDelta, VolumeSnapshotDeltaSpec,
    VolumeSnapshotDeltaState, VolumeSnapshotDeltaStatus,
};
use telemetry::shutdown::Shutdown;

/// Time limit of a response. The API server gives up after a minute.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Dependencies and limits.
pub struct Settings {
    /// Client for objects: VolumeSnapshots, their contents, DriverDiscoveries, Secrets.
    pub client: Client,
    /// Client for SubjectAccessReviews, with its own rate limit.
    pub reviews: Client,
    /// Time to cache a granted permission.
    pub review_ttl: Duration,
    pub endpoints: Endpoints,
    /// Maximum entries of a page; not more than [`cbt_http::MAX_LIMIT`].
    pub max_limit: u32,
    /// Rate limit of one user, and of all users.
    pub user_rate: Rate,
    pub rate: Rate,
    /// See [`TIMEOUT`].
    pub timeout: Duration,
    pub metrics: Metrics,
    pub shutdown: Shutdown,
}

/// Serves VolumeSnapshotDeltas. Clones share all state.
#[derive(Clone)]
pub struct Deltas {
    finder: Finder,
    reviewer: Reviewer,
    pages: Pages,
    rates: Rates,
    max_limit: u32,
    timeout: Duration,
    metrics: Metrics,
    shutdown: Shutdown,
}

impl Deltas {
    /// Starts the watches.
    pub fn new(settings: Settings) -> Self {
        let Settings {
            client,
            reviews,
            review_ttl,
            endpoints,
            max_limit,
            user_rate,
            rate,
            timeout,
            metrics,
            shutdown,
        } = settings;
        Self {
            finder: Finder::start(client, &shutdown),
            reviewer: Reviewer::new(reviews, review_ttl),
            pages: Pages::new(endpoints, metrics.clone()),
            rates: Rates::new(user_rate, rate),
            max_limit: max_limit.clamp(1, cbt_http::MAX_LIMIT),
            timeout,
            metrics,
            shutdown,
        }
    }

    /// Whether all watches are running. Without them responses take longer, but are possible.
    pub fn is_live(&self) -> bool {
        self.finder.is_live()
    }

    /// Serves a request of `user` in `namespace`: returns the object with its status.
    ///
    /// # Errors
    /// A failure before the call to the driver. An error of the driver is a status of state Failed.
    pub async fn create(
        &self,
        user: &UserInfo,
        namespace: &str,
        request: VolumeSnapshotDelta,
    ) -> Result<VolumeSnapshotDelta, Failure> {
        let answer = tokio::select! {
            answered = timeout(self.timeout, self.answer(user, namespace, request)) => {
                answered.unwrap_or_else(|_| Err(self.timed_out()))
            }
            () = self.shutdown.ending() => {
                let message = "this replica of the aggregated API server is exiting; retry";
                Err(Failure::new(Cause::Exiting, message).after(Duration::from_secs(1)))
            }
        };
        self.metrics.answered(&answer);
        answer
    }

    async fn answer(
        &self,
        user: &UserInfo,
        namespace: &str,
        request: VolumeSnapshotDelta,
    ) -> Result<VolumeSnapshotDelta, Failure> {
        check(namespace, &request.spec)?;
        self.rates.admit(user.username.as_deref().unwrap_or_default())?;
        rights::check(&self.reviewer, user, namespace, &request.spec).await?;
        let found = self.finder.find(namespace, &request.spec).await?;
        let (offset, limit) = (request.spec.offset, limit(request.spec.limit, self.max_limit));
        let status = match self.pages.page(found, offset, limit).await {
            Ok(page) => status_of(page),
            Err(Refused::Driver(error)) => VolumeSnapshotDeltaStatus {
                error,
                state: VolumeSnapshotDeltaState::Failed,
                ..VolumeSnapshotDeltaStatus::default()
            },
            Err(Refused::Failure(failure)) => return Err(failure),
        };
        Ok(VolumeSnapshotDelta {
            api_version: API_VERSION.into(),
            kind: KIND.into(),
            status: Some(VolumeSnapshotDeltaStatus { limit: limit.into(), offset, ..status }),
            ..request
        })
    }

    fn timed_out(&self) -> Failure {
        let seconds = self.timeout.as_secs_f64();
        let message =
            format!("the request was not complete within {seconds} s; retry, or reduce spec.limit");
        Failure::new(Cause::TimedOut, message)
    }
}

/// The number of entries to request.
fn limit(requested: u64, max: u32) -> u32 {
    let requested = if requested == 0 { DEFAULT_LIMIT } else { requested };
    u32::try_from(requested).map_or(max, |requested| requested.min(max))
}

fn status_of(page: Page) -> VolumeSnapshotDeltaStatus {
    VolumeSnapshotDeltaStatus {
        changed_blocks: page.changed_blocks,
        state: match page.next {
            Some(_) => VolumeSnapshotDeltaState::Continue,
            None => VolumeSnapshotDeltaState::Completed,
        },
        next: page.next.unwrap_or(0),
        volume_size_bytes: page.volume_size_bytes,
        ..VolumeSnapshotDeltaStatus::default()
    }
}

/// Names become parts of URLs at the API server, so they must be valid.
fn check(namespace: &str, spec: &VolumeSnapshotDeltaSpec) -> Result<(), Failure> {
    let invalid = |message: String| Err(Failure::new(Cause::Invalid, message));
    if !name::is_namespace(namespace) {
        return invalid("metadata.namespace: is not a valid namespace name".into());
    }
    let target = [("spec.targetVolumeSnapshotName", &spec.target_volume_snapshot_name)];
    let base = Some(&spec.base_volume_snapshot_name).filter(|name| !name.is_empty());
    let base = base.map(|name| ("spec.baseVolumeSnapshotName", name));
    let secret = spec.secret_ref.as_ref().map(|secret| ("spec.secretRef.name", &secret.name));
    for (field, name) in target.into_iter().chain(base).chain(secret) {
        if name.is_empty() {
            return invalid(format!("{field}: is required"));
        }
        if !name::is_object(name) {
            return invalid(format!("{field}: is not a valid Kubernetes name"));
        }
    }
    let of_secret = spec.secret_ref.as_ref().and_then(|secret| secret.namespace.as_deref());
    match of_secret {
        Some(other) if !other.is_empty() && other != namespace => invalid(format!(
            "spec.secretRef.namespace: must be {namespace}, the VolumeSnapshotDelta's namespace, or omitted"
        )),
        _ => Ok(()),
    }
}

/// The failure for a failed call to the API server.
fn api_failure(doing: &str, error: &kube::Error) -> Failure {
    let failed = client::failure(ROLE, doing, error);
    let failure = Failure::new(Cause::ApiServer, failed.message);
    if failed.lacks_permission { failure } else { failure.after(Duration::from_secs(1)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_the_requested_limit_up_to_the_maximum() {
        for (requested, max, used) in
            [(0, 4096, 256), (0, 100, 100), (1, 4096, 1), (4097, 4096, 4096), (u64::MAX, 7, 7)]
        {
            assert_eq!(limit(requested, max), used, "{requested} of {max}");
        }
    }
}
