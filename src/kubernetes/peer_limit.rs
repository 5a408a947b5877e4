//! Limits the work that one client causes before it is authenticated, so that a flood of invalid
//! tokens from one client delays mainly that client.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::client::{LONGEST_WAIT, Overloaded};
use crate::telemetry::peer::Peer;

/// Maximum concurrent calls to the API server for the unauthenticated requests of one client.
const RUNNING: usize = 2;
/// Maximum requests of one client that run or wait.
const WAITING: usize = 256;

type Peers = Arc<Mutex<HashMap<Peer, Queue>>>;

/// The requests of each client. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct PeerLimit {
    peers: Peers,
}

#[derive(Debug)]
struct Queue {
    turns: Arc<Semaphore>,
    /// Requests that run or wait.
    requests: usize,
}

/// A request that may run, until it is dropped.
#[derive(Debug)]
pub struct Turn {
    _permit: OwnedSemaphorePermit,
    _place: Place,
}

/// A place in the queue of a client.
#[derive(Debug)]
struct Place {
    peer: Peer,
    peers: Peers,
}

impl PeerLimit {
    /// Waits for the client's turn.
    ///
    /// # Errors
    /// Too many of its requests wait, or this one has waited for too long.
    pub async fn turn(&self, peer: Peer) -> kube::Result<Turn> {
        let overloaded = || kube::Error::Service(Overloaded.into());
        let (place, turns) = self.queue(peer).ok_or_else(overloaded)?;
        match timeout(LONGEST_WAIT, turns.acquire_owned()).await {
            Ok(Ok(permit)) => Ok(Turn { _permit: permit, _place: place }),
            // The semaphore is never closed.
            Ok(Err(_)) | Err(_) => Err(overloaded()),
        }
    }

    fn queue(&self, peer: Peer) -> Option<(Place, Arc<Semaphore>)> {
        let mut peers = lock(&self.peers);
        let queue = peers
            .entry(peer)
            .or_insert_with(|| Queue { turns: Arc::new(Semaphore::new(RUNNING)), requests: 0 });
        if queue.requests >= WAITING {
            return None;
        }
        queue.requests += 1;
        Some((Place { peer, peers: self.peers.clone() }, queue.turns.clone()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut peers = lock(&self.peers);
        let Some(queue) = peers.get_mut(&self.peer) else { return };
        queue.requests -= 1;
        if queue.requests == 0 {
            peers.remove(&self.peer);
        }
    }
}

fn lock(peers: &Mutex<HashMap<Peer, Queue>>) -> MutexGuard<'_, HashMap<Peer, Queue>> {
    peers.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::task::JoinSet;

    use super::*;
    use crate::kubernetes::client::is_overloaded;

    fn peer(text: &str) -> Peer {
        Peer::of(format!("{text}:1").parse().unwrap())
    }

    #[tokio::test]
    async fn a_client_that_waits_delays_no_other_client() {
        let limit = PeerLimit::default();
        let mut turns = Vec::new();
        for _ in 0..RUNNING {
            turns.push(limit.turn(peer("10.0.0.1")).await.unwrap());
        }
        let waiting = limit.turn(peer("10.0.0.1"));
        assert!(timeout(Duration::from_millis(20), waiting).await.is_err());
        limit.turn(peer("10.0.0.2")).await.unwrap();
        turns.pop();
        limit.turn(peer("10.0.0.1")).await.unwrap();
        drop(turns);
        assert!(lock(&limit.peers).is_empty());
    }

    #[tokio::test]
    async fn the_queue_of_a_client_is_bounded() {
        let limit = PeerLimit::default();
        let mut waiting = JoinSet::new();
        for _ in 0..WAITING {
            let limit = limit.clone();
            waiting.spawn(async move {
                let _turn = limit.turn(peer("10.0.0.1")).await.unwrap();
                std::future::pending::<()>().await;
            });
        }
        while lock(&limit.peers).get(&peer("10.0.0.1")).is_none_or(|one| one.requests < WAITING) {
            tokio::task::yield_now().await;
        }
        let refused = limit.turn(peer("10.0.0.1")).await.unwrap_err();
        assert!(is_overloaded(&refused), "{refused}");
        limit.turn(peer("10.0.0.2")).await.unwrap();
        waiting.shutdown().await;
        limit.turn(peer("10.0.0.1")).await.unwrap();
        assert!(lock(&limit.peers).is_empty());
    }
}
