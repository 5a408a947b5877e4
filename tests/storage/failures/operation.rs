//! The operations of a sequence. As in [`crate::oracle::operation`], an operation names no objects,
//! so every part of a sequence can run by itself.

use proptest::prelude::*;

use crate::oracle::operation::{Pick, pick};
use crate::power_loss::cache::{BLOCKS_APART, Fault};

#[derive(Debug, Clone, Copy)]
pub enum Operation {
    /// Writes blocks of 4 KiB, with direct I/O or through the page cache without a flush.
    Write {
        volume: Pick,
        at: u16,
        blocks: u8,
        direct: bool,
    },
    CreateVolume,
    DeleteVolume(Pick),
    Snapshot(Pick),
    DeleteSnapshot(Pick),
    /// Lists of volumes and snapshots.
    List,
    /// A delta between two snapshots of a volume.
    Delta {
        volume: Pick,
        snapshots: [Pick; 2],
    },
    /// Unpublishes, unstages, stages and publishes the volume.
    Restage(Pick),
    /// The disk fails from now on.
    Disk(Fault),
    /// The filesystem of the pool's disk is filled.
    Fill,
    /// The pool's filesystem shuts down, as it does when it cannot write its log.
    ShutDown,
    /// The disk works and has free space.
    Repair,
    DropPageCache,
    /// The driver cannot open more files.
    NoDescriptors,
    /// The driver is killed, and restarts at once or later.
    Kill {
        starts: bool,
    },
    Stop {
        starts: bool,
    },
    Start,
    /// The machine crashes and reboots.
    Reboot,
}

pub fn operation() -> BoxedStrategy<Operation> {
    let write = (pick(), 0..1000u16, 1..16u8, any::<bool>())
        .prop_map(|(volume, at, blocks, direct)| Operation::Write { volume, at, blocks, direct });
    let fault = prop_oneof![
        Just(Fault::Flush),
        Just(Fault::Read),
        (0..BLOCKS_APART).prop_map(Fault::Blocks),
        Just(Fault::Write),
        Just(Fault::Full),
    ];
    prop_oneof![
        24 => write,
        2 => Just(Operation::CreateVolume),
        1 => pick().prop_map(Operation::DeleteVolume),
        18 => pick().prop_map(Operation::Snapshot),
        6 => pick().prop_map(Operation::DeleteSnapshot),
        5 => Just(Operation::List),
        5 => (pick(), [pick(), pick()])
            .prop_map(|(volume, snapshots)| Operation::Delta { volume, snapshots }),
        4 => pick().prop_map(Operation::Restage),
        3 => fault.prop_map(Operation::Disk),
        3 => Just(Operation::Fill),
        1 => Just(Operation::ShutDown),
        7 => Just(Operation::Repair),
        2 => Just(Operation::DropPageCache),
        1 => Just(Operation::NoDescriptors),
        4 => prop::bool::weighted(0.8).prop_map(|starts| Operation::Kill { starts }),
        4 => prop::bool::weighted(0.8).prop_map(|starts| Operation::Stop { starts }),
        8 => Just(Operation::Start),
        5 => Just(Operation::Reboot),
    ]
    .boxed()
}
