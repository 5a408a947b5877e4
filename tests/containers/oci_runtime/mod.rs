//! The OCI runtime with deferred volumes: the real runc as next runtime, and real filesystems on
//! loop devices.

mod answers;
mod containerd;
mod fails_closed;
mod pass_through;
mod refusals;
mod sub_paths;
mod volumes;
