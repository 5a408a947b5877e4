//! Checks a page request, and serves it from the driver's SnapshotMetadata service or
//! ListSnapshotDeltas.

use std::time::Duration;

use tokio::time::Instant;

use super::problem::{problem, unavailable};
use super::{listed, streamed};
use crate::sidecar::driver_link::{Driver, DriverLink};
use crate::sidecar::nodes::Remote;
use kubernetes::cbt_http::{Capability, Info, MAX_LIMIT, Page, PageRequest, Problem, ProblemKind};

/// Maximum bytes of a handle (CSI, "Size Limits").
const MAX_HANDLE: usize = 128;
/// A page request and its source.
pub struct PageCall<'a> {
    pub driver: &'a DriverLink,
    /// The drivers of many nodes, instead.
    pub remote: Option<&'a Remote>,
    pub request: &'a PageRequest,
    pub deadline: Instant,
}

impl PageCall<'_> {
    /// Timeout of a call to the driver.
    pub fn timeout(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
}

/// Name and capability of the driver.
pub fn info(driver: &DriverLink) -> Result<Info, Problem> {
    match &*driver.state().borrow() {
        Driver::Ready { name, capable, lists_deltas } => {
            let capability = match (capable, lists_deltas) {
                (true, _) => Capability::SnapshotMetadata,
                (false, true) => Capability::ListSnapshotDeltas,
                (false, false) => Capability::None,
            };
            Ok(Info { driver: name.clone(), capability })
        }
        Driver::NotReady(why) => {
            Err(unavailable(format!("the CSI driver is not ready: {why}; retry later")))
        }
    }
}

/// Validates a request for this driver.
pub fn check(request: &PageRequest, driver: &str) -> Result<(), Problem> {
    let invalid = |field: &str, words: String| {
        Err(problem(ProblemKind::Invalid, format!("{field}: {words}")))
    };
    if request.driver != driver {
        let message = format!(
            "driver: this is the endpoint of {driver}, not of the requested driver; correct the driver's DriverDiscovery"
        );
        return Err(problem(ProblemKind::OtherDriver, message));
    }
    if request.target_snapshot_id.is_empty() {
        return invalid(
            "targetSnapshotId",
            "is empty; set it to the CSI handle of a snapshot".into(),
        );
    }
    for (field, id) in [
        ("baseSnapshotId", &request.base_snapshot_id),
        ("targetSnapshotId", &request.target_snapshot_id),
    ] {
        if id.len() > MAX_HANDLE {
            return invalid(
                field,
                format!("is longer than {MAX_HANDLE} bytes, the limit of a CSI handle"),
            );
        }
    }
    if !(1..=MAX_LIMIT).contains(&request.limit) {
        return invalid("limit", format!("must be from 1 to {MAX_LIMIT}"));
    }
    Ok(())
}

/// Returns the page. The caller enforces the deadline: this future depends on the driver's
/// responses.
pub async fn page(call: &PageCall<'_>) -> Result<Page, Problem> {
    let state = call.driver.state().borrow().clone();
    match state {
        Driver::Ready { capable: true, .. } => streamed::page(call).await,
        Driver::Ready { lists_deltas: true, .. } => listed::page(call).await,
        Driver::Ready { name, .. } => {
            let message = format!(
                "the CSI driver {name} has neither ListSnapshotDeltas nor the SnapshotMetadata service, so its \
                 changed blocks cannot be reported"
            );
            Err(problem(ProblemKind::Unsupported, message))
        }
        Driver::NotReady(why) => {
            Err(unavailable(format!("the CSI driver is not ready: {why}; retry later")))
        }
    }
}
