//! Locks by target: calls for one target are serialized, and calls for other targets run
//! concurrently.

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::refusal::{Refusal, Result};

#[derive(Debug, Clone, Default)]
pub struct TargetLocks(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    held: Mutex<HashSet<String>>,
    released: Condvar,
}

/// A held lock; it is released on drop.
#[derive(Debug)]
pub struct TargetLock {
    locks: TargetLocks,
    name: String,
}

impl TargetLocks {
    fn held(&self) -> MutexGuard<'_, HashSet<String>> {
        self.0.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits at most `timeout` for the lock.
    pub fn lock(&self, name: &str, timeout: Duration) -> Result<TargetLock> {
        let waited =
            self.0.released.wait_timeout_while(self.held(), timeout, |held| held.contains(name));
        let (mut held, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if !held.insert(name.to_owned()) {
            return Err(Refusal::Busy(name.to_owned()));
        }
        Ok(TargetLock { locks: self.clone(), name: name.to_owned() })
    }
}

impl Drop for TargetLock {
    fn drop(&mut self) {
        self.locks.held().remove(&self.name);
        self.locks.0.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_calls_for_the_same_target_wait() {
        let locks = TargetLocks::default();
        let first = locks.lock("a", Duration::ZERO).unwrap();
        assert!(matches!(locks.lock("a", Duration::from_millis(5)), Err(Refusal::Busy(_))));
        let other = locks.lock("b", Duration::ZERO).unwrap();
        let (begun, waiting) = std::sync::mpsc::channel();
        let second = std::thread::spawn({
            let locks = locks.clone();
            move || {
                begun.send(()).unwrap();
                locks.lock("a", Duration::from_secs(60)).map(drop)
            }
        });
        waiting.recv().unwrap();
        drop(first);
        second.join().unwrap().unwrap();
        drop(other);
        assert!(locks.held().is_empty());
    }
}
