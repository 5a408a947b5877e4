//! Forwarding by the node proxy, observed on both sides with low-level HTTP/2, so that no library
//! adds or omits anything. Its API server is absent: the proxy does not query it for pods without
//! opt-in.

mod bounds;
mod calls;
mod ends;
mod rig;
