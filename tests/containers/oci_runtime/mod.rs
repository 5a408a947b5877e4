//! The OCI runtime that mounts what was left to it, with the real runc behind it and real filesystems on loop devices.

mod answers;
mod containerd;
mod pass_through;
mod refusals;
mod sub_paths;
mod volumes;
