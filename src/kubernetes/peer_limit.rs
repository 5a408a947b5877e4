//! Turns for the calls to the API server that clients cause before they are known: reviews of
//! tokens, lookups of unknown sessions, and all lookups of webhooks. A few calls run at a time, so
//! that none waits long for its turn in the rate of the API server's client, and the clients take
//! turns: first the networks, then the addresses of a network ([`Peer`]). A client that causes many
//! calls delays mainly itself. Three of four turns belong to clients that were known lately
//! ([`PeerLimit::known`]), so that many unknown ones delay them little.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::time::timeout;

use super::client::{LONGEST_WAIT, Overloaded};
use telemetry::fair_limit::Holder;
use telemetry::peer::Peer;

/// Maximum concurrent calls of all clients.
pub const RUNNING: usize = 8;
/// Maximum calls of one client that wait, and of all clients. Over the latter, the client with the
/// most loses its newest.
const WAITING: usize = 256;
const ALL_WAITING: usize = 2_048;

/// Time for which a client is known, and maximum number of such clients.
const KNOWN_FOR: Duration = Duration::from_secs(600);
const MAX_KNOWN: usize = 10_000;
/// Every this many turns, clients that are not known come first.
const UNKNOWN_EVERY: u64 = 4;

/// The turns of one kind of calls. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct PeerLimit {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    running: usize,
    waiting: usize,
    /// Counts turns, to order networks and clients by their last one.
    turns: u64,
    networks: HashMap<Lane, Network>,
    /// When clients were known.
    known: HashMap<Peer, Instant>,
}

/// The known, or the other, clients of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Lane {
    known: bool,
    network: Peer,
}

/// The clients of a network that wait.
#[derive(Debug)]
struct Network {
    last_turn: u64,
    clients: HashMap<Peer, Client>,
}

#[derive(Debug)]
struct Client {
    last_turn: u64,
    /// In order of arrival. Those that are gone have closed their receiver.
    waiting: VecDeque<oneshot::Sender<()>>,
}

/// A call that may run, until it is dropped.
#[derive(Debug)]
pub struct Turn {
    limit: PeerLimit,
}

/// A call that waits.
struct Waiting {
    granted: oneshot::Receiver<()>,
    taken: bool,
    limit: PeerLimit,
}

impl PeerLimit {
    /// Waits for the client's turn.
    ///
    /// # Errors
    /// Too many of its calls wait, or this one has waited for too long.
    pub async fn turn(&self, peer: Peer) -> kube::Result<Turn> {
        let overloaded = || kube::Error::Service(Overloaded.into());
        let mut waiting = self.wait(peer).ok_or_else(overloaded)?;
        match timeout(LONGEST_WAIT, &mut waiting.granted).await {
            Ok(Ok(())) => {
                waiting.taken = true;
                Ok(Turn { limit: self.clone() })
            }
            // Too late, or its place was given to another client.
            Ok(Err(_)) | Err(_) => Err(overloaded()),
        }
    }

    /// Records that the client presented a valid token.
    pub fn known(&self, peer: Peer) {
        let (now, mut state) = (Instant::now(), self.lock());
        if state.known.len() >= MAX_KNOWN {
            state.known.retain(|_, since| now.duration_since(*since) < KNOWN_FOR);
        }
        if state.known.len() < MAX_KNOWN || state.known.contains_key(&peer) {
            state.known.insert(peer, now);
        }
    }

    fn wait(&self, peer: Peer) -> Option<Waiting> {
        let mut state = self.lock();
        let granted = state.enqueue(peer)?;
        state.grant();
        Some(Waiting { granted, taken: false, limit: self.clone() })
    }

    fn release(&self) {
        let mut state = self.lock();
        state.running -= 1;
        state.grant();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn enqueue(&mut self, peer: Peer) -> Option<oneshot::Receiver<()>> {
        if self.waiting >= ALL_WAITING {
            self.forget_gone();
        }
        if self.waiting >= ALL_WAITING && !self.drop_one(peer) {
            return None;
        }
        // A new client comes after all others, like one that just had its turn.
        self.turns += 1;
        let now = self.turns;
        let network = || Network { last_turn: now, clients: HashMap::new() };
        let known = self.known.get(&peer).is_some_and(|since| since.elapsed() < KNOWN_FOR);
        let lane = Lane { known, network: peer.group() };
        let network = self.networks.entry(lane).or_insert_with(network);
        let client = || Client { last_turn: now, waiting: VecDeque::new() };
        let client = network.clients.entry(peer).or_insert_with(client);
        if client.waiting.len() >= WAITING {
            let before = client.waiting.len();
            client.waiting.retain(|one| !one.is_closed());
            self.waiting -= before - client.waiting.len();
            if client.waiting.len() >= WAITING {
                return None;
            }
        }
        let (sender, granted) = oneshot::channel();
        client.waiting.push_back(sender);
        self.waiting += 1;
        Some(granted)
    }

    /// Removes the newest call of the client with the most in the network with the most, unless it
    /// is this one.
    fn drop_one(&mut self, newcomer: Peer) -> bool {
        let waiting = |network: &Network| -> usize {
            network.clients.values().map(|client| client.waiting.len()).sum()
        };
        let Some(network) = self.networks.values_mut().max_by_key(|network| waiting(network))
        else {
            return false;
        };
        let most = network.clients.iter_mut().max_by_key(|(_, client)| client.waiting.len());
        let Some((_, client)) = most.filter(|(peer, _)| **peer != newcomer) else { return false };
        self.waiting -= usize::from(client.waiting.pop_back().is_some());
        true
    }

    fn forget_gone(&mut self) {
        for client in self.networks.values_mut().flat_map(|network| network.clients.values_mut()) {
            client.waiting.retain(|one| !one.is_closed());
        }
        self.forget_empty();
        let clients = self.networks.values().flat_map(|network| network.clients.values());
        self.waiting = clients.map(|client| client.waiting.len()).sum();
    }

    fn forget_empty(&mut self) {
        self.networks.retain(|_, network| {
            network.clients.retain(|_, client| !client.waiting.is_empty());
            !network.clients.is_empty()
        });
    }

    /// Gives turns while there are any.
    fn grant(&mut self) {
        while self.running < RUNNING {
            let Some(next) = self.next() else { return };
            // An error means that the call does not wait any more.
            if next.send(()).is_ok() {
                self.running += 1;
            }
        }
    }

    /// The next call: of the network and the client whose last turn is the longest ago.
    fn next(&mut self) -> Option<oneshot::Sender<()>> {
        self.turns += 1;
        let turn = self.turns;
        let last = turn.is_multiple_of(UNKNOWN_EVERY);
        let order = |lane: &Lane, one: &Network| (lane.known == last, one.last_turn);
        let (&name, network) =
            self.networks.iter_mut().min_by_key(|(lane, one)| order(lane, one))?;
        network.last_turn = turn;
        let (&peer, client) = network.clients.iter_mut().min_by_key(|(_, one)| one.last_turn)?;
        client.last_turn = turn;
        let next = client.waiting.pop_front();
        self.waiting -= usize::from(next.is_some());
        if client.waiting.is_empty() {
            network.clients.remove(&peer);
            if network.clients.is_empty() {
                self.networks.remove(&name);
            }
        }
        next
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.limit.release();
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.granted.close();
        // It was granted, but not taken.
        if !self.taken && self.granted.try_recv().is_ok() {
            self.limit.release();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::mpsc;
    use tokio::task::JoinSet;
    use tokio::time::sleep;

    use super::*;
    use crate::client::is_overloaded;

    fn peer(text: &str) -> Peer {
        Peer::of(format!("{text}:1").parse().unwrap())
    }

    /// Occupies all turns.
    async fn occupy(limit: &PeerLimit) -> Vec<Turn> {
        let mut turns = Vec::new();
        for number in 0..RUNNING {
            turns.push(limit.turn(peer(&format!("10.9.0.{number}"))).await.unwrap());
        }
        turns
    }

    /// Calls of these clients in this order of arrival, and the order of their turns.
    async fn order(limit: &PeerLimit, clients: &[&'static str]) -> Vec<&'static str> {
        let turns = occupy(limit).await;
        let (done, mut order) = mpsc::unbounded_channel();
        let mut calls = JoinSet::new();
        for (number, client) in clients.iter().copied().enumerate() {
            let (limit, done) = (limit.clone(), done.clone());
            let waiting = limit.clone();
            calls.spawn(async move {
                let turn = limit.turn(peer(client)).await.unwrap();
                done.send(client).unwrap();
                drop(turn);
            });
            while waiting.lock().waiting <= number {
                tokio::task::yield_now().await;
            }
        }
        drop((turns, done));
        while calls.join_next().await.is_some() {}
        let mut taken = Vec::new();
        while let Some(client) = order.recv().await {
            taken.push(client);
        }
        taken
    }

    #[tokio::test]
    async fn clients_take_turns() {
        let limit = PeerLimit::default();
        let (a, b, c) = ("10.0.0.1", "10.0.0.2", "10.0.0.3");
        // All turns of the test become free together, so that the order is that of the grants.
        assert_eq!(order(&limit, &[a, a, a, a, b, b, c]).await, [a, b, c, a, b, a, a]);
        assert!(limit.lock().networks.is_empty() && limit.lock().running == 0);
    }

    #[tokio::test]
    async fn clients_with_valid_tokens_come_first() {
        let limit = PeerLimit::default();
        limit.known(peer("10.0.0.9"));
        let mut clients = vec!["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"];
        clients.extend(["10.0.0.9"; 5]);
        let order = order(&limit, &clients).await;
        // The others have a turn in four.
        let of_known: Vec<_> = (0..9).filter(|&one| order[one] == "10.0.0.9").collect();
        assert!(of_known[2] <= 3 && of_known[4] <= 6, "{order:?}");
        assert!(order[..4].iter().any(|one| *one != "10.0.0.9"), "{order:?}");
    }

    #[tokio::test]
    async fn the_addresses_of_an_ipv6_network_share_its_turns() {
        let limit = PeerLimit::default();
        let (a1, a2, b) = ("[fd00::1]", "[fd00::2]", "[fd00:0:0:1::1]");
        assert_eq!(order(&limit, &[a1, a1, a2, b, b, b]).await, [a1, b, a2, b, a1, b]);
    }

    #[tokio::test]
    async fn the_queue_of_a_client_is_bounded() {
        let limit = PeerLimit::default();
        let _turns = occupy(&limit).await;
        let mut waiting = JoinSet::new();
        let fill = |waiting: &mut JoinSet<()>, client: &str, count: usize| {
            for _ in 0..count {
                let (limit, client) = (limit.clone(), peer(client));
                waiting.spawn(async move { drop(limit.turn(client).await) });
            }
        };
        fill(&mut waiting, "10.0.0.1", WAITING);
        while limit.lock().waiting < WAITING {
            tokio::task::yield_now().await;
        }
        let refused = limit.turn(peer("10.0.0.1")).await.unwrap_err();
        assert!(is_overloaded(&refused), "{refused}");
        // Calls that are gone make room.
        waiting.shutdown().await;
        let again = timeout(Duration::from_millis(20), limit.turn(peer("10.0.0.1"))).await;
        assert!(again.is_err(), "it waits");
        // If all places are taken, the client with the most loses one to another.
        for client in 0..=ALL_WAITING / WAITING {
            fill(&mut waiting, &format!("10.1.0.{client}"), WAITING);
        }
        sleep(Duration::from_millis(100)).await;
        assert_eq!(limit.lock().waiting, ALL_WAITING);
        let modest = timeout(Duration::from_millis(20), limit.turn(peer("10.0.0.2"))).await;
        assert!(modest.is_err(), "it waits");
        waiting.shutdown().await;
    }

    #[tokio::test]
    async fn a_call_that_is_gone_gives_its_turn_back() {
        let limit = PeerLimit::default();
        let turns = occupy(&limit).await;
        let waiting = limit.wait(peer("10.0.0.1")).unwrap();
        drop(turns);
        assert_eq!(limit.lock().running, 1);
        drop(waiting);
        assert_eq!(limit.lock().running, 0);
    }
}
