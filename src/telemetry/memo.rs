//! Results of lookups, kept for some time and up to a limit. Concurrent lookups of one key share
//! one load.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::convert::Infallible;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lru::LruCache;

/// How long a value is kept. The capacity can end it earlier.
#[derive(Debug, Clone, Copy)]
pub enum Keep {
    Always,
    /// This long after it was inserted.
    For(Duration),
    /// This long after it was last used.
    Unused(Duration),
}

/// Values by key. Clones share them. `E` is the error of a load.
pub struct Memo<K, V, E = Infallible> {
    entries: Arc<Mutex<Entries<K, V, E>>>,
}

struct Entries<K, V, E> {
    keep: Keep,
    /// Of all values together.
    capacity: u64,
    weigh: fn(&V) -> u64,
    weight: u64,
    /// The last value ends first: a use moves a value to the front, unless it ends some time after
    /// its insertion.
    kept: LruCache<K, Entry<V>>,
    loading: HashMap<K, Load<V, E>>,
}

struct Entry<V> {
    value: V,
    since: Instant,
}

/// The turn to load a value, and the result for those who wait for it.
type Load<V, E> = Arc<tokio::sync::Mutex<Option<Result<V, Arc<E>>>>>;

impl<K, V, E> Clone for Memo<K, V, E> {
    fn clone(&self) -> Self {
        Self { entries: Arc::clone(&self.entries) }
    }
}

impl<K: Hash + Eq, V: Clone, E> Memo<K, V, E> {
    /// Keeps at most `capacity` values.
    pub fn new(capacity: u64, keep: Keep) -> Self {
        Self::weighed(capacity, keep, |_| 1)
    }

    /// Keeps values whose weights together are at most `capacity`.
    pub fn weighed(capacity: u64, keep: Keep, weigh: fn(&V) -> u64) -> Self {
        let (kept, loading) = (LruCache::unbounded(), HashMap::new());
        let entries = Entries { keep, capacity, weigh, weight: 0, kept, loading };
        Self { entries: Arc::new(Mutex::new(entries)) }
    }

    pub fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.lock().get(key)
    }

    pub fn insert(&self, key: K, value: V) {
        self.lock().insert(key, value);
    }

    pub fn remove<Q: Hash + Eq + ?Sized>(&self, key: &Q)
    where
        K: Borrow<Q>,
    {
        self.lock().remove(key);
    }

    /// Removes all values.
    pub fn clear(&self) {
        let mut entries = self.lock();
        entries.kept.clear();
        entries.weight = 0;
    }

    pub fn get_or_insert_with<Q>(&self, key: &Q, make: impl FnOnce() -> V) -> V
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let mut entries = self.lock();
        entries.get(key).unwrap_or_else(|| {
            let value = make();
            entries.insert(key.to_owned(), value.clone());
            value
        })
    }

    /// Returns the value, or loads it. Concurrent callers get the same result. If this call is
    /// dropped, one of them loads.
    ///
    /// # Errors
    /// That of the load, which is not kept.
    pub async fn get_or_load<Q>(
        &self,
        key: &Q,
        load: impl Future<Output = Result<V, E>>,
    ) -> Result<V, Arc<E>>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ToOwned<Owned = K> + ?Sized,
    {
        let turn = {
            let mut entries = self.lock();
            if let Some(value) = entries.get(key) {
                return Ok(value);
            }
            Arc::clone(entries.loading.entry(key.to_owned()).or_default())
        };
        let waiting = Waiting { memo: self, key, turn };
        let mut result = waiting.turn.lock().await;
        if let Some(result) = &*result {
            return result.clone();
        }
        let loaded = load.await.map_err(Arc::new);
        let mut entries = self.lock();
        if let Ok(value) = &loaded {
            entries.insert(key.to_owned(), value.clone());
        }
        // Later callers get the value, or load again.
        entries.end(key, &waiting.turn);
        *result = Some(loaded.clone());
        loaded
    }
}

impl<K, V, E> Memo<K, V, E> {
    fn lock(&self) -> MutexGuard<'_, Entries<K, V, E>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call that loads a value or waits for it.
struct Waiting<'a, K: Borrow<Q> + Hash + Eq, V, E, Q: Hash + Eq + ?Sized> {
    memo: &'a Memo<K, V, E>,
    key: &'a Q,
    turn: Load<V, E>,
}

impl<K: Borrow<Q> + Hash + Eq, V, E, Q: Hash + Eq + ?Sized> Drop for Waiting<'_, K, V, E, Q> {
    fn drop(&mut self) {
        let mut entries = self.memo.lock();
        // The other reference is that of the map: no other call waits.
        if Arc::strong_count(&self.turn) == 2 {
            entries.end(self.key, &self.turn);
        }
    }
}

impl<K: Hash + Eq, V, E> Entries<K, V, E> {
    /// Removes the turn, unless it is another one.
    fn end<Q: Hash + Eq + ?Sized>(&mut self, key: &Q, turn: &Load<V, E>)
    where
        K: Borrow<Q>,
    {
        if self.loading.get(key).is_some_and(|current| Arc::ptr_eq(current, turn)) {
            self.loading.remove(key);
        }
    }

    fn get<Q: Hash + Eq + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        V: Clone,
    {
        let now = Instant::now();
        self.shrink(now);
        match self.keep {
            Keep::Always => self.kept.get(key).map(|entry| entry.value.clone()),
            Keep::For(_) => self.kept.peek(key).map(|entry| entry.value.clone()),
            Keep::Unused(_) => self.kept.get_mut(key).map(|entry| {
                entry.since = now;
                entry.value.clone()
            }),
        }
    }

    fn insert(&mut self, key: K, value: V) {
        let now = Instant::now();
        self.remove(&key);
        self.weight += (self.weigh)(&value);
        self.kept.put(key, Entry { value, since: now });
        self.shrink(now);
    }

    fn remove<Q: Hash + Eq + ?Sized>(&mut self, key: &Q)
    where
        K: Borrow<Q>,
    {
        if let Some(entry) = self.kept.pop(key) {
            self.weight -= (self.weigh)(&entry.value);
        }
    }

    /// Removes what has expired, and what is too much.
    fn shrink(&mut self, now: Instant) {
        while let Some((_, last)) = self.kept.peek_lru() {
            let has_expired = match self.keep {
                Keep::Always => false,
                Keep::For(time) | Keep::Unused(time) => now.duration_since(last.since) >= time,
            };
            if !has_expired && self.weight <= self.capacity {
                break;
            }
            self.weight -= (self.weigh)(&last.value);
            self.kept.pop_lru();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, poll_fn, ready};
    use std::pin::pin;
    use std::task::Poll;
    use std::thread::sleep;

    use tokio::sync::oneshot;
    use tokio::task::yield_now;

    use super::*;

    const SHORT: Duration = Duration::from_millis(40);

    /// Polls once.
    macro_rules! poll {
        ($call:ident) => {
            poll_fn(|context| Poll::Ready($call.as_mut().poll(context))).await
        };
    }

    #[test]
    fn a_value_ends_with_its_time() {
        let memo: Memo<u8, u8> = Memo::new(9, Keep::For(SHORT));
        memo.insert(1, 1);
        assert_eq!(memo.get(&1), Some(1));
        sleep(SHORT);
        assert_eq!(memo.get(&1), None);
        assert!(memo.lock().kept.is_empty(), "its memory is free");
        memo.insert(1, 2);
        sleep(SHORT / 2);
        memo.insert(2, 2);
        assert_eq!(memo.get(&1), Some(2));
        sleep(SHORT / 2);
        assert_eq!(memo.get(&1), None, "also if it was used after others were inserted");
    }

    #[test]
    fn a_use_extends_only_the_time_of_unused_values() {
        let [fixed, used]: [Memo<u8, u8>; 2] =
            [Keep::For(4 * SHORT), Keep::Unused(4 * SHORT)].map(|keep| Memo::new(9, keep));
        fixed.insert(1, 1);
        used.insert(1, 1);
        for _ in 0..5 {
            sleep(SHORT);
            fixed.get(&1);
            used.get(&1);
        }
        assert_eq!((fixed.get(&1), used.get(&1)), (None, Some(1)));
    }

    #[test]
    fn the_capacity_limits_the_weight_of_all_values() {
        let memo: Memo<u8, u64> = Memo::weighed(10, Keep::Always, |value| *value);
        (0..5).for_each(|key| memo.insert(key, 2));
        memo.get(&0);
        memo.insert(5, 3);
        let kept =
            |memo: &Memo<u8, u64>| (0..9).filter(|key| memo.get(key).is_some()).collect::<Vec<_>>();
        assert_eq!(kept(&memo), [0, 3, 4, 5], "those used last");
        memo.insert(5, 1);
        memo.insert(6, 3);
        assert_eq!(kept(&memo), [0, 3, 4, 5, 6], "a new value replaces the old one's weight");
        memo.insert(7, 11);
        assert_eq!(kept(&memo), [0_u8; 0], "too heavy alone");
        memo.insert(8, 10);
        memo.clear();
        memo.insert(8, 10);
        memo.remove(&8);
        assert_eq!((memo.get(&8), memo.lock().weight), (None, 0));
    }

    #[tokio::test]
    async fn concurrent_callers_share_a_result_and_an_error_is_not_kept() {
        let memo: Memo<String, u8, &str> = Memo::new(9, Keep::Always);
        let failing = async {
            yield_now().await;
            Err("refused")
        };
        let (first, second) =
            tokio::join!(memo.get_or_load("a", failing), memo.get_or_load("a", ready(Ok(1))));
        assert_eq!((first, second), (Err(Arc::new("refused")), Err(Arc::new("refused"))));
        assert_eq!(memo.get_or_load("a", ready(Ok(2))).await, Ok(2), "a new load");
        assert_eq!(memo.get_or_load("a", pending()).await, Ok(2), "no load");
        assert_eq!(memo.get_or_insert_with("a", || 3), 2);
        assert_eq!(memo.get_or_insert_with("b", || 3), 3);
        assert!(memo.lock().loading.is_empty());
    }

    #[tokio::test]
    async fn a_load_is_shared_until_it_ends_and_not_longer() {
        let memo: Memo<String, u8, &str> = Memo::new(9, Keep::Always);
        let (fail, failed) = oneshot::channel();
        let mut loading = pin!(memo.get_or_load("a", async { Err(failed.await.unwrap()) }));
        let mut gone = Box::pin(memo.get_or_load("a", ready(Ok(1))));
        let mut waiting = pin!(memo.get_or_load("a", ready(Ok(2))));
        assert!(poll!(loading) == Poll::Pending && poll!(gone) == Poll::Pending);
        drop(gone);
        assert_eq!(poll!(waiting), Poll::Pending, "although another has left");
        fail.send("refused").unwrap();
        assert_eq!(poll!(loading), Poll::Ready(Err(Arc::new("refused"))));
        let mut later = pin!(memo.get_or_load("a", ready(Ok(3))));
        assert_eq!(poll!(later), Poll::Ready(Ok(3)), "although one still waits");
        assert_eq!(poll!(waiting), Poll::Ready(Err(Arc::new("refused"))));
    }

    #[tokio::test]
    async fn a_load_that_is_dropped_is_taken_over_or_forgotten() {
        let memo: Memo<String, u8> = Memo::new(9, Keep::Always);
        let first = memo.clone();
        let dropped = tokio::spawn(async move { first.get_or_load("a", pending()).await });
        yield_now().await;
        let second = memo.clone();
        let waiting = tokio::spawn(async move { second.get_or_load("a", ready(Ok(1))).await });
        yield_now().await;
        dropped.abort();
        assert_eq!(waiting.await.unwrap(), Ok(1));
        let alone = memo.clone();
        let dropped = tokio::spawn(async move { alone.get_or_load("b", pending()).await });
        yield_now().await;
        assert_eq!(memo.lock().loading.len(), 1);
        dropped.abort();
        assert!(dropped.await.unwrap_err().is_cancelled());
        assert!(memo.lock().loading.is_empty());
    }
}
