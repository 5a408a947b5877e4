//! What the node proxy does when others do not do their part: an API server that is away, says nothing or is behind, a proxy that is
//! killed in the middle of a call, a state directory that is damaged, full or read-only. Pods that never opted in notice none of it.

mod api_server;
mod host;
mod killed;
mod state_dir;
