//! The common setup of tests: our driver with csi-snapshotter, and a volume with a claim.

use std::path::{Path, PathBuf};

use csi_loopback::backend::PoolKind;
use k8s_openapi::api::rbac::v1::PolicyRule;

use super::Cluster;
use super::access::Account;
use super::programs::{Process, stdout_of};
use super::storage::Ready;
use crate::driver::{Driver, Source, block};
use crate::{BLOCK, MIB, path, pattern, write_direct};

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

    /// Lets the released verifier rebuild the VolumeSnapshot `second`, which has this handle: from
    /// nothing, or with `base`, the arguments for the first one, whose blocks these are, written
    /// with the seed 1. The verifier does compare: it finds an unreported difference.
    pub fn verify(&self, kubeconfig: &Path, base: &[&str], blocks: &[u64], handle: &str) {
        let name = |what: &str| self.cluster.unique(what);
        let copy = self.driver.copy(&name("source"), Source::Snapshot(handle), block());
        let empty = self.driver.volume(&name("target"), SIZE, block());
        let [source, target] = [&copy, &empty].map(|one| self.driver.publish(one, &block()));
        if !base.is_empty() {
            for block in blocks {
                write_direct(&target, block * BLOCK, &pattern(1 + block, BLOCK as usize));
            }
        }
        let devices = ["-src", path(&source), "-tgt", path(&target)];
        let arguments = [&["-n", &self.namespace, "-s", "second"], &devices[..], base].concat();
        stdout_of(self.cluster.verifier(kubeconfig, &arguments));
        write_direct(&target, 50 * BLOCK, &pattern(3, BLOCK as usize));
        let output = self.cluster.verifier(kubeconfig, &arguments);
        assert!(String::from_utf8_lossy(&output.stderr).contains("do not match"), "{output:?}");
        self.driver.take_down(&copy);
        self.driver.take_down(&empty);
    }
}
