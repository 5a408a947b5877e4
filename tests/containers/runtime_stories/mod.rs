//! Runtime assisted mounting (KEP-2857) in running pods: the proposal's six stories with a released
//! kubelet and containerd, csi-loopback-runc with runc, and our driver, crust_ops, node proxy and
//! webhooks. Volumes are PersistentVolumeClaims.

mod deferred;
mod downgraded;
mod ends;
mod fallback;
