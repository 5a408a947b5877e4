//! The node proxy when other parts fail: an unavailable, silent or slow API server, a proxy that is
//! killed during a call, a damaged, full or read-only state directory. Pods without opt-in are
//! never affected.

mod api_server;
mod host;
mod killed;
mod state_dir;
