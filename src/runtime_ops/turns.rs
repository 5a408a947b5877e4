//! Whose turn it is: calls for one target wait for each other, those for others run side by side.

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::refusal::{Refusal, Result};

#[derive(Debug, Clone, Default)]
pub struct Turns(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    taken: Mutex<HashSet<String>>,
    ended: Condvar,
}

/// A turn, which ends when it is dropped.
#[derive(Debug)]
pub struct Turn {
    turns: Turns,
    name: String,
}

impl Turns {
    fn taken(&self) -> MutexGuard<'_, HashSet<String>> {
        self.0.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the turn, but no longer than this.
    pub fn take(&self, name: &str, patience: Duration) -> Result<Turn> {
        let waited =
            self.0.ended.wait_timeout_while(self.taken(), patience, |taken| taken.contains(name));
        let (mut taken, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if !taken.insert(name.to_owned()) {
            return Err(Refusal::Busy(name.to_owned()));
        }
        Ok(Turn { turns: self.clone(), name: name.to_owned() })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.taken().remove(&self.name);
        self.turns.0.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_waited_for_and_others_are_not() {
        let turns = Turns::default();
        let first = turns.take("a", Duration::ZERO).unwrap();
        assert!(matches!(turns.take("a", Duration::from_millis(5)), Err(Refusal::Busy(_))));
        let other = turns.take("b", Duration::ZERO).unwrap();
        let (begun, waiting) = std::sync::mpsc::channel();
        let second = std::thread::spawn({
            let turns = turns.clone();
            move || {
                begun.send(()).unwrap();
                turns.take("a", Duration::from_secs(60)).map(drop)
            }
        });
        waiting.recv().unwrap();
        drop(first);
        second.join().unwrap().unwrap();
        drop(other);
        assert!(turns.taken().is_empty());
    }
}
