//! Rate limits of one user and of all users. A refusal states when to retry.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::aggregated_api::failure::{Cause, Failure};
use kubernetes::client::Rate;
use telemetry::memo::{Keep, Memo};

/// Maximum number of users with a bucket, and time to keep an idle bucket, in which any sensible
/// bucket fills up.
const USERS: u64 = 10_000;
const IDLE_TTL: Duration = Duration::from_secs(600);
/// Maximum Retry-After.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Clones share the buckets.
#[derive(Clone)]
pub struct Rates {
    each: Rate,
    users: Memo<String, Arc<Bucket>>,
    all: Arc<Bucket>,
}

/// A token bucket: a request takes one token; the rate adds tokens up to the burst.
struct Bucket {
    rate: Rate,
    /// When the bucket is full again.
    full_at: Mutex<Instant>,
}

impl Rates {
    pub fn new(each: Rate, all: Rate) -> Self {
        let users = Memo::new(USERS, Keep::Unused(IDLE_TTL));
        Self { each, users, all: Arc::new(Bucket::new(all)) }
    }

    /// Admits a request of the user, or refuses it.
    pub fn admit(&self, user: &str) -> Result<(), Failure> {
        let own = self.users.get_or_insert_with(user, || Arc::new(Bucket::new(self.each)));
        let now = Instant::now();
        // The user's bucket first, so that refused requests take nothing from other users.
        own.take(now).map_err(|pause| too_many("of this user", pause))?;
        self.all.take(now).map_err(|pause| too_many("in all", pause))
    }
}

fn too_many(scope: &str, pause: Duration) -> Failure {
    let message = format!("too many requests for VolumeSnapshotDeltas {scope}; retry later");
    Failure::new(Cause::TooMany, message).after(pause.min(LONGEST_PAUSE))
}

impl Bucket {
    fn new(rate: Rate) -> Self {
        Self { rate, full_at: Mutex::new(Instant::now()) }
    }

    /// # Errors
    /// The bucket is empty; until when.
    fn take(&self, now: Instant) -> Result<(), Duration> {
        let each = Duration::from_secs_f64(1.0 / self.rate.per_second);
        let mut full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        let from = (*full_at).max(now);
        let missing = from - now;
        let holds = each * self.rate.burst.saturating_sub(1);
        if missing > holds {
            return Err(missing - holds);
        }
        *full_at = from + each;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(per_second: f64, burst: u32) -> Rate {
        Rate { per_second, burst }
    }

    #[tokio::test]
    async fn a_bucket_allows_its_burst_and_then_its_rate() {
        let bucket = Bucket::new(rate(10.0, 3));
        let now = Instant::now();
        let taken = |after| bucket.take(now + Duration::from_millis(after));
        assert!((0..3).all(|_| taken(0).is_ok()));
        assert_eq!(taken(0), Err(Duration::from_millis(100)));
        assert_eq!(taken(40), Err(Duration::from_millis(60)), "a refusal takes no token");
        assert!(taken(100).is_ok() && taken(150).is_err());
        assert!((0..3).all(|_| taken(60_000).is_ok()) && taken(60_000).is_err());
    }

    #[tokio::test]
    async fn refused_requests_take_nothing_from_other_users() {
        let rates = Rates::new(rate(0.001, 2), rate(0.001, 4));
        for _ in 0..2 {
            rates.admit("greedy").unwrap();
        }
        for _ in 0..10 {
            let refused = rates.admit("greedy").unwrap_err();
            assert!(refused.cause == Cause::TooMany && refused.message.contains("of this user"));
        }
        rates.admit("a").unwrap();
        rates.admit("b").unwrap();
        let refused = rates.admit("c").unwrap_err();
        assert!(refused.message.contains("in all"), "{refused}");
    }
}
