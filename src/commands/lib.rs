//! The commands for users. They call a driver's socket or a cluster as any other client does, and
//! work with other drivers as far as CSI goes.
//!
//! | module | owns |
//! |---|---|
//! | [`client`] | `volume`, `snapshot`, `base`, `pool`: what a user types and reads |
//! | [`backup`] | `backup` and `restore`: a repository of full and incremental backups |
//! | [`node`] | `node forget`: objects of a node that is gone |
//! | [`conformance`] | rules that judge any driver, the situations that they share, and the door to it |
//!
//! The others use [`client`]'s connections, listings and output; [`client`] knows none of them.
//! The storage backend is used only for what is read or written without a driver: `pool check`, block
//! devices, the comparison of extents.

// Input may be hostile, so no code may panic on it. Tests may panic.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod backup;
pub mod client;
pub mod conformance;
pub mod node;
