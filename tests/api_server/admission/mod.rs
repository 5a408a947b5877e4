//! The admission webhooks as a real API server calls them, with real pods: nothing runs them, which nobody needs here.

mod deferral;
mod opt_in;
mod policy;
mod read_only;
mod rig;
mod service;
mod undone;
