//! csi-loopback: a reference CSI driver with real changed block tracking.
//!
//! [`backend`] owns blocks, files and loop devices and uses neither gRPC nor Kubernetes; [`driver`]
//! translates CSI calls to it. [`sidecar`] gives the backup applications of a cluster access to a
//! driver; it is built on [`kubernetes`], like [`session_manager`], [`aggregated_api`] and
//! [`admission`]. [`runtime_ops`] and [`oci_runtime`] pass volumes to container runtimes in the
//! files of [`crust`], and [`node_proxy`] implements kubelet's part of it. [`client`] has the
//! commands for users, which call drivers and sidecars; [`cli`] defines the modes. Dependencies
//! point one way.

// One module style: `foo/mod.rs` for a module with children.
#![deny(clippy::self_named_module_files)]
// Input may be hostile, so no code may panic on it. Tests may panic.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]
// All unsafe code is in backend/sys, wrapped in safe functions.
#![deny(unsafe_code)]

pub mod admission;
pub mod aggregated_api;
pub mod backend;
pub mod backup;
pub mod cli;
pub mod client;
pub mod crust;
#[cfg(test)]
mod documented;
pub mod driver;
pub mod fail_point;
pub mod freeze_guard;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod grpc;
pub mod ids;
pub mod inline;
pub mod kubernetes;
pub mod node_proxy;
pub mod oci_runtime;
pub mod proto;
pub mod quantity;
pub mod runtime_ops;
pub mod session_manager;
pub mod sidecar;
pub mod telemetry;
