//! Runtime assisted mounting (KEP-2857) in pods that run: the proposal's six stories, one by one, with a released kubelet and
//! containerd, runc behind csi-loopback-runc, and our driver, crust_ops, node proxy and webhooks. Volumes are PersistentVolumeClaims.

mod deferred;
mod downgraded;
mod ends;
mod fallback;
