//! A driver with a long and an empty delta, its Kubernetes objects, and sidecars.

use std::time::Duration;

use anyhow::{Context, Result};
use csi_loopback::proto::csi::v1 as csi;
use csi_loopback::proto::snapshotmetadata as api;

use crate::harness::Driver;
use support::cluster::Cluster;
use support::cluster::access::{Account, rule, sidecar_rules};
use support::cluster::nodes::{LocalAddress, Nodes, certify};
use support::cluster::programs::{Process, Served};
use support::cluster::sidecar::{self, AUDIENCE};
use support::cluster::tls::{Authority, Certificate};

/// Token lifetime, longer than every row.
const VALIDITY: Duration = Duration::from_secs(3600);

/// The implementation of a sidecar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Implementation {
    Ours,
    Released,
}

pub struct Rig<'a> {
    pub cluster: &'a Cluster,
    pub driver: &'a Driver,
    pub namespace: String,
    authority: Authority,
    certificate: Certificate,
    /// The ServiceAccount of the client.
    backup: Account,
    /// Handles of the snapshots of the long delta.
    pub base: String,
    pub target: String,
    _snapshotter: Process,
}

impl<'a> Rig<'a> {
    /// Creates VolumeSnapshots `base` and `target` for the snapshots with these handles, and
    /// `still` and `same` without changes between them.
    pub fn new(cluster: &'a Cluster, driver: &'a Driver, base: &str, target: &str) -> Result<Self> {
        let driver_name = driver.call(csi::GetPluginInfoRequest {})?.name;
        let volume = driver.volume("quiet", 1 << 30)?;
        let (still, same) = (driver.snapshot("still", &volume)?, driver.snapshot("same", &volume)?);
        let snapshotter = cluster.snapshotter(&driver.socket());
        let namespace = cluster.namespace("bench");
        // The released sidecar requires a class.
        let class = cluster.snapshot_class(&driver_name, &[]);
        let all = [("base", base), ("target", target), ("still", &still), ("same", &same)];
        for (name, handle) in all {
            cluster.adopt_snapshot(&namespace, name, &driver_name, handle, Some(&class));
        }
        let authority = Authority::new("bench authority");
        let certificate = authority.certify(cluster.scratch(), "sidecar");
        // Sidecars get the audience from this object.
        cluster.metadata_service(&driver_name, "localhost:1", AUDIENCE, &authority.pem());
        let backup = cluster.account(&namespace, "backup");
        let readable = rule("snapshot.storage.k8s.io", &["volumesnapshots"], &["get"]);
        cluster.grant_in(&namespace, &backup, &[readable]);
        Ok(Self {
            cluster,
            driver,
            namespace,
            authority,
            certificate,
            backup,
            base: base.to_owned(),
            target: target.to_owned(),
            _snapshotter: snapshotter,
        })
    }

    /// Starts a sidecar with a new ServiceAccount.
    pub fn sidecar(&self, implementation: Implementation, flags: &[&str]) -> Result<Sidecar> {
        self.sidecar_at(&self.cluster.server(), implementation, flags)
    }

    /// The same with this address of the API server.
    pub fn sidecar_at(
        &self,
        server: &str,
        implementation: Implementation,
        flags: &[&str],
    ) -> Result<Sidecar> {
        let name = self.cluster.unique("sidecar");
        let account = self.cluster.account(&self.namespace, &name);
        self.cluster.grant(&account, &sidecar_rules());
        let kubeconfig = self.cluster.kubeconfig_at(server, &account);
        let socket = self.driver.socket();
        let served = match implementation {
            Implementation::Ours => {
                sidecar::start(self.cluster, &socket, &kubeconfig, &self.certificate, flags)
            }
            Implementation::Released => {
                self.cluster.released_sidecar(&socket, &kubeconfig, &self.certificate, flags)
            }
        };
        Ok(Sidecar { served, account, node: None })
    }

    /// Starts the sidecar for clients and that of a node, which serves the driver.
    pub fn many_nodes(&self) -> Result<Sidecar> {
        let driver_name = self.driver.call(csi::GetPluginInfoRequest {})?.name;
        let namespace = self.cluster.namespace("nodes");
        let nodes = Nodes::new(self.cluster, &namespace, &driver_name);
        let name = self.cluster.unique("node");
        let directory = self.cluster.scratch();
        let certificate = certify(&nodes.authority, directory, &name);
        let node = nodes.join(&name, &self.driver.socket(), &certificate);
        for snapshot in ["base", "target"] {
            let ready = self.cluster.wait_until_ready(&self.namespace, snapshot);
            nodes.label(&ready, Some(&name));
        }
        let served = nodes.front(&self.certificate, None, &[]);
        let Nodes { front_account: account, address, .. } = nodes;
        Ok(Sidecar { served, account, node: Some((node, address)) })
    }

    /// Runs the clients' tasks for a while, such as closing connections, for which a stopping
    /// sidecar waits.
    pub fn settle(&self, duration: Duration) {
        self.driver.runtime.block_on(async { tokio::time::sleep(duration).await });
    }

    /// The CA bundle of the sidecars.
    pub fn trusted(&self) -> String {
        self.authority.pem()
    }

    /// A new token of the backup application.
    pub fn token(&self) -> String {
        self.cluster.token_for(&self.backup, Some(AUDIENCE), VALIDITY)
    }

    /// The handle of a VolumeSnapshot.
    pub fn handle(&self, name: &str) -> Result<String> {
        let ready = self.cluster.wait_until_ready(&self.namespace, name);
        Some(ready.handle).filter(|handle| !handle.is_empty()).context("no handle")
    }

    pub fn delta(&self, token: &str, base: &str, target: &str) -> api::GetMetadataDeltaRequest {
        sidecar::delta(token.to_owned(), &self.namespace, base, target)
    }
}

pub struct Sidecar {
    pub served: Served,
    pub account: Account,
    /// The sidecar of the node to which it relays, and its address.
    node: Option<(Served, LocalAddress)>,
}

impl Sidecar {
    /// Its own and that of a node's sidecar.
    pub fn pids(&self) -> Vec<u32> {
        let served =
            [Some(&self.served), self.node.as_ref().map(|(node, _)| node)].into_iter().flatten();
        served.map(|one| one.process.pid().as_raw() as u32).collect()
    }

    pub fn pid(&self) -> u32 {
        self.served.process.pid().as_raw() as u32
    }
}
