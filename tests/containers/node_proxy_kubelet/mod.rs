//! KEP-2857 with a released kubelet, which does not implement it: the proxy runs between kubelet
//! and the driver, pods opt in with the annotation, and containerd runs them with csi-loopback-runc
//! and runc.

mod downgraded;
mod ends;
mod grown;
mod opted_in;
pub mod rig;
