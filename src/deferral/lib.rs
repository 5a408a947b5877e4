//! Runtime assisted mounting (KEP-2857): a container runtime mounts a volume for its container, and
//! the node's host never does. The driver's part is in `driver` and `storage`.
//!
//! | module | owns |
//! |---|---|
//! | [`crust`] | the files that hand a volume from crust_ops to a container runtime |
//! | [`runtime_ops`] | the role `runtime-ops`, crust_ops: writes these files for a driver, which calls it over a socket |
//! | [`oci_runtime`] | the role `oci-runtime`: reads them and mounts, then runs the next runtime |
//! | [`node_proxy`] | the role `node-proxy`, kubelet's part: between kubelet and any CSI driver |
//!
//! The roles run as separate processes, each with its own lifetime, and none imports another
//! (tests/no_root/architecture.rs checks it). crust_ops and the OCI runtime share the files of
//! [`crust`], whose content each treats as untrusted; the node proxy only reads who else trusts
//! them.
//!
//! Promise: if this program is uncertain, a container does not start. Two kernels that mount one
//! filesystem destroy it, and a container that writes to its own disk instead of its volume loses
//! data.

// Input may be hostile, so no code may panic on it. Tests may panic.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod crust;
pub mod node_proxy;
pub mod oci_runtime;
pub mod runtime_ops;
