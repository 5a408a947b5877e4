//! The oracle: random sequences of writes of every kind, snapshots, groups, deletions, growth,
//! copies, changes of tracking, and restarts. On any kind of pool, no different block may be
//! missing from a result, and the other invariants of `oracle::invariants` must hold. A failing
//! sequence is shrunk to a few operations and printed.
//!
//! | variable | |
//! |---|---|
//! | `ORACLE_SEED` | seed of the first sequence; random by default |
//! | `ORACLE_CASES` | sequences in each test, on each kind of pool; hack/soak.sh runs more |
//! | `ORACLE_POOL` | run only `reflink`, `image` or `copy` |
//!
//! | module | owns |
//! |---|---|
//! | `operation` | the random operations |
//! | `explore` | running many sequences and shrinking failures |
//! | `world` | a run: applies operations to a subject and to the mirror |
//! | `model`, `files` | the mirror: contents of volumes and snapshots |
//! | `invariants` | the invariants of every result |
//! | `subject`, `socket` | the tested interface: the backend in this process, or the binary's socket |

pub mod explore;
pub mod files;
pub mod invariants;
pub mod model;
pub mod operation;
pub mod socket;
pub mod subject;
pub mod world;

use self::explore::{Plan, explore};
use self::operation::Mix;
use self::socket::Socket;
use self::subject::InProcess;
use self::world::World;
use csi_loopback::backend::{FsType, PoolKind};
use support::{ALL_KINDS, have_root, setting};

/// Operations in a sequence on raw volumes.
const LENGTH: usize = 1000;

const RAW: Mix = Mix { reshape: 1, snapshot: 12, query: 20, derive: 2, restart: 3 };
const AGREEMENT: Mix = Mix { snapshot: 60, ..RAW };
const FILES: Mix = Mix { reshape: 150, snapshot: 40, query: 40, derive: 15, restart: 6 };
const SOCKET: Mix = Mix { reshape: 1, snapshot: 40, query: 60, derive: 3, restart: 20 };

/// The requested kinds of pool.
pub fn kinds() -> impl Iterator<Item = PoolKind> {
    let only = std::env::var("ORACLE_POOL").ok();
    ALL_KINDS
        .into_iter()
        .filter(move |kind| only.as_ref().is_none_or(|only| *only == kind.to_string()))
}

fn never_misses(kind: PoolKind) {
    if !have_root() || !kinds().any(|requested| requested == kind) {
        return;
    }
    let plan = Plan { on: &format!("{kind} pools"), cases: 10, length: LENGTH, mix: RAW };
    let counts = explore(&plan, |_, operations| {
        World::run(Box::new(InProcess::new(kind)), None, 2, operations)
    });
    assert!(setting("ORACLE_CASES").is_some() || counts.snapshots >= 100, "too few snapshots");
}

// One after the other: children of another thread inherit open descriptors for a moment, which
// would keep a volume busy during a detach.

#[test]
fn a_reflink_pool_never_misses_a_changed_block() {
    never_misses(PoolKind::Reflink);
}

#[test]
fn an_image_pool_never_misses_a_changed_block() {
    never_misses(PoolKind::Image);
}

#[test]
fn a_copy_pool_never_misses_a_changed_block() {
    never_misses(PoolKind::Copy);
}

/// The kind of pool for a sequence, in turn.
fn kind_for(seed: u64) -> PoolKind {
    let kinds: Vec<PoolKind> = kinds().collect();
    kinds[seed as usize % kinds.len()]
}

#[test]
#[ignore = "full tier"]
fn all_kinds_of_pools_report_the_same_changes() {
    if !have_root() || kinds().count() < ALL_KINDS.len() {
        return;
    }
    let plan = Plan { on: "all kinds of pool", cases: 2, length: 250, mix: AGREEMENT };
    explore(&plan, |_, operations| {
        let runs =
            ALL_KINDS.map(|kind| World::run_and_read(Box::new(InProcess::new(kind)), operations));
        let [(_, reflink), (_, image), (counts, copy)] = &runs;
        assert!(reflink == image && image == copy, "the kinds of pool differ");
        *counts
    });
}

#[test]
fn the_driver_never_misses_a_changed_block() {
    if !have_root() {
        return;
    }
    let plan = Plan { on: "the binary", cases: 3, length: 400, mix: SOCKET };
    explore(&plan, |seed, operations| {
        World::run(Box::new(Socket::new(kind_for(seed))), None, 2, operations)
    });
}

fn under_a_filesystem(fs_type: FsType) {
    if !have_root() {
        return;
    }
    let plan = Plan { on: fs_type.name(), cases: 2, length: 250, mix: FILES };
    explore(&plan, |seed, operations| {
        World::run(Box::new(Socket::new(kind_for(seed))), Some(fs_type), 1, operations)
    });
}

#[test]
#[ignore = "full tier"]
fn changes_of_files_on_ext4_are_never_missed() {
    under_a_filesystem(FsType::Ext4);
}

#[test]
#[ignore = "full tier"]
fn changes_of_files_on_xfs_are_never_missed() {
    under_a_filesystem(FsType::Xfs);
}
