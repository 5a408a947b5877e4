//! csi-loopback: a reference CSI driver whose changed block tracking is real.
//!
//! The tree reads from the bottom up: [`backend`] owns blocks, files and loop devices and knows
//! neither gRPC nor Kubernetes; [`driver`] translates CSI calls to it; [`sidecar`] lets backup applications of a
//! cluster ask a driver, and stands on [`kubernetes`], as do [`session_manager`], [`aggregated_api`] and [`admission`]; [`runtime_ops`] and
//! [`oci_runtime`] hand volumes to container runtimes by the files of [`crust`], [`node_proxy`] does what that asks of kubelet; [`client`] is the commands for people, which speak to
//! drivers and sidecars; [`cli`] names the modes. Arrows point one way.

// One module style: `foo/mod.rs` for a module with children.
#![deny(clippy::self_named_module_files)]
// Input may be hostile, so no code may panic on it. A test reports a failure by a panic.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]
// All of it is in backend/sys.rs, behind plain functions.
#![deny(unsafe_code)]

pub mod admission;
pub mod aggregated_api;
pub mod backend;
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
