//! The session manager against a real API server, with the released snapshot-controller.

mod commands;
mod expiry;
mod failures;
mod life;
pub mod rig;
mod several;
