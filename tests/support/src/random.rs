//! A pseudorandom number generator with a seed.

use std::collections::BTreeSet;
use std::time::UNIX_EPOCH;

#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A seed from the time.
    pub fn new_seed() -> u64 {
        UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64 % 1_000_000_000
    }

    pub fn next_u64(&mut self) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`; 0 for a limit of 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next_u64() % limit.max(1)
    }

    /// `count` distinct numbers below `limit`, ascending.
    pub fn distinct(&mut self, count: usize, limit: u64) -> Vec<u64> {
        let mut numbers = BTreeSet::new();
        while numbers.len() < count {
            numbers.insert(self.below(limit));
        }
        numbers.into_iter().collect()
    }

    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        from.get(self.below(from.len() as u64) as usize)
    }
}
