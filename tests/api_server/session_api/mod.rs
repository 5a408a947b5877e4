//! The sidecar's session API (KEP-3314, session design) with real parts: an API server, the
//! released snapshot-controller and csi-snapshotter, and this project's driver on real loop
//! devices. The tests create the sessions themselves, like the session manager.

mod answers;
mod commands;
mod load;
mod older_driver;
mod provoked;
pub mod rig;
mod rows;
mod safety;
mod tokens;
