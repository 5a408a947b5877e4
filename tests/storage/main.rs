//! Tests of stored data: pools of every kind, through the backend and the driver. They need root,
//! loop devices and filesystem tools.

mod attachment;
mod bases;
mod clone_ahead;
mod corruption;
mod failures;
mod features;
mod filesystems;
mod former_release;
mod full_disk;
mod full_operations;
mod growth;
mod image_room;
mod large_blocks;
mod lost_pool;
mod lost_writes;
mod oracle;
mod pool_check;
mod power_loss;
#[cfg(feature = "failpoints")]
mod readers;
mod sectors;
mod tracking;
