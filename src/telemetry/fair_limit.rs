//! A limit that peers share fairly. A new share is never refused: when the limit is exceeded, the
//! peer that holds the most in the group that holds the most loses a share, first one that is not
//! in use, and the oldest of those.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::Hash;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

/// The revoked shares of this process, by limit.
static REVOKED: LazyLock<Family<Labels, Counter>> = LazyLock::new(Family::default);

/// Who holds shares.
pub trait Holder: Clone + Eq + Hash {
    /// The group in which this holder shares with others.
    fn group(&self) -> Self {
        self.clone()
    }
}

impl Holder for String {}
impl Holder for &'static str {}

/// What a limit limits, for its metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Labels {
    pub listener: &'static str,
    pub share: &'static str,
}

/// The metric of revoked shares, for the start of a scrape.
///
/// # Errors
/// It cannot be encoded.
pub fn scrape() -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("csi_loopback");
    registry.register(
        "shares_revoked",
        "Handshakes, connections and messages that were ended to make room for other clients",
        Family::clone(&REVOKED),
    );
    let mut metric = String::new();
    text::encode_registry(&mut metric, &registry)?;
    Ok(metric)
}

/// A limit of connections, bytes or other units. Clones share it.
#[derive(Debug)]
pub struct FairLimit<P> {
    state: Arc<Mutex<State<P>>>,
}

#[derive(Debug)]
struct State<P> {
    capacity: usize,
    revoked: Counter,
    used: usize,
    next: u64,
    peers: HashMap<P, Peer>,
}

/// The shares of one peer, by age.
#[derive(Debug, Default)]
struct Peer {
    used: usize,
    shares: BTreeMap<u64, Held>,
}

#[derive(Debug)]
struct Held {
    amount: usize,
    in_use: bool,
    revoked: watch::Sender<bool>,
}

/// A peer's part of the limit, until it is dropped or revoked.
#[derive(Debug)]
pub struct Share<P: Eq + Hash> {
    peer: P,
    number: u64,
    revoked: watch::Receiver<bool>,
    state: Arc<Mutex<State<P>>>,
}

impl<P> Clone for FairLimit<P> {
    fn clone(&self) -> Self {
        Self { state: self.state.clone() }
    }
}

impl<P: Holder> FairLimit<P> {
    pub fn new(labels: Labels, capacity: usize) -> Self {
        let revoked = REVOKED.get_or_create(&labels).clone();
        let state = State { capacity, revoked, used: 0, next: 0, peers: HashMap::new() };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Takes a share of this amount. Shares are revoked until the limit is met again; the new share
    /// is revoked only if its peer holds the most and uses all of its other shares.
    pub fn take(&self, peer: P, amount: usize) -> Share<P> {
        let (sender, revoked) = watch::channel(false);
        let mut state = lock(&self.state);
        let number = state.next;
        state.next += 1;
        state.used += amount;
        let shares = state.peers.entry(peer.clone()).or_default();
        shares.used += amount;
        shares.shares.insert(number, Held { amount, in_use: false, revoked: sender });
        state.meet();
        drop(state);
        Share { peer, number, revoked, state: self.state.clone() }
    }
}

impl<P: Holder> State<P> {
    /// Revokes shares until the limit is met.
    fn meet(&mut self) {
        while self.used > self.capacity && self.revoke_one() {
            self.revoked.inc();
        }
    }

    /// Revokes a share of the peer that holds the most. Returns whether there was one.
    fn revoke_one(&mut self) -> bool {
        let mut groups: HashMap<P, usize> = HashMap::new();
        for (name, peer) in &self.peers {
            *groups.entry(name.group()).or_default() += peer.used;
        }
        let of_group = |name: &P| groups.get(&name.group()).copied().unwrap_or_default();
        let most = self.peers.iter().max_by_key(|(name, peer)| (of_group(name), peer.used));
        let Some((name, peer)) = most.map(|(name, peer)| (name.clone(), peer)) else {
            return false;
        };
        let idle = peer.shares.iter().find(|(_, held)| !held.in_use);
        let Some(number) = idle.or_else(|| peer.shares.first_key_value()).map(|(key, _)| *key)
        else {
            return false;
        };
        if let Some(held) = self.remove(&name, number) {
            held.revoked.send_replace(true);
        }
        true
    }
}

impl<P: Eq + Hash> State<P> {
    fn remove(&mut self, name: &P, number: u64) -> Option<Held> {
        let peer = self.peers.get_mut(name)?;
        let held = peer.shares.remove(&number)?;
        peer.used -= held.amount;
        self.used -= held.amount;
        if peer.shares.is_empty() {
            self.peers.remove(name);
        }
        Some(held)
    }
}

impl<P: Holder> Share<P> {
    /// Adds to the share. It may be revoked for it, like another.
    pub fn grow(&self, amount: usize) {
        let mut state = lock(&self.state);
        let Some(peer) = state.peers.get_mut(&self.peer) else { return };
        let Some(held) = peer.shares.get_mut(&self.number) else { return };
        held.amount += amount;
        peer.used += amount;
        state.used += amount;
        state.meet();
    }
}

impl<P: Eq + Hash> Share<P> {
    /// Returns what the share does not need.
    pub fn shrink(&self, amount: usize) {
        let mut state = lock(&self.state);
        let Some(peer) = state.peers.get_mut(&self.peer) else { return };
        let Some(held) = peer.shares.get_mut(&self.number) else { return };
        let returned = held.amount.saturating_sub(amount);
        held.amount -= returned;
        peer.used -= returned;
        state.used -= returned;
    }

    /// Marks the share as in use or idle.
    pub fn set_in_use(&self, in_use: bool) {
        let mut state = lock(&self.state);
        let peer = state.peers.get_mut(&self.peer);
        if let Some(held) = peer.and_then(|peer| peer.shares.get_mut(&self.number)) {
            held.in_use = in_use;
        }
    }

    /// Waits until the share is revoked. Its holder must then release what it stands for.
    pub async fn revoked(&self) {
        let mut revoked = self.revoked.clone();
        // The sender is dropped only after it reported the revocation.
        let _ = revoked.wait_for(|revoked| *revoked).await;
    }
}

impl<P: Eq + Hash> Drop for Share<P> {
    fn drop(&mut self) {
        lock(&self.state).remove(&self.peer, self.number);
    }
}

fn lock<P>(state: &Mutex<State<P>>) -> MutexGuard<'_, State<P>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(capacity: usize) -> FairLimit<&'static str> {
        FairLimit::new(Labels { listener: "test", share: "share" }, capacity)
    }

    fn is_revoked<P: Eq + Hash>(share: &Share<P>) -> bool {
        *share.revoked.borrow()
    }

    fn revoked<P: Eq + Hash>(shares: &[Share<P>]) -> Vec<usize> {
        (0..shares.len()).filter(|&one| is_revoked(&shares[one])).collect()
    }

    #[test]
    fn the_peer_with_the_most_loses_its_oldest_share() {
        let limit = limit(4);
        let greedy: Vec<_> = (0..4).map(|_| limit.take("greedy", 1)).collect();
        let modest = limit.take("modest", 1);
        assert_eq!(revoked(&greedy), [0]);
        let more = limit.take("greedy", 1);
        assert_eq!(revoked(&greedy), [0, 1]);
        assert!(!is_revoked(&modest) && !is_revoked(&more));
    }

    #[test]
    fn the_group_with_the_most_loses_first() {
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        struct Host(&'static str, u32);
        impl Holder for Host {
            fn group(&self) -> Self {
                Self(self.0, 0)
            }
        }
        let limit = FairLimit::new(Labels { listener: "test", share: "share" }, 6);
        // Many hosts of a network with one share each, and a single host with two.
        let many: Vec<_> = (0..4).map(|host| limit.take(Host("many", host), 1)).collect();
        let two: Vec<_> = (0..2).map(|_| limit.take(Host("two", 0), 1)).collect();
        let _one = limit.take(Host("one", 0), 1);
        assert_eq!((revoked(&many).len(), revoked(&two).len()), (1, 0));
        // Within a network, the host with the most.
        drop(two);
        let greedy = limit.take(Host("many", 9), 2);
        let _other = limit.take(Host("one", 1), 1);
        assert!(is_revoked(&greedy) && revoked(&many).len() == 1);
    }

    #[test]
    fn idle_shares_are_revoked_before_shares_in_use() {
        let limit = limit(3);
        let shares: Vec<_> = (0..3).map(|_| limit.take("peer", 1)).collect();
        shares[0].set_in_use(true);
        let _fourth = limit.take("peer", 1);
        assert_eq!(revoked(&shares), [1]);
        shares[0].set_in_use(false);
        let _fifth = limit.take("peer", 1);
        assert_eq!(revoked(&shares), [0, 1]);
    }

    #[test]
    fn a_peer_that_uses_all_its_shares_loses_the_new_one() {
        let limit = limit(2);
        let shares: Vec<_> = (0..2).map(|_| limit.take("peer", 1)).collect();
        shares.iter().for_each(|share| share.set_in_use(true));
        assert!(is_revoked(&limit.take("peer", 1)));
        assert_eq!(revoked(&shares), [0; 0]);
        let other = limit.take("other", 1);
        assert!(!is_revoked(&other));
        assert_eq!(revoked(&shares), [0]);
    }

    #[test]
    fn a_large_share_revokes_as_many_as_it_needs() {
        let limit = limit(10);
        let small: Vec<_> = (0..10).map(|_| limit.take("greedy", 1)).collect();
        let large = limit.take("modest", 4);
        assert_eq!(revoked(&small), [0, 1, 2, 3]);
        assert!(!is_revoked(&large));
    }

    #[test]
    fn a_share_that_shrinks_makes_room() {
        let limit = limit(10);
        let large = limit.take("peer", 9);
        large.shrink(20);
        large.shrink(2);
        let other = limit.take("peer", 8);
        assert!(!is_revoked(&large) && !is_revoked(&other));
        drop((large, other));
        assert_eq!(lock(&limit.state).used, 0);
    }

    #[test]
    fn a_share_that_grows_counts_with_all_of_its_amount() {
        let limit = limit(10);
        let (small, large) = (limit.take("modest", 2), limit.take("greedy", 3));
        large.grow(5);
        assert!(!is_revoked(&small) && !is_revoked(&large));
        large.grow(1);
        assert!(!is_revoked(&small) && is_revoked(&large));
        large.grow(1);
        assert_eq!(lock(&limit.state).used, 2);
    }

    #[test]
    fn dropped_shares_make_room() {
        let limit = limit(1);
        for _ in 0..3 {
            assert!(!is_revoked(&limit.take("peer", 1)));
        }
        let kept = limit.take("peer", 1);
        assert!(!is_revoked(&kept));
        assert_eq!(lock(&limit.state).used, 1);
        drop(kept);
        assert!(lock(&limit.state).peers.is_empty());
    }

    #[test]
    fn revoked_shares_are_counted_by_listener() {
        let labels = Labels { listener: "counted", share: "connection" };
        let limit = FairLimit::new(labels, 2);
        let count = || {
            let series =
                "csi_loopback_shares_revoked_total{listener=\"counted\",share=\"connection\"} ";
            let metric = scrape().unwrap();
            let value = metric.lines().find_map(|line| line.strip_prefix(series));
            value.unwrap().parse::<u32>().unwrap()
        };
        let _fits = [limit.take("peer", 1), limit.take("peer", 1)];
        assert_eq!(count(), 0);
        let _more = [limit.take("peer", 2), limit.clone().take("other", 1)];
        assert_eq!(count(), 3);
    }

    #[tokio::test]
    async fn a_revocation_is_reported_once_or_later() {
        let limit = limit(1);
        let first = limit.take("peer", 1);
        let _second = limit.take("peer", 1);
        first.revoked().await;
        first.revoked().await;
    }
}
