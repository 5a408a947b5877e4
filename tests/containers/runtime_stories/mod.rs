//! Runtime assisted mounting (KEP-2857) in running pods: stories of the proposal with a released
//! kubelet and containerd, csi-loopback-runc with runc, and our driver, crust_ops, node proxy and
//! webhooks. Volumes are PersistentVolumeClaims. Downgrades and restarts: `node_proxy_kubelet`.

mod deferred;
mod fallback;
