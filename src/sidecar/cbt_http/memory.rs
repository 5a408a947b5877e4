//! What pages of before have told and later ones need, for a while and within a bound: nothing that a page could not be
//! found without.

use std::sync::Arc;
use std::time::Duration;

use moka::future::Cache;
use sha2::Digest;

use crate::delta_token::digest;
use crate::kubernetes::cbt_http::PageRequest;

/// Bytes of all tokens together.
const TOKENS: u64 = 8 << 20;
/// What a token costs beside itself.
const ENTRY: usize = 128;
/// Pairs of snapshots whose unit is known.
const UNITS: u64 = 10_000;
/// What nobody has asked for so long is forgotten.
const IDLE: Duration = Duration::from_secs(3600);

/// Two snapshots, as a digest.
type Pair = [u8; 32];

/// Cheap to clone.
#[derive(Clone)]
pub struct Memory {
    /// From the number of a block to the token of a driver's page that has it.
    tokens: Cache<(Pair, u64), Arc<str>>,
    /// Bytes of a block.
    units: Cache<Pair, u64>,
}

impl Memory {
    pub fn new() -> Self {
        let cost = |_: &(Pair, u64), token: &Arc<str>| (token.len() + ENTRY) as u32;
        let tokens = Cache::builder().weigher(cost).max_capacity(TOKENS).time_to_idle(IDLE);
        let units = Cache::builder().max_capacity(UNITS).time_to_idle(IDLE);
        Self { tokens: tokens.build(), units: units.build() }
    }

    pub async fn token(&self, asked: &PageRequest) -> Option<Arc<str>> {
        self.tokens.get(&(pair(asked), asked.offset)).await
    }

    /// Notes that the page of `token` has the block, or what follows it.
    pub async fn note_token(&self, asked: &PageRequest, block: u64, token: &str) {
        self.tokens.insert((pair(asked), block), token.into()).await;
    }

    pub async fn forget_token(&self, asked: &PageRequest) {
        self.tokens.invalidate(&(pair(asked), asked.offset)).await;
    }

    pub async fn unit(&self, asked: &PageRequest) -> Option<u64> {
        self.units.get(&pair(asked)).await
    }

    pub async fn note_unit(&self, asked: &PageRequest, unit: u64) {
        self.units.insert(pair(asked), unit).await;
    }
}

fn pair(asked: &PageRequest) -> Pair {
    digest(&asked.base_snapshot_id, &asked.target_snapshot_id).finalize().into()
}
