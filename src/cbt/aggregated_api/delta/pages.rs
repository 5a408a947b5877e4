//! Requests pages from drivers' endpoints, one call each, with limited concurrency.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::find::{Found, unusable};
use super::metrics::Metrics;
use crate::aggregated_api::endpoint::{EndpointError, Endpoints};
use crate::aggregated_api::failure::{Cause, Failure};
use common::text::{MAX_MESSAGE, truncate};
use kubernetes::cbt_http::{Page, PageRequest, Problem, ProblemKind};
use kubernetes::secret::Secrets;
use kubernetes::snapshot_delta::GROUP;

/// Maximum number of concurrent calls. Each response may have some megabytes.
const MAX_CALLS: usize = 32;
/// Default delay of a retry.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Why no page is returned.
#[derive(Debug)]
pub enum Refused {
    /// The driver refused the request; the status has its error.
    Driver(String),
    Failure(Failure),
}

/// Requests pages. Clones share the limit.
#[derive(Clone)]
pub struct Pages {
    endpoints: Endpoints,
    calls: Arc<Semaphore>,
    metrics: Metrics,
}

impl Pages {
    pub fn new(endpoints: Endpoints, metrics: Metrics) -> Self {
        Self { endpoints, calls: Arc::new(Semaphore::new(MAX_CALLS)), metrics }
    }

    pub async fn page(&self, found: Found, offset: u64, limit: u32) -> Result<Page, Refused> {
        let driver = &found.endpoint.driver;
        let Ok(_call) = self.calls.try_acquire() else {
            let message = "too many concurrent requests to drivers; retry";
            return Err(Refused::Failure(Failure::new(Cause::TooMany, message).after(RETRY_DELAY)));
        };
        let endpoint = self.endpoints.at(&found.endpoint).await;
        let endpoint = endpoint.map_err(|wrong| Refused::Failure(unusable(driver, &wrong)))?;
        let request = PageRequest {
            driver: driver.clone(),
            base_snapshot_id: found.base.map(|it| it.handle).unwrap_or_default(),
            target_snapshot_id: found.target.handle,
            offset,
            limit,
            secrets: found.secrets,
        };
        let started = Instant::now();
        let page = endpoint.page(&request).await;
        self.metrics.called(started.elapsed());
        page.map_err(|error| refusal(driver, &request.secrets, error))
    }
}

/// Maps an endpoint's error for the user.
fn refusal(driver: &str, secrets: &Secrets, error: EndpointError) -> Refused {
    let failure = |cause, what: &str| {
        let message = format!("the endpoint of the CSI driver {driver} {what}");
        Failure::new(cause, message).of(GROUP, "driverdiscoveries", driver)
    };
    Refused::Failure(match error {
        EndpointError::Unreachable(why) => {
            failure(Cause::EndpointUnavailable, &format!("cannot be reached: {why}; retry"))
                .after(RETRY_DELAY)
        }
        EndpointError::Invalid(why) => {
            let what = format!(
                "returned an invalid response: {why}; report the error to the driver's maintainers"
            );
            failure(Cause::EndpointUnavailable, &what)
        }
        EndpointError::Busy => {
            failure(Cause::TooMany, "has too many concurrent requests; retry").after(RETRY_DELAY)
        }
        EndpointError::NoToken(why) => Failure::new(Cause::ApiServer, why.message),
        EndpointError::Problem { problem, after } => match sanitized(&problem, secrets) {
            text if problem.kind == ProblemKind::Driver => return Refused::Driver(text),
            text => of_kind(problem.kind, &text, after.unwrap_or(RETRY_DELAY), failure),
        },
    })
}

fn of_kind(
    kind: ProblemKind,
    text: &str,
    after: Duration,
    failure: impl Fn(Cause, &str) -> Failure,
) -> Failure {
    match kind {
        ProblemKind::Unsupported => {
            failure(Cause::Unsupported, &format!("cannot report changed blocks: {text}"))
        }
        ProblemKind::OtherDriver => {
            failure(Cause::DiscoveryUnusable, &format!("belongs to another driver: {text}"))
        }
        ProblemKind::TimedOut => {
            failure(Cause::TimedOut, &format!("timed out: {text}; reduce spec.limit, or retry"))
        }
        ProblemKind::Busy => failure(Cause::TooMany, &format!("is busy: {text}")).after(after),
        ProblemKind::Unavailable => {
            failure(Cause::EndpointUnavailable, &format!("is not available: {text}")).after(after)
        }
        ProblemKind::NotAllowed => {
            let what = format!(
                "refuses calls of this server: {text}; grant the aggregated API server's ClusterRole the permission to \
                 create driverdiscoveries/deltas"
            );
            failure(Cause::EndpointUnavailable, &what)
        }
        // Errors in requests of this server itself.
        ProblemKind::Invalid | ProblemKind::Unauthenticated | ProblemKind::Driver => {
            failure(Cause::EndpointUnavailable, &format!("rejects this server's requests: {text}"))
        }
    }
}

/// The endpoint's message without secrets and control characters.
fn sanitized(problem: &Problem, secrets: &Secrets) -> String {
    let text = match &problem.code {
        Some(code) => format!("{code}: {}", problem.message),
        None => problem.message.clone(),
    };
    let text = secrets.hide(&text).replace(char::is_control, " ");
    truncate(&text, MAX_MESSAGE)
}
