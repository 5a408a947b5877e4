//! Failures as operations: disks that run full, fail or lose what they did not flush, a page cache that is dropped, a
//! driver that is killed, stopped or out of descriptors, and reboots, at random between ordinary operations. What was
//! acknowledged is there in the end, whatever the order. A sequence that breaks this is shortened and printed.
//!
//! `ORACLE_SEED`, `ORACLE_CASES` and `ORACLE_POOL` are as for [`super::oracle`].
//!
//! | module | owns |
//! |---|---|
//! | `operation` | what can happen, drawn at random |
//! | `rig` | the disk, the filesystem on it and the driver, and what disturbs them |
//! | `world` | a run, and the laws |

mod operation;
mod rig;
mod world;

use csi_loopback::backend::PoolKind;

use super::oracle::explore::explore_with;
use support::have_root;

/// Operations in a sequence.
const LENGTH: usize = 60;

fn nothing_acknowledged_is_lost(kind: PoolKind) {
    if !have_root() || !super::oracle::kinds().any(|wanted| wanted == kind) {
        return;
    }
    let on = format!("failures on {kind} pools");
    explore_with(&on, 8, LENGTH, operation::operation(), |_, operations| {
        world::World::run(kind, operations)
    });
}

#[test]
#[ignore = "full tier"]
fn no_sequence_of_failures_loses_what_a_reflink_pool_acknowledged() {
    nothing_acknowledged_is_lost(PoolKind::Reflink);
}

#[test]
fn no_sequence_of_failures_loses_what_an_image_pool_acknowledged() {
    nothing_acknowledged_is_lost(PoolKind::Image);
}

#[test]
#[ignore = "full tier"]
fn no_sequence_of_failures_loses_what_a_copy_pool_acknowledged() {
    nothing_acknowledged_is_lost(PoolKind::Copy);
}
