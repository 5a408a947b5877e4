//! cbt-http with real parts: an API server with real tokens, roles and leases, and this project's
//! driver on real loop devices; or a fake driver for behavior that ours never shows.

mod door;
mod leaders;
mod pages;
mod provoked;
mod published;
mod rig;
