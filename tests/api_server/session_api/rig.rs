//! A driver, csi-snapshotter and our sidecar with the session API, in a separate namespace, for one
//! test.

use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::time::Duration;

use csi_loopback::backend::PoolKind;
use tonic::{Code, Status};

use support::cluster::Cluster;
use support::cluster::access::{Account, rule, sidecar_rules};
use support::cluster::programs::Served;
use support::cluster::rig;
use support::cluster::session::{HOUR, session_rules};
use support::cluster::sidecar::{AUDIENCE, http, start};
use support::cluster::storage::Ready;
use support::cluster::tls::{Authority, Certificate};
use support::driver::assert_refused;
use support::requests::{Metadata, Rpc};

pub const CAPACITY: u64 = rig::SIZE;

pub struct Rig<'a> {
    pub authority: Authority,
    pub certificate: Certificate,
    /// The sidecar's account.
    pub own: Account,
    /// The namespace of the sidecar and its sessions.
    pub home: String,
    // Dropped in this order.
    pub sidecar: Served,
    base: rig::Rig<'a>,
}

/// Dereferences to the sidecar's rig.
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
    pub driver: &'o [&'o str],
    pub sidecar: &'o [&'o str],
    /// The sidecar's verbs for SnapshotSessionData.
    pub verbs: &'o [&'o str],
    /// Address of the API server for the sidecar, if not the default.
    pub server: Option<String>,
}

impl Default for Options<'_> {
    fn default() -> Self {
        Self { driver: &[], sidecar: &[], verbs: &["get", "list", "watch"], server: None }
    }
}

impl<'a> Rig<'a> {
    pub fn new(cluster: &'a Cluster) -> Self {
        Self::with(cluster, Options::default())
    }

    pub fn with(cluster: &'a Cluster, options: Options<'_>) -> Self {
        let base = rig::Rig::with(cluster, PoolKind::Image, options.driver);
        let authority = Authority::new("backup authority");
        let certificate = authority.certify(base.driver.scratch(), "sidecar");
        let home = cluster.namespace("driver");
        let own = cluster.account(&home, "sidecar");
        cluster.grant(&own, &sidecar_rules());
        cluster.grant_in(&home, &own, &session_rules(options.verbs));
        let server = options.server.clone().unwrap_or_else(|| cluster.server());
        let socket = base.driver.socket();
        let sidecar =
            serve(cluster, (&server, &own, &home), &socket, &certificate, options.sidecar);
        Self { authority, certificate, own, home, sidecar, base }
    }

    /// Restarts the sidecar with other flags at another port.
    pub fn restart_sidecar(&mut self, flags: &[&str]) {
        self.restart_sidecar_at(&self.driver.socket(), flags);
    }

    /// The same, for a driver at this socket.
    pub fn restart_sidecar_at(&mut self, socket: &Path, flags: &[&str]) {
        self.sidecar.process.stop();
        let server = self.cluster.server();
        let place = (server.as_str(), &self.own, self.home.as_str());
        self.sidecar = serve(self.cluster, place, socket, &self.certificate, flags);
    }

    /// A session for these snapshots; returns its token.
    pub fn session(&self, snapshots: &[&Ready]) -> String {
        self.session_for(snapshots, HOUR)
    }

    pub fn session_for(&self, snapshots: &[&Ready], lifetime: Duration) -> String {
        self.cluster.session(&self.home, &self.driver_name, snapshots, lifetime)
    }

    pub fn ask(&self, request: impl Rpc<Response = Metadata>) -> Result<Metadata, Status> {
        self.cluster.call_session(&self.sidecar, &self.authority.pem(), request)
    }

    /// A response that must succeed.
    #[track_caller]
    pub fn ok(&self, request: impl Rpc<Response = Metadata>) -> Metadata {
        match self.ask(request) {
            Ok(answer) => answer,
            Err(status) => panic!("{status:?}\n{}", self.sidecar.process.log()),
        }
    }

    /// A request that must be refused with this code and with `words` in the message.
    #[track_caller]
    pub fn refused(&self, request: impl Rpc<Response = Metadata>, code: Code, words: &str) {
        let said = format!("{request:?}");
        assert_refused(self.ask(request), code, words, &said);
    }

    /// The metrics page.
    pub fn metrics(&self) -> String {
        http(&self.sidecar, "/metrics")
    }

    /// The sidecar's requests for session data, by verb.
    pub fn session_requests(&self, verb: &str) -> usize {
        let user = self.own.user();
        self.cluster.count_requests(|request| {
            request["user"]["username"] == user.as_str()
                && request["verb"] == verb
                && request["objectRef"]["resource"] == "snapshotsessiondata"
        })
    }

    /// A backup application's account for the released API.
    pub fn backup(&self) -> Account {
        let backup = self.cluster.account(&self.namespace, "backup");
        let readable = rule("snapshot.storage.k8s.io", &["volumesnapshots"], &["get"]);
        self.cluster.grant_in(&self.namespace, &backup, &[readable]);
        backup
    }
}

fn serve(
    cluster: &Cluster,
    (server, own, home): (&str, &Account, &str),
    socket: &Path,
    certificate: &Certificate,
    flags: &[&str],
) -> Served {
    let kubeconfig = cluster.kubeconfig_at(server, own);
    let mut all = vec!["--namespace", home, "--audience", AUDIENCE];
    if !flags.iter().any(|flag| flag.starts_with("--session-api")) {
        all.push("--session-api");
    }
    all.extend(flags);
    start(cluster, socket, &kubeconfig, certificate, &all)
}
