//! Inline ephemeral volumes (KEP-596) in running pods, with a released kubelet and containerd on
//! this machine and the driver registered as on any node.

mod content;
mod ends;
mod life;
