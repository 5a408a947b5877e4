//! The session API of the sidecar (KEP-3314, session design) against the real thing: a real API server, the released
//! snapshot-controller and csi-snapshotter, the driver of this project on real loop devices. The sessions are made by
//! hand, as the session manager would.

mod answers;
mod commands;
mod load;
mod older_driver;
mod provoked;
mod rig;
mod rows;
mod safety;
mod tokens;
