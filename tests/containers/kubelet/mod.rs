//! Inline ephemeral volumes (KEP-596) in pods that run: a released kubelet and containerd on this machine, and our driver
//! registered with them as on any node.

mod content;
mod cost;
mod ends;
mod life;
