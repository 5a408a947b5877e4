//! The oracle at scale: random sequences of writes of every kind, snapshots, groups, deletions, growth,
//! copies, tracking off and on, and restarts. Nothing that differs may be missing from an answer, on any
//! kind of pool, and the other laws of `oracle::laws` hold too. A sequence that breaks one is cut down to
//! a few operations, which are printed.
//!
//! | variable | |
//! |---|---|
//! | `ORACLE_SEED` | the first sequence; without it another one each time |
//! | `ORACLE_CASES` | sequences in each test, on each kind of pool |
//! | `ORACLE_POOL` | `reflink`, `image` or `copy`: that kind alone |
//!
//! | module | owns |
//! |---|---|
//! | `operation` | what can be done, drawn at random |
//! | `explore` | running many sequences, and cutting one that fails down to what it takes to fail |
//! | `world` | a run: operations done to a subject and to the mirror at once |
//! | `model`, `files` | the mirror: what volumes hold and held |
//! | `laws` | what has to hold of every answer |
//! | `subject`, `socket` | what is put to the test: the backend in this process, the binary behind its socket |

pub mod explore;
pub mod files;
pub mod laws;
pub mod model;
pub mod operation;
pub mod socket;
pub mod subject;
pub mod world;

use self::explore::{Plan, explore, setting};
use self::operation::Mix;
use self::socket::Socket;
use self::subject::InProcess;
use self::world::World;
use csi_loopback::backend::{FsType, PoolKind};
use support::{ALL_KINDS, have_root};

/// Operations in a sequence on raw volumes.
const LENGTH: usize = 1000;

const RAW: Mix = Mix { reshape: 1, snapshot: 12, ask: 20, derive: 2, restart: 3 };
const AGREEMENT: Mix = Mix { snapshot: 60, ..RAW };
const FILES: Mix = Mix { reshape: 150, snapshot: 40, ask: 40, derive: 15, restart: 6 };
const SOCKET: Mix = Mix { reshape: 1, snapshot: 40, ask: 60, derive: 3, restart: 20 };

/// The kinds of pool that were asked for.
pub fn kinds() -> impl Iterator<Item = PoolKind> {
    let only = std::env::var("ORACLE_POOL").ok();
    ALL_KINDS
        .into_iter()
        .filter(move |kind| only.as_ref().is_none_or(|only| *only == kind.to_string()))
}

fn never_misses(kind: PoolKind) {
    if !have_root() || !kinds().any(|asked| asked == kind) {
        return;
    }
    let plan = Plan { on: &format!("{kind} pools"), cases: 20, length: LENGTH, mix: RAW };
    let counts = explore(&plan, |_, operations| {
        World::run(Box::new(InProcess::new(kind)), None, 2, operations)
    });
    assert!(setting("ORACLE_CASES").is_some() || counts.snapshots >= 200, "too few snapshots");
}

// One after the other: what one thread has open, the children of another hold for a moment, and a volume
// that is to be detached is then in use.

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

/// The kind of pool for a sequence: one after the other.
fn kind_for(seed: u64) -> PoolKind {
    let kinds: Vec<PoolKind> = kinds().collect();
    kinds[seed as usize % kinds.len()]
}

#[test]
#[ignore = "full tier"]
fn all_kinds_of_pool_agree_on_what_really_changed() {
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
fn over_the_socket_no_changed_block_is_missed() {
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
    let plan = Plan { on: fs_type.name(), cases: 3, length: 250, mix: FILES };
    explore(&plan, |seed, operations| {
        World::run(Box::new(Socket::new(kind_for(seed))), Some(fs_type), 1, operations)
    });
}

#[test]
#[ignore = "full tier"]
fn what_files_on_ext4_become_is_never_missed() {
    under_a_filesystem(FsType::Ext4);
}

#[test]
#[ignore = "full tier"]
fn what_files_on_xfs_become_is_never_missed() {
    under_a_filesystem(FsType::Xfs);
}
