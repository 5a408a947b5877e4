//! Failures as operations: disks that are full, fail or lose unflushed data, a dropped page cache,
//! a driver that is killed, stopped or out of descriptors, and reboots, at random between ordinary
//! operations. Acknowledged data must exist in the end. A sequence that violates this is shortened
//! and printed.
//!
//! `ORACLE_SEED`, `ORACLE_CASES` and `ORACLE_POOL` are as for [`super::oracle`].
//!
//! | module | owns |
//! |---|---|
//! | `operation` | the random operations and failures |
//! | `rig` | the disk, its filesystem, the driver, and their failures |
//! | `world` | a run and the invariants |

mod operation;
mod rig;
mod world;

use csi_loopback::backend::PoolKind;

use super::oracle::explore::explore_with;
use super::oracle::operation::Pick;
use support::have_root;

/// Operations in a sequence.
const LENGTH: usize = 60;

fn nothing_acknowledged_is_lost(kind: PoolKind) {
    if !have_root() || !super::oracle::kinds().any(|wanted| wanted == kind) {
        return;
    }
    let on = format!("failures on {kind} pools");
    explore_with(&on, 6, LENGTH, operation::operation(), |_, operations| {
        world::World::run(kind, operations)
    });
}

#[test]
#[ignore = "full tier"]
fn failures_lose_no_acknowledged_data_on_a_reflink_pool() {
    nothing_acknowledged_is_lost(PoolKind::Reflink);
}

#[test]
fn failures_lose_no_acknowledged_data_on_an_image_pool() {
    nothing_acknowledged_is_lost(PoolKind::Image);
}

#[test]
#[ignore = "full tier"]
fn failures_lose_no_acknowledged_data_on_a_copy_pool() {
    nothing_acknowledged_is_lost(PoolKind::Copy);
}

#[test]
fn lists_work_on_a_full_disk_without_descriptors() {
    if have_root() {
        use operation::Operation::{Fill, List, NoDescriptors, Repair};
        super::oracle::kinds().for_each(|kind| {
            world::World::run(
                kind,
                &[NoDescriptors, Fill, NoDescriptors, List, Repair, NoDescriptors],
            );
        });
    }
}

#[test]
fn deletions_work_after_a_restart_on_a_full_disk() {
    if have_root() {
        use operation::Operation::{DeleteSnapshot, Fill, Kill, Snapshot, Start, Stop};
        let first = Pick::first();
        // The stop shortens the catalog, and a start after a kill needs more pages than before.
        let operations = [
            Snapshot(first),
            Snapshot(first),
            Snapshot(first),
            Stop { starts: true },
            DeleteSnapshot(first),
            Fill,
            Stop { starts: false },
            Fill,
            Start,
            Snapshot(first),
            Kill { starts: true },
            DeleteSnapshot(first),
        ];
        super::oracle::kinds().for_each(|kind| {
            world::World::run(kind, &operations);
        });
    }
}
