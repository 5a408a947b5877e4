//! A driver with a unique name, csi-snapshotter, our sidecar and the account of a backup
//! application, for one test with the shared API server.

use std::ops::{Deref, DerefMut};

use csi_loopback::backend::PoolKind;
use csi_loopback::kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};
use csi_loopback::proto::snapshotmetadata as api;
use k8s_openapi::api::rbac::v1::PolicyRule;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::cluster::Cluster;
use crate::cluster::access::{Account, sidecar_rules};
use crate::cluster::programs::Served;
use crate::cluster::rig;
use crate::cluster::tls::{Authority, Certificate};
use api::snapshot_metadata_client::SnapshotMetadataClient;

use crate::cluster::sidecar::{self, start};
pub use crate::cluster::sidecar::{
    AUDIENCE, Answer, Extents, MetadataRequest, client_at, collect, http,
};

pub const CAPACITY: u64 = rig::SIZE;

pub struct Rig<'a> {
    pub authority: Authority,
    pub certificate: Certificate,
    /// The sidecar's account.
    pub own: Account,
    /// The backup application's account.
    pub backup: Account,
    // Dropped in this order.
    pub sidecar: Served,
    base: rig::Rig<'a>,
}

impl<'a> Deref for Rig<'a> {
    type Target = rig::Rig<'a>;

    fn deref(&self) -> &Self::Target {
        &self.base
    }
}

impl DerefMut for Rig<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.base
    }
}

/// Options of a rig.
pub struct Options<'o> {
    pub pool: PoolKind,
    pub driver: &'o [&'o str],
    pub sidecar: &'o [&'o str],
    pub rules: Vec<PolicyRule>,
    /// Whether there is a SnapshotMetadataService.
    pub service: bool,
    /// Another address of the API server for the sidecar.
    pub server: Option<String>,
}

impl Default for Options<'_> {
    fn default() -> Self {
        Self {
            pool: PoolKind::Image,
            driver: &[],
            sidecar: &[],
            rules: sidecar_rules(),
            service: true,
            server: None,
        }
    }
}

impl<'a> Rig<'a> {
    pub fn new(cluster: &'a Cluster) -> Self {
        Self::with(cluster, Options::default())
    }

    pub fn with(cluster: &'a Cluster, options: Options<'_>) -> Self {
        let base = rig::Rig::with(cluster, options.pool, options.driver);
        let authority = Authority::new("backup authority");
        let certificate = authority.certify(base.driver.scratch(), "sidecar");
        let own = cluster.account(&base.namespace, "sidecar");
        cluster.grant(&own, &options.rules);
        let server = options.server.clone().unwrap_or_else(|| cluster.server());
        let kubeconfig = cluster.kubeconfig_at(&server, &own);
        let sidecar =
            start(cluster, &base.driver.socket(), &kubeconfig, &certificate, options.sidecar);
        if options.service {
            cluster.metadata_service(
                &base.driver_name,
                &sidecar.address(),
                AUDIENCE,
                &authority.pem(),
            );
        }
        let backup = cluster.account(&base.namespace, "backup");
        let readable =
            crate::cluster::access::rule("snapshot.storage.k8s.io", &["volumesnapshots"], &["get"]);
        cluster.grant_in(&base.namespace, &backup, &[readable]);
        Self { authority, certificate, own, backup, sidecar, base }
    }

    /// Starts a second sidecar.
    pub fn another_sidecar(&self, flags: &[&str]) -> Served {
        let kubeconfig = self.cluster.kubeconfig_of(&self.own);
        start(self.cluster, &self.driver.socket(), &kubeconfig, &self.certificate, flags)
    }

    /// Restarts the sidecar with other flags, on another port.
    pub fn restart_sidecar(&mut self, flags: &[&str]) {
        self.sidecar.process.stop();
        self.sidecar = self.another_sidecar(flags);
    }

    /// A token of the backup application, for the sidecar.
    pub fn token(&self) -> String {
        self.cluster.token(&self.backup, Some(AUDIENCE))
    }

    pub fn allocated(&self, name: &str) -> api::GetMetadataAllocatedRequest {
        sidecar::allocated(self.token(), &self.namespace, name)
    }

    /// A request for a delta. If `base` is the name of a VolumeSnapshot, the request has its
    /// handle.
    pub fn delta(&self, base: &str, target: &str) -> api::GetMetadataDeltaRequest {
        self.delta_from(self.handle(base).as_deref().unwrap_or(base), target)
    }

    fn handle(&self, name: &str) -> Option<String> {
        let snapshot =
            self.cluster.get(&self.cluster.api_in::<VolumeSnapshot>(&self.namespace), name)?;
        let content = snapshot.status?.bound_volume_snapshot_content_name?;
        let content = self.cluster.get(&self.cluster.api::<VolumeSnapshotContent>(), &content)?;
        content.status?.snapshot_handle
    }

    /// A request for a delta with this base_snapshot_id.
    pub fn delta_from(&self, base: &str, target: &str) -> api::GetMetadataDeltaRequest {
        sidecar::delta(self.token(), &self.namespace, base, target)
    }

    pub fn client(&self) -> SnapshotMetadataClient<Channel> {
        client_at(self.cluster, &self.sidecar, &self.authority.pem())
    }

    /// Calls the sidecar and reads the whole stream.
    pub fn ask(&self, request: impl Into<MetadataRequest>) -> Result<Answer, Status> {
        let client = self.client();
        self.cluster.block_on(collect(client, request.into()))
    }

    /// The extents of a call that must succeed.
    #[track_caller]
    pub fn extents(&self, request: impl Into<MetadataRequest>) -> Extents {
        match self.ask(request) {
            Ok(answer) => answer.extents(),
            Err(status) => panic!("{status:?}\n{}", self.sidecar.process.log()),
        }
    }

    /// Asserts that a call fails with this code and with `words` in its message.
    #[track_caller]
    pub fn refused(&self, request: impl Into<MetadataRequest>, code: Code, words: &str) {
        crate::driver::assert_refused(self.ask(request), code, words, "the sidecar");
    }

    /// The response of the HTTP endpoint, with status line and headers.
    pub fn http(&self, page: &str) -> String {
        http(&self.sidecar, page)
    }

    /// The value of the metrics line that starts with `line`; 0 if missing.
    pub fn metric(&self, line: &str) -> f64 {
        let page = self.http("/metrics");
        let found = page.lines().find_map(|one| one.strip_prefix(line));
        found.and_then(|value| value.trim().parse().ok()).unwrap_or_default()
    }
}
