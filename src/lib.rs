//! csi-loopback: a reference CSI driver with real changed block tracking, and by `--mode` every
//! other process of the proposals that it implements.
//!
//! The code is in the members of the workspace, the directories of `src/`. Each depends only on
//! those above it in this table, and the compiler checks it: there is no other way to them.
//!
//! | member | owns |
//! |---|---|
//! | [`common`] | fail points, ids, quantities, attributes of inline volumes; no async |
//! | [`storage`] | blocks, files, loop devices, change records; no async, gRPC or Kubernetes |
//! | [`telemetry`] | logs, metrics, health, limits and shutdown of a process that serves |
//! | [`grpc`] | messages, sockets and calls |
//! | [`kubernetes`] | the Kubernetes API: client, watches, leader election, TLS, objects |
//! | [`driver`] | the roles `driver` and `freeze-guard`: CSI calls, translated to [`storage`] |
//! | [`cbt`] | the roles `sidecar`, `session-manager`, `aggregated-api`: changed blocks in a cluster |
//! | [`admission`] | the role `admission`: webhooks for inline and deferred volumes |
//! | [`deferral`] | the roles `runtime-ops`, `oci-runtime`, `node-proxy`: mounts by container runtimes |
//! | [`commands`] | the commands for users, which call drivers and sidecars |
//!
//! This package is the binary: [`cli`] has the modes and commands as data, and [`dev`] starts a
//! driver and a sidecar in one process. Its library exists for tests, benchmarks, examples and fuzz
//! targets, which find all parts here under one name.

// One module style: `foo/mod.rs` for a module with children.
#![deny(clippy::self_named_module_files)]
// Input may be hostile, so no code may panic on it. Tests may panic.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]
// All unsafe code is in src/storage/sys, wrapped in safe functions.
#![deny(unsafe_code)]

pub mod cli;
pub mod dev;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;

pub use cbt::{aggregated_api, session_manager, sidecar};
pub use commands::{backup, client, conformance, node};
pub use common::{fail_point, ids, inline, quantity};
pub use deferral::{crust, node_proxy, oci_runtime, runtime_ops};
pub use driver::freeze_guard;
pub use grpc::proto;
pub use storage as backend;
pub use {admission, driver, grpc, kubernetes, telemetry};
