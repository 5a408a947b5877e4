//! The sidecar against the real thing: a real API server with real tokens and roles, the released
//! snapshot-controller and csi-snapshotter, the driver of this project on real loop devices.

mod answers;
mod bases;
mod commands;
mod provoked;
mod refusals;
mod relay;
mod released;
mod safety;
