//! The common setup of tests: our driver with csi-snapshotter, and a volume with a claim.

use std::path::PathBuf;

use csi_loopback::backend::PoolKind;
use k8s_openapi::api::rbac::v1::PolicyRule;

use super::Cluster;
use super::access::Account;
use super::programs::Process;
use super::storage::Ready;
use crate::driver::{Driver, block};
use crate::{BLOCK, MIB, pattern, write_direct};

/// Bytes of the volume.
pub const SIZE: u64 = 16 * MIB;

/// The claim's name.
pub const CLAIM: &str = "data";

pub struct Rig<'a> {
    pub cluster: &'a Cluster,
    /// A unique namespace.
    pub namespace: String,
    /// A unique name, so that objects of other tests do not affect the driver.
    pub driver_name: String,
    /// A VolumeSnapshotClass without a secret.
    pub class: String,
    /// The CSI handle of a raw block volume of [`SIZE`] bytes.
    pub volume: String,
    // Dropped in this order.
    pub snapshotter: Process,
    pub driver: Driver,
}

impl<'a> Rig<'a> {
    pub fn new(cluster: &'a Cluster) -> Self {
        Self::with(cluster, PoolKind::Image, &[])
    }

    /// With these flags of the driver.
    pub fn with(cluster: &'a Cluster, kind: PoolKind, flags: &[&str]) -> Self {
        let driver_name = format!("{}.csi.local", cluster.unique("loopback"));
        let driver = Driver::with(kind, &[&["--driver-name", &driver_name], flags].concat());
        let snapshotter = cluster.snapshotter(&driver.socket());
        let namespace = cluster.namespace("apps");
        let volume = driver.volume(CLAIM, SIZE, block());
        cluster.claim(&namespace, CLAIM, &driver_name, &volume, SIZE);
        let class = cluster.snapshot_class(&driver_name, &[]);
        Self { cluster, namespace, driver_name, class, volume, snapshotter, driver }
    }

    /// Writes these blocks of the volume, with different content for each seed.
    pub fn write(&self, seed: u64, blocks: impl IntoIterator<Item = u64>) {
        self.driver.with_device(&self.volume, |device| {
            for block in blocks {
                write_direct(device, block * BLOCK, &pattern(seed + block, BLOCK as usize));
            }
        });
    }

    /// Takes a snapshot of the claim and waits until it is ready.
    pub fn snapshot(&self, name: &str) -> Ready {
        self.cluster.snapshot(&self.namespace, name, CLAIM, &self.class)
    }

    /// A ServiceAccount in the namespace with a ClusterRole of these rules, and its kubeconfig.
    pub fn account(&self, name: &str, rules: &[PolicyRule]) -> (Account, PathBuf) {
        let account = self.cluster.account(&self.namespace, name);
        self.cluster.grant(&account, rules);
        let kubeconfig = self.cluster.kubeconfig_of(&account);
        (account, kubeconfig)
    }
}
