//! The proofs about stored data: pools of every kind, as root, through the backend and through the driver. They need
//! loop devices and filesystem tools, and nothing else.

mod attachment;
mod bases;
mod corruption;
mod earlier_versions;
mod failures;
mod filesystems;
mod full_disk;
mod full_operations;
mod full_pool;
mod image_room;
mod large_blocks;
mod lost_pool;
mod lost_writes;
mod oracle;
mod pool_check;
mod power_loss;
mod tracking;
