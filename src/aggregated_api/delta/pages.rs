//! Pages of drivers' endpoints, one call each, and a bound on the calls at once.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::find::{Found, unusable};
use super::metrics::Metrics;
use crate::aggregated_api::endpoint::{Endpoints, Trouble};
use crate::aggregated_api::failure::{Cause, Failure};
use crate::grpc::{MAX_MESSAGE, cut};
use crate::kubernetes::cbt_http::{Page, PageRequest, Problem, ProblemKind};
use crate::kubernetes::secret::Secrets;
use crate::kubernetes::snapshot_delta::GROUP;

/// Calls of endpoints at once. Each may bring an answer of some megabytes.
const AT_ONCE: usize = 32;
/// When to try again where nobody says it.
const PAUSE: Duration = Duration::from_secs(1);

/// Why there is no page.
#[derive(Debug)]
pub enum Refused {
    /// By the driver: this is the answer.
    Driver(String),
    Failure(Failure),
}

/// Cheap to clone.
#[derive(Clone)]
pub struct Pages {
    endpoints: Endpoints,
    calls: Arc<Semaphore>,
    metrics: Metrics,
}

impl Pages {
    pub fn new(endpoints: Endpoints, metrics: Metrics) -> Self {
        Self { endpoints, calls: Arc::new(Semaphore::new(AT_ONCE)), metrics }
    }

    pub async fn page(&self, found: Found, offset: u64, limit: u32) -> Result<Page, Refused> {
        let driver = &found.endpoint.driver;
        let Ok(_call) = self.calls.try_acquire() else {
            let message = "too many pages are asked of drivers at once; try again";
            return Err(Refused::Failure(Failure::new(Cause::TooMany, message).after(PAUSE)));
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
        let begun = Instant::now();
        let page = endpoint.page(&request).await;
        self.metrics.called(begun.elapsed());
        page.map_err(|trouble| told(driver, &request.secrets, trouble))
    }
}

/// What an endpoint's trouble is for the one who asked.
fn told(driver: &str, secrets: &Secrets, trouble: Trouble) -> Refused {
    let failure = |cause, what: &str| {
        let message = format!("the endpoint of the CSI driver {driver} {what}");
        Failure::new(cause, message).of(GROUP, "driverdiscoveries", driver)
    };
    Refused::Failure(match trouble {
        Trouble::Unreachable(why) => {
            failure(Cause::EndpointUnavailable, &format!("does not answer: {why}; try again"))
                .after(PAUSE)
        }
        Trouble::Untrue(why) => {
            let what = format!("does not answer as it should: {why}; the driver has to be mended");
            failure(Cause::EndpointUnavailable, &what)
        }
        Trouble::Busy => failure(Cause::TooMany, "is asked by too many; try again").after(PAUSE),
        Trouble::NoToken(why) => Failure::new(Cause::ApiServer, why.message),
        Trouble::Told { problem, after } => match said(&problem, secrets) {
            said if problem.kind == ProblemKind::Driver => return Refused::Driver(said),
            said => of_kind(problem.kind, &said, after.unwrap_or(PAUSE), failure),
        },
    })
}

fn of_kind(
    kind: ProblemKind,
    said: &str,
    after: Duration,
    failure: impl Fn(Cause, &str) -> Failure,
) -> Failure {
    match kind {
        ProblemKind::Unsupported => {
            failure(Cause::Unsupported, &format!("cannot tell changed blocks: {said}"))
        }
        ProblemKind::OtherDriver => {
            failure(Cause::DiscoveryUnusable, &format!("is that of another one: {said}"))
        }
        ProblemKind::TimedOut => {
            failure(Cause::TimedOut, &format!("took too long: {said}; ask for less, or try again"))
        }
        ProblemKind::Busy => failure(Cause::TooMany, &format!("is busy: {said}")).after(after),
        ProblemKind::Unavailable => {
            failure(Cause::EndpointUnavailable, &format!("cannot answer now: {said}")).after(after)
        }
        ProblemKind::NotAllowed => {
            let what = format!(
                "does not take calls of this server: {said}; the ClusterRole of the aggregated API server has to allow \
                 to create driverdiscoveries/deltas"
            );
            failure(Cause::EndpointUnavailable, &what)
        }
        // Of what this server has made, and nobody else.
        ProblemKind::Invalid | ProblemKind::Unauthenticated | ProblemKind::Driver => failure(
            Cause::EndpointUnavailable,
            &format!("does not take what this server sends: {said}"),
        ),
    }
}

/// The words of an endpoint, with nothing in them that is a secret, or none.
fn said(problem: &Problem, secrets: &Secrets) -> String {
    let text = match &problem.code {
        Some(code) => format!("{code}: {}", problem.message),
        None => problem.message.clone(),
    };
    let text = secrets.hide(&text).replace(char::is_control, " ");
    cut(&text, MAX_MESSAGE)
}
