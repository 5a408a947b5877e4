//! The sidecar with real parts: an API server with real tokens and roles, the released
//! snapshot-controller and csi-snapshotter, and this project's driver on real loop devices.

mod answers;
mod backup;
mod commands;
mod dialects;
mod host_path;
mod movers;
mod provoked;
mod refusals;
mod relay;
mod released;
mod safety;
mod scenarios;
