//! What all parts share, below everything else. No async, no gRPC, no Kubernetes, no I/O except
//! that of fail points: every other member may use it, also [the storage backend], and a change
//! here compiles everything again. So what belongs to one part stays there.
//!
//! | module | owns |
//! |---|---|
//! | [`fail_point`] | places where tests interrupt an operation; absent from release builds |
//! | [`ids`] | the form of the ids of volumes, snapshots and groups: a name can be read from an id |
//! | [`inline`] | the attributes of inline volumes, which the driver and the webhooks both parse |
//! | [`quantity`] | sizes with units, as Kubernetes writes them |
//! | [`text`] | bounds of texts that may contain what a client sent |
//! | `documented` | reads the tables of docs/, for tests that compare them with the code |
//!
//! Features: `failpoints` compiles fail points in, and each member with fail points passes it on.
//! `testing` adds what unit tests of other members use: they fail the points of a thread
//! (`fail_point::in_tests`).
//!
//! [the storage backend]: ../../docs/design/architecture.md

// Input may be hostile, so no code may panic on it. Tests may panic.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

#[cfg(feature = "testing")]
pub mod documented;
pub mod fail_point;
pub mod ids;
pub mod inline;
pub mod quantity;
pub mod text;
