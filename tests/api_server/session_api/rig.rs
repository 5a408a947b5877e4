//! A driver, csi-snapshotter and our sidecar with the session API, in a namespace of its own, all for one test.

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
    /// The sidecar's namespace, in which the sessions are.
    pub home: String,
    // Dropped in this order.
    pub sidecar: Served,
    base: rig::Rig<'a>,
}

/// A rig with a sidecar is a rig.
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

/// What a rig can have otherwise.
pub struct Options<'o> {
    pub driver: &'o [&'o str],
    pub sidecar: &'o [&'o str],
    /// What the sidecar may do with SnapshotSessionData.
    pub verbs: &'o [&'o str],
    /// Where the sidecar finds the API server, if not at its own place.
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

    /// Ends the sidecar and starts it with other flags, at another port.
    pub fn restart_sidecar(&mut self, flags: &[&str]) {
        self.restart_sidecar_at(&self.driver.socket(), flags);
    }

    /// The same in front of what listens at the socket.
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

    pub fn ask(&self, asked: impl Rpc<Answer = Metadata>) -> Result<Metadata, Status> {
        self.cluster.ask_session(&self.sidecar, &self.authority.pem(), asked)
    }

    /// An answer that has to come.
    #[track_caller]
    pub fn ok(&self, asked: impl Rpc<Answer = Metadata>) -> Metadata {
        match self.ask(asked) {
            Ok(answer) => answer,
            Err(status) => panic!("{status:?}\n{}", self.sidecar.process.log()),
        }
    }

    /// Asks for what has to be refused, with this code and with `words` in the message.
    #[track_caller]
    pub fn refused(&self, asked: impl Rpc<Answer = Metadata>, code: Code, words: &str) {
        let said = format!("{asked:?}");
        assert_refused(self.ask(asked), code, words, &said);
    }

    /// The page of metrics.
    pub fn metrics(&self) -> String {
        http(&self.sidecar, "/metrics")
    }

    /// Requests for session data that the sidecar has made, by verb.
    pub fn asked_for_sessions(&self, verb: &str) -> usize {
        let user = self.own.user();
        let concerns = |request: &&serde_json::Value| {
            request["user"]["username"] == user.as_str()
                && request["verb"] == verb
                && request["objectRef"]["resource"] == "snapshotsessiondata"
        };
        self.cluster.requests().iter().filter(concerns).count()
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
