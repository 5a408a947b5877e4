//! Pages of drivers' endpoints: kept for a short time, since who asks for the same again may have lost the answer only; one call for all who ask for
//! the same at once; and not more calls at once than this process can bear. With secrets each call is its own: what a driver tells for
//! them is for those who have them.

use std::sync::Arc;
use std::time::Duration;

use moka::future::Cache;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::find::{Found, unusable};
use super::metrics::Metrics;
use crate::aggregated_api::endpoint::{Endpoints, Trouble};
use crate::aggregated_api::failure::{Cause, Failure};
use crate::grpc::{MAX_MESSAGE, cut};
use crate::kubernetes::bound_snapshot::Snapshot;
use crate::kubernetes::cbt_http::{Page, PageRequest, Problem, ProblemKind};
use crate::kubernetes::secret::Secrets;
use crate::kubernetes::snapshot_delta::{ChangedBlock, GROUP};

/// How long a page is kept. A driver may forget what it could tell, or what it handed out may end.
const KEPT_FOR: Duration = Duration::from_secs(30);
/// Calls of endpoints at once. Each may bring an answer of some megabytes.
const AT_ONCE: usize = 32;
/// When to try again where nobody says it.
const PAUSE: Duration = Duration::from_secs(1);

/// What page: by what makes the snapshots what they are, and not by their names.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    driver: String,
    base: Option<(String, String)>,
    target: (String, String),
    offset: u64,
    limit: u32,
}

/// Why there is no page.
#[derive(Debug, Clone)]
pub enum Refused {
    /// By the driver: this is the answer.
    Driver(String),
    Failure(Failure),
}

/// Cheap to clone.
#[derive(Clone)]
pub struct Pages {
    endpoints: Endpoints,
    kept: Cache<Key, Arc<Page>>,
    calls: Arc<Semaphore>,
    metrics: Metrics,
}

impl Pages {
    /// With room for pages of so many bytes; 0: none is kept.
    pub fn new(endpoints: Endpoints, cache_bytes: u64, metrics: Metrics) -> Self {
        let kept = Cache::builder()
            .weigher(|key: &Key, page: &Arc<Page>| weight(key, page))
            .max_capacity(cache_bytes)
            .time_to_live(if cache_bytes == 0 { Duration::ZERO } else { KEPT_FOR })
            .build();
        Self { endpoints, kept, calls: Arc::new(Semaphore::new(AT_ONCE)), metrics }
    }

    pub async fn page(&self, found: Found, offset: u64, limit: u32) -> Result<Arc<Page>, Refused> {
        if !found.secrets.is_empty() {
            return self.ask(&found, offset, limit).await;
        }
        let key = Key {
            driver: found.endpoint.driver.clone(),
            base: found.base.as_ref().map(identity),
            target: identity(&found.target),
            offset,
            limit,
        };
        let asked = self.kept.entry(key).or_try_insert_with(self.ask(&found, offset, limit)).await;
        let entry = asked.map_err(Arc::unwrap_or_clone)?;
        if !entry.is_fresh() {
            self.metrics.cache_hit();
        }
        Ok(entry.into_value())
    }

    async fn ask(&self, found: &Found, offset: u64, limit: u32) -> Result<Arc<Page>, Refused> {
        let driver = &found.endpoint.driver;
        let Ok(_call) = self.calls.try_acquire() else {
            let message = "too many pages are asked of drivers at once; try again";
            return Err(Refused::Failure(Failure::new(Cause::TooMany, message).after(PAUSE)));
        };
        let endpoint = self.endpoints.at(&found.endpoint).await;
        let endpoint = endpoint.map_err(|wrong| Refused::Failure(unusable(driver, &wrong)))?;
        let request = PageRequest {
            driver: driver.clone(),
            base_snapshot_id: found.base.as_ref().map(|it| it.handle.clone()).unwrap_or_default(),
            target_snapshot_id: found.target.handle.clone(),
            offset,
            limit,
            secrets: found.secrets.clone(),
        };
        let begun = Instant::now();
        let page = endpoint.page(&request).await;
        self.metrics.called(begun.elapsed());
        page.map(Arc::new).map_err(|trouble| told(driver, &found.secrets, trouble))
    }
}

fn identity(snapshot: &Snapshot) -> (String, String) {
    (snapshot.content.metadata.uid.clone().unwrap_or_default(), snapshot.handle.clone())
}

/// Bytes, about.
fn weight(key: &Key, page: &Page) -> u32 {
    let texts = |(uid, handle): &(String, String)| uid.len() + handle.len();
    let tokens = page.changed_blocks.iter().filter_map(|block| block.data_token.as_ref());
    let tokens: usize =
        tokens.map(|token| token.token.len() + token.issuance_time.len() + token.ttl.len()).sum();
    let bytes = size_of::<Key>()
        + size_of::<Page>()
        + key.driver.len()
        + key.base.as_ref().map_or(0, texts)
        + texts(&key.target)
        + page.changed_blocks.len() * size_of::<ChangedBlock>()
        + tokens;
    u32::try_from(bytes).unwrap_or(u32::MAX)
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
