//! A page: by the driver's SnapshotMetadata service, else by its ListSnapshotDeltas.

use std::time::Duration;

use tokio::time::Instant;

use super::problem::{problem, unavailable};
use super::{listed, streamed};
use crate::kubernetes::cbt_http::{
    Capability, Info, MAX_LIMIT, Page, PageRequest, Problem, ProblemKind,
};
use crate::sidecar::driver_link::{Driver, DriverLink};

/// CSI "Size limits": bytes of a handle.
const MAX_HANDLE: usize = 128;
/// The driver is told a deadline a little behind the one that ends its call in any case: so it is known which of the two it was.
const BEHIND: Duration = Duration::from_secs(1);

/// A page that is asked for, and where from.
pub struct Asking<'a> {
    pub driver: &'a DriverLink,
    pub asked: &'a PageRequest,
    pub deadline: Instant,
}

impl Asking<'_> {
    /// How long the driver has.
    pub fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now()) + BEHIND
    }
}

/// What the driver is and can do.
pub fn info(driver: &DriverLink) -> Result<Info, Problem> {
    match &*driver.state().borrow() {
        Driver::Ready { name, capable, lists } => {
            let capability = match (capable, lists) {
                (true, _) => Capability::SnapshotMetadata,
                (false, true) => Capability::ListSnapshotDeltas,
                (false, false) => Capability::None,
            };
            Ok(Info { driver: name.clone(), capability })
        }
        Driver::Away(why) => {
            Err(unavailable(format!("the CSI driver is not ready: {why}; try again")))
        }
    }
}

/// Whether a request is one, and meant for this driver.
pub fn check(asked: &PageRequest, driver: &str) -> Result<(), Problem> {
    let invalid = |field: &str, words: String| {
        Err(problem(ProblemKind::Invalid, format!("{field}: {words}")))
    };
    if asked.driver != driver {
        let message = format!(
            "driver: this is the endpoint of {driver}, and another was asked for; see to its DriverDiscovery"
        );
        return Err(problem(ProblemKind::OtherDriver, message));
    }
    if asked.target_snapshot_id.is_empty() {
        return invalid("targetSnapshotId", "is empty; name a snapshot by its CSI handle".into());
    }
    for (field, id) in [
        ("baseSnapshotId", &asked.base_snapshot_id),
        ("targetSnapshotId", &asked.target_snapshot_id),
    ] {
        if id.len() > MAX_HANDLE {
            return invalid(
                field,
                format!("has more than {MAX_HANDLE} bytes, as no CSI handle has"),
            );
        }
    }
    if !(1..=MAX_LIMIT).contains(&asked.limit) {
        return invalid("limit", format!("must be from 1 to {MAX_LIMIT}"));
    }
    Ok(())
}

/// The page. Ends by itself only as far as the driver answers: whoever awaits it minds the time.
pub async fn page(asking: &Asking<'_>) -> Result<Page, Problem> {
    let state = asking.driver.state().borrow().clone();
    match state {
        Driver::Ready { capable: true, .. } => streamed::page(asking).await,
        Driver::Ready { lists: true, .. } => listed::page(asking).await,
        Driver::Ready { name, .. } => {
            let message = format!(
                "the CSI driver {name} has neither ListSnapshotDeltas nor the SnapshotMetadata service: its changed \
                 blocks cannot be told"
            );
            Err(problem(ProblemKind::Unsupported, message))
        }
        Driver::Away(why) => {
            Err(unavailable(format!("the CSI driver is not ready: {why}; try again")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_a_request_is_named() {
        let good = PageRequest {
            driver: "d".into(),
            base_snapshot_id: String::new(),
            target_snapshot_id: "t".into(),
            offset: u64::MAX,
            limit: 1,
            secrets: Default::default(),
        };
        assert_eq!(check(&good, "d"), Ok(()));
        assert_eq!(check(&PageRequest { limit: MAX_LIMIT, ..good.clone() }, "d"), Ok(()));
        let other = check(&good, "e").unwrap_err();
        assert_eq!(other.kind, ProblemKind::OtherDriver);
        let long = "x".repeat(129);
        for (bad, field) in [
            (
                PageRequest { target_snapshot_id: String::new(), ..good.clone() },
                "targetSnapshotId: ",
            ),
            (
                PageRequest { target_snapshot_id: long.clone(), ..good.clone() },
                "targetSnapshotId: ",
            ),
            (PageRequest { base_snapshot_id: long, ..good.clone() }, "baseSnapshotId: "),
            (PageRequest { limit: 0, ..good.clone() }, "limit: "),
            (PageRequest { limit: MAX_LIMIT + 1, ..good }, "limit: "),
        ] {
            let refused = check(&bad, "d").unwrap_err();
            assert_eq!(refused.kind, ProblemKind::Invalid);
            assert!(refused.message.starts_with(field), "{}", refused.message);
        }
    }
}
