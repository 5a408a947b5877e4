//! Locks on objects. A second operation on a locked object fails at once (CSI: ABORTED), and the
//! caller retries.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::{Error, Result};

type Held = HashSet<String>;

#[derive(Debug, Clone, Default)]
pub struct Locks(Arc<Mutex<Held>>);

/// Releases its keys when dropped.
#[derive(Debug)]
pub struct Lock {
    locks: Locks,
    keys: Vec<String>,
}

impl Locks {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks all keys or none. Never waits.
    pub fn try_lock<'a>(&self, keys: impl IntoIterator<Item = &'a str>) -> Result<Lock> {
        let mut held = self.held();
        let mut lock = Lock { locks: self.clone(), keys: Vec::new() };
        for key in keys {
            if !held.insert(key.to_owned()) {
                lock.keys.iter().for_each(|key| {
                    held.remove(key);
                });
                lock.keys.clear();
                return Err(Error::Busy(format!(
                    "another operation on {key:?} is in progress; try again later"
                )));
            }
            lock.keys.push(key.to_owned());
        }
        drop(held);
        Ok(lock)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.keys.is_empty() {
            return;
        }
        let mut held = self.locks.held();
        self.keys.iter().for_each(|key| {
            held.remove(key);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_operation_on_an_object_is_busy() {
        let locks = Locks::default();
        let first = locks.try_lock(["a", "b"]).unwrap();
        assert!(matches!(locks.try_lock(["c", "b"]), Err(Error::Busy(_))));
        assert!(locks.try_lock(["c"]).is_ok(), "a refused operation holds no lock");
        drop(first);
        assert!(locks.try_lock(["a", "b"]).is_ok());
    }
}
