//! cbt-http against the real thing: a real API server with real tokens, roles and leases, the driver of this project on real
//! loop devices; and a driver that is made for it where ours would never behave so.

mod door;
mod leaders;
mod pages;
mod provoked;
mod published;
mod rig;
