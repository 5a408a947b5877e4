//! What KEP-2857 asks of kubelet, with a released kubelet that knows nothing of it: our proxy stands between it and the driver, pods opt
//! in by an annotation, and containerd runs them by csi-loopback-runc in front of runc.

mod downgraded;
mod ends;
mod grown;
mod opted_in;
pub mod rig;
