//! Volumes in containers: runc and containerd on this machine, and a released kubelet that runs
//! pods.

mod kubelet;
mod node_proxy_kubelet;
mod oci_runtime;
mod runtime_stories;
