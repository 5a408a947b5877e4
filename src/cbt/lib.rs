//! Changed block tracking in a cluster (KEP-3314): the three roles between a backup application and
//! a CSI driver. A reader of these needs nothing about mounts or container runtimes.
//!
//! | module | role |
//! |---|---|
//! | [`sidecar`] | in the driver's pod: authenticates and authorizes callers, resolves names, relays the driver's streams |
//! | [`session_manager`] | one per cluster: turns requests into sessions with a token, and ends them |
//! | [`aggregated_api`] | one per cluster: VolumeSnapshotDelta through the API server, one page at a time |
//!
//! The roles share no state and no code except what is in `kubernetes`, `grpc` and `telemetry`:
//! they communicate over sockets and through objects of the cluster, and each may run in several
//! replicas. tests/no_root/architecture.rs checks that none imports another. None knows this
//! project's driver: they work with every CSI driver that has the capability.
//!
//! Where a call goes: a stream of the released API enters at `sidecar::snapshot_metadata`, is
//! checked and resolved by `sidecar::directory`, which is Kubernetes (`access`, `resolve`) or a
//! process without a cluster (`standalone`), and relayed by `sidecar::relay`. A VolumeSnapshotDelta
//! enters at `aggregated_api::routes`, finds its sidecar with `aggregated_api::endpoint`, and gets
//! one page from `sidecar::cbt_http`.

// Input may be hostile, so no code may panic on it. Tests may panic.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod aggregated_api;
pub mod session_manager;
pub mod sidecar;
