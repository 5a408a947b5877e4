//! How a VolumeSnapshotDelta is answered. In this order: what is asked has to make sense, there is a rate, the user has to have the rights,
//! names become handles, and the driver's endpoint is asked for one page. All of it has one deadline.

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
use super::WHO;
use super::endpoint::Endpoints;
use super::failure::{Cause, Failure};
use crate::kubernetes::cbt_http::{self, Page};
use crate::kubernetes::client::{self, Rate};
use crate::kubernetes::name;
use crate::kubernetes::review::Reviewer;
use crate::kubernetes::snapshot_delta::{
    API_VERSION, DEFAULT_LIMIT, KIND, VolumeSnapshotDelta, VolumeSnapshotDeltaSpec,
    VolumeSnapshotDeltaState, VolumeSnapshotDeltaStatus,
};
use crate::telemetry::shutdown::Shutdown;

/// How long an answer may take. The API server gives up after a minute.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// What answering needs.
pub struct Settings {
    /// For objects: VolumeSnapshots, their contents, DriverDiscoveries, Secrets.
    pub client: Client,
    /// For SubjectAccessReviews, at a rate of its own.
    pub reviews: Client,
    /// How long a right that was granted may be remembered.
    pub review_ttl: Duration,
    pub endpoints: Endpoints,
    /// Entries of a page, at most; not above [`cbt_http::MAX_LIMIT`].
    pub max_limit: u32,
    /// Requests of one user, and in all.
    pub user_rate: Rate,
    pub rate: Rate,
    /// See [`TIMEOUT`].
    pub timeout: Duration,
    pub metrics: Metrics,
    pub shutdown: Shutdown,
}

/// Answers. Cheap to clone.
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
    /// Begins to watch what answers are made of.
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

    /// Whether all watches run. Without them answers take longer, and there are some.
    pub fn is_live(&self) -> bool {
        self.finder.is_live()
    }

    /// Answers what `user` asks in `namespace`: the object with its status.
    ///
    /// # Errors
    /// Whatever fails before the driver. What the driver says is an answer of state Failed.
    pub async fn create(
        &self,
        user: &UserInfo,
        namespace: &str,
        asked: VolumeSnapshotDelta,
    ) -> Result<VolumeSnapshotDelta, Failure> {
        let answer = tokio::select! {
            answered = timeout(self.timeout, self.answer(user, namespace, asked)) => {
                answered.unwrap_or_else(|_| Err(self.timed_out()))
            }
            () = self.shutdown.ending() => {
                let message = "this replica of the aggregated API server ends; try again";
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
        asked: VolumeSnapshotDelta,
    ) -> Result<VolumeSnapshotDelta, Failure> {
        check(namespace, &asked.spec)?;
        self.rates.admit(user.username.as_deref().unwrap_or_default()).await?;
        rights::check(&self.reviewer, user, namespace, &asked.spec).await?;
        let found = self.finder.find(namespace, &asked.spec).await?;
        let (offset, limit) = (asked.spec.offset, limit(asked.spec.limit, self.max_limit));
        let status = match self.pages.page(found, offset, limit).await {
            Ok(page) => answered(page),
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
            ..asked
        })
    }

    fn timed_out(&self) -> Failure {
        let seconds = self.timeout.as_secs_f64();
        let message = format!(
            "there was no answer within {seconds} s; try again, or ask for less by spec.limit"
        );
        Failure::new(Cause::TimedOut, message)
    }
}

/// Entries of the page.
fn limit(asked: u64, max: u32) -> u32 {
    let asked = if asked == 0 { DEFAULT_LIMIT } else { asked };
    u32::try_from(asked).map_or(max, |asked| asked.min(max))
}

fn answered(page: Page) -> VolumeSnapshotDeltaStatus {
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

/// Names become parts of URLs at the API server: none that cannot be one is taken.
fn check(namespace: &str, spec: &VolumeSnapshotDeltaSpec) -> Result<(), Failure> {
    let invalid = |message: String| Err(Failure::new(Cause::Invalid, message));
    if !name::is_namespace(namespace) {
        return invalid("metadata.namespace: is not the name of a namespace".into());
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
            return invalid(format!("{field}: is not a name in Kubernetes; correct it"));
        }
    }
    let of_secret = spec.secret_ref.as_ref().and_then(|secret| secret.namespace.as_deref());
    match of_secret {
        Some(other) if !other.is_empty() && other != namespace => invalid(format!(
            "spec.secretRef.namespace: must be {namespace}, that of the VolumeSnapshotDelta, or left out"
        )),
        _ => Ok(()),
    }
}

/// A call to the API server that failed.
fn api_failure(doing: &str, error: &kube::Error) -> Failure {
    let told = client::failure(WHO, doing, error);
    let failure = Failure::new(Cause::ApiServer, told.message);
    if told.is_own_right { failure } else { failure.after(Duration::from_secs(1)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::snapshot_delta::SecretReference;

    #[test]
    fn a_page_has_256_entries_or_as_many_as_asked_for_up_to_the_maximum() {
        for (asked, max, used) in
            [(0, 4096, 256), (0, 100, 100), (1, 4096, 1), (4097, 4096, 4096), (u64::MAX, 7, 7)]
        {
            assert_eq!(limit(asked, max), used, "{asked} of {max}");
        }
    }

    #[test]
    fn what_is_no_name_is_refused_by_the_name_of_its_field() {
        let spec = |base: &str, target: &str, secret: Option<(&str, Option<&str>)>| {
            let secret_ref = secret.map(|(name, namespace)| SecretReference {
                name: name.into(),
                namespace: namespace.map(Into::into),
            });
            VolumeSnapshotDeltaSpec {
                base_volume_snapshot_name: base.into(),
                target_volume_snapshot_name: target.into(),
                secret_ref,
                ..VolumeSnapshotDeltaSpec::default()
            }
        };
        for good in [
            spec("", "t", None),
            spec("b", "t", Some(("s", None))),
            spec("b", "t", Some(("s", Some("")))),
            spec("b", "t", Some(("s", Some("ns")))),
        ] {
            assert_eq!(check("ns", &good), Ok(()));
        }
        for (bad, field) in [
            (spec("", "", None), "spec.targetVolumeSnapshotName: is required"),
            (spec("", "../t", None), "spec.targetVolumeSnapshotName"),
            (spec("B", "t", None), "spec.baseVolumeSnapshotName"),
            (spec("", "t", Some(("", None))), "spec.secretRef.name: is required"),
            (spec("", "t", Some(("a/b", None))), "spec.secretRef.name"),
            (spec("", "t", Some(("s", Some("other")))), "spec.secretRef.namespace"),
        ] {
            let refused = check("ns", &bad).unwrap_err();
            assert!(refused.message.starts_with(field), "{refused}");
            assert_eq!(refused.cause, Cause::Invalid);
        }
        assert!(check("a.b", &spec("", "t", None)).is_err());
    }
}
