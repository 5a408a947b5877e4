//! How many requests are answered: of one user, and in all. Who asks for more is told when to come again.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moka::future::Cache;
use tokio::time::Instant;

use crate::aggregated_api::failure::{Cause, Failure};
use crate::kubernetes::client::Rate;

/// Users that are remembered, at most, and for how long: by then a bucket of any sensible size is full again.
const USERS: u64 = 10_000;
const REMEMBERED: Duration = Duration::from_secs(600);
/// The longest pause that anybody is told.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Cheap to clone.
#[derive(Clone)]
pub struct Rates {
    each: Rate,
    users: Cache<String, Arc<Bucket>>,
    all: Arc<Bucket>,
}

/// A request costs a drop; so many drops come a second, and so many the bucket holds.
struct Bucket {
    rate: Rate,
    /// When it would be full again.
    full_at: Mutex<Instant>,
}

impl Rates {
    pub fn new(each: Rate, all: Rate) -> Self {
        let users = Cache::builder().max_capacity(USERS).time_to_idle(REMEMBERED).build();
        Self { each, users, all: Arc::new(Bucket::new(all)) }
    }

    /// Takes a request of the user.
    pub async fn admit(&self, user: &str) -> Result<(), Failure> {
        let make = async { Arc::new(Bucket::new(self.each)) };
        let own = self.users.get_with_by_ref(user, make).await;
        let now = Instant::now();
        // First their own: what one user may not have is nothing that others lose.
        own.take(now).map_err(|pause| too_many("of this user", pause))?;
        self.all.take(now).map_err(|pause| too_many("in all", pause))
    }
}

fn too_many(whose: &str, pause: Duration) -> Failure {
    let message = format!("too many requests for VolumeSnapshotDeltas {whose}; try again later");
    Failure::new(Cause::TooMany, message).after(pause.min(LONGEST_PAUSE))
}

impl Bucket {
    fn new(rate: Rate) -> Self {
        Self { rate, full_at: Mutex::new(Instant::now()) }
    }

    /// # Errors
    /// It is empty; for how long.
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
    async fn a_bucket_gives_its_burst_and_then_its_rate() {
        let bucket = Bucket::new(rate(10.0, 3));
        let now = Instant::now();
        let taken = |after| bucket.take(now + Duration::from_millis(after));
        assert!((0..3).all(|_| taken(0).is_ok()));
        assert_eq!(taken(0), Err(Duration::from_millis(100)));
        assert_eq!(taken(40), Err(Duration::from_millis(60)), "being refused costs nothing");
        assert!(taken(100).is_ok() && taken(150).is_err());
        assert!((0..3).all(|_| taken(60_000).is_ok()) && taken(60_000).is_err());
    }

    #[tokio::test]
    async fn one_user_who_asks_too_much_takes_nothing_from_others() {
        let rates = Rates::new(rate(0.001, 2), rate(0.001, 4));
        for _ in 0..2 {
            rates.admit("greedy").await.unwrap();
        }
        for _ in 0..10 {
            let refused = rates.admit("greedy").await.unwrap_err();
            assert!(refused.cause == Cause::TooMany && refused.message.contains("of this user"));
        }
        rates.admit("a").await.unwrap();
        rates.admit("b").await.unwrap();
        let refused = rates.admit("c").await.unwrap_err();
        assert!(refused.message.contains("in all"), "{refused}");
    }
}
