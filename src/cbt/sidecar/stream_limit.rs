//! Shares the response streams fairly among users and namespaces, and those of a namespace among its
//! users. When all streams are in use, a caller with fewer streams than another gets one of the
//! other's: the oldest one ends.

use std::collections::{BTreeMap, HashMap};
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::refusal::{Reason, Refusal};

/// The limit of response streams. Clones share it.
#[derive(Debug, Clone)]
pub struct StreamLimit {
    most: usize,
    streams: Arc<Mutex<Streams>>,
}

#[derive(Debug, Default)]
struct Streams {
    next: u64,
    /// By age.
    open: BTreeMap<u64, Holder>,
}

#[derive(Debug)]
struct Holder {
    user: String,
    namespace: String,
    revoked: watch::Sender<bool>,
}

/// A response stream, until it is dropped or revoked.
#[derive(Debug)]
pub struct StreamPermit {
    number: u64,
    revoked: watch::Receiver<bool>,
    streams: Arc<Mutex<Streams>>,
}

impl StreamLimit {
    pub fn new(most: usize) -> Self {
        Self { most, streams: Arc::default() }
    }

    /// A permit for one more stream. If all are in use, the oldest stream of the user or namespace
    /// with the most ends, if that is more than this user and namespace then have; or else the
    /// oldest stream of the user with the most in this namespace, under the same condition.
    ///
    /// # Errors
    /// All streams are in use, and none may end.
    pub fn acquire(&self, user: &str, namespace: &str) -> Result<StreamPermit, Refusal> {
        let mut streams = lock(&self.streams);
        if streams.open.len() >= self.most {
            streams.end_one(user, namespace)?;
        }
        let number = streams.next;
        streams.next += 1;
        let (sender, revoked) = watch::channel(false);
        let holder =
            Holder { user: user.to_owned(), namespace: namespace.to_owned(), revoked: sender };
        streams.open.insert(number, holder);
        Ok(StreamPermit { number, revoked, streams: self.streams.clone() })
    }
}

impl Streams {
    fn end_one(&mut self, user: &str, namespace: &str) -> Result<(), Refusal> {
        let victim = self.of_the_greediest(user, namespace);
        let victim = victim.or_else(|| self.of_the_greediest_in(namespace, user));
        let Some(holder) = victim.and_then(|number| self.open.remove(&number)) else {
            return Err(super::service::too_many("streams"));
        };
        holder.revoked.send_replace(true);
        Ok(())
    }

    /// The oldest stream of the user or namespace with the most, if that is more than this user and
    /// namespace have with one more.
    fn of_the_greediest(&self, user: &str, namespace: &str) -> Option<u64> {
        let (mut users, mut namespaces) = (HashMap::new(), HashMap::new());
        for holder in self.open.values() {
            *users.entry(&*holder.user).or_insert(0_usize) += 1;
            *namespaces.entry(&*holder.namespace).or_insert(0_usize) += 1;
        }
        let load = |user: &str, namespace: &str| {
            let user = users.get(user).copied().unwrap_or(0);
            user.max(namespaces.get(namespace).copied().unwrap_or(0))
        };
        let own = load(user, namespace) + 1;
        let loads =
            self.open.iter().map(|(number, one)| (load(&one.user, &one.namespace), *number));
        oldest_of_most(loads, own)
    }

    /// The same among the users of a namespace, whose number of streams does not change.
    fn of_the_greediest_in(&self, namespace: &str, user: &str) -> Option<u64> {
        let within = || self.open.iter().filter(|(_, one)| one.namespace == namespace);
        let mut users = HashMap::new();
        for (_, holder) in within() {
            *users.entry(&*holder.user).or_insert(0_usize) += 1;
        }
        let load = |user: &str| users.get(user).copied().unwrap_or(0);
        let loads = within().map(|(number, one)| (load(&one.user), *number));
        oldest_of_most(loads, load(user) + 1)
    }
}

/// Of the streams with the highest load, the oldest, if the load is higher than the caller's.
fn oldest_of_most(loads: impl Iterator<Item = (usize, u64)>, own: usize) -> Option<u64> {
    let (most, oldest) = loads.max_by_key(|&(load, number)| (load, u64::MAX - number))?;
    (most > own).then_some(oldest)
}

impl StreamPermit {
    /// Completes when another caller needs the stream.
    pub fn revoked(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut revoked = self.revoked.clone();
        async move {
            if revoked.wait_for(|revoked| *revoked).await.is_err() {
                // The permit was dropped.
                pending().await
            }
        }
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        lock(&self.streams).open.remove(&self.number);
    }
}

/// The refusal of the rest of a stream that was revoked.
pub fn ended_for_others() -> Refusal {
    let message = "all response streams are in use and this user or namespace had the most; resume at starting_offset, \
                   or increase --max-streams";
    Refusal::new(Reason::TooMany, message)
}

fn lock(streams: &Mutex<Streams>) -> MutexGuard<'_, Streams> {
    streams.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn revoked(permits: &[StreamPermit]) -> Vec<usize> {
        (0..permits.len()).filter(|&one| *permits[one].revoked.borrow()).collect()
    }

    #[test]
    fn another_user_gets_the_oldest_stream_of_the_greediest() {
        let limit = StreamLimit::new(4);
        let greedy: Vec<_> =
            (0..4).map(|one| limit.acquire("greedy", &format!("n{one}")).unwrap()).collect();
        assert!(limit.acquire("greedy", "n9").is_err(), "a user never ends its own streams");
        let first = limit.acquire("modest", "m").unwrap();
        assert_eq!(revoked(&greedy), [0]);
        let second = limit.acquire("modest", "m").unwrap();
        assert_eq!(revoked(&greedy), [0, 1]);
        let third = limit.acquire("modest", "m").err();
        assert_eq!(third.unwrap().reason, Reason::TooMany, "2 and 2 would become 1 and 3");
        assert_eq!(revoked(&greedy), [0, 1]);
        drop((first, second, greedy));
        assert!(lock(&limit.streams).open.is_empty());
    }

    #[test]
    fn users_of_one_namespace_count_together() {
        let limit = StreamLimit::new(4);
        let greedy: Vec<_> =
            (0..4).map(|one| limit.acquire(&format!("user{one}"), "greedy").unwrap()).collect();
        assert!(limit.acquire("user9", "greedy").is_err());
        limit.acquire("modest", "m").unwrap();
        assert_eq!(revoked(&greedy), [0]);
    }

    #[test]
    fn the_users_of_a_namespace_share_its_streams() {
        let limit = StreamLimit::new(4);
        let eve: Vec<_> = (0..4).map(|_| limit.acquire("eve", "shop").unwrap()).collect();
        let alice = limit.acquire("alice", "shop").unwrap();
        let operator = limit.acquire("operator", "shop").unwrap();
        assert_eq!(revoked(&eve), [0, 1]);
        assert!(limit.acquire("alice", "shop").is_err(), "2 and 1 would become 1 and 2");
        assert!(limit.acquire("eve", "shop").is_err());
        // Many users in a namespace take nothing from another namespace.
        drop(eve);
        let _other = [limit.acquire("o", "other").unwrap(), limit.acquire("o", "other").unwrap()];
        for user in ["bob", "carol", "dave"] {
            assert!(limit.acquire(user, "shop").is_err(), "{user}");
        }
        drop((alice, operator));
    }

    #[test]
    fn streams_are_refused_while_all_have_the_same() {
        let limit = StreamLimit::new(2);
        let streams: Vec<_> = (0..2)
            .map(|one| limit.acquire(&format!("u{one}"), &format!("n{one}")).unwrap())
            .collect();
        assert!(limit.acquire("u2", "n2").is_err());
        drop(streams);
        limit.acquire("u2", "n2").unwrap();
    }
}
