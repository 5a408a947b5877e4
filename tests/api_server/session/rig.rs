//! A session manager for one test, and snapshots without a driver, which the manager never calls.
//! The snapshot-controller binds them; this module writes what csi-snapshotter would write.

use std::time::Duration;

use csi_loopback::kubernetes::metadata_service::DRIVER_LABEL;
use csi_loopback::kubernetes::session::{
    SessionState, SnapshotServiceConfiguration, SnapshotSessionData, SnapshotSessionRequest,
};
use csi_loopback::kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};
use k8s_openapi::ByteString;
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use support::cluster::Cluster;
use support::cluster::access::Account;
use support::cluster::manager::{self, Start, manager_rules};
use support::cluster::programs::Served;

/// Address of the sidecar, which does not exist.
pub const ADDRESS: &str = "metadata.csi.svc:6443";
pub const CA: &str = "certificates";

pub struct Rig<'a> {
    pub cluster: &'a Cluster,
    /// Namespaces of the manager, of the applications, of the driver.
    pub home: String,
    pub apps: String,
    pub driver_home: String,
    pub driver: String,
    pub account: Account,
    pub manager: Served,
}

/// Options of a rig.
pub struct Options<'o> {
    pub flags: &'o [&'o str],
    pub rules: Vec<PolicyRule>,
    pub ahead: Option<&'o str>,
    /// Address of the API server for the manager, if not the default.
    pub server: Option<String>,
    /// Whether the driver offers sessions.
    pub configured: bool,
}

impl Default for Options<'_> {
    fn default() -> Self {
        Self { flags: &[], rules: manager_rules(), ahead: None, server: None, configured: true }
    }
}

impl<'a> Rig<'a> {
    pub fn new(cluster: &'a Cluster) -> Self {
        Self::with(cluster, Options::default())
    }

    pub fn with(cluster: &'a Cluster, options: Options<'_>) -> Self {
        let home = cluster.namespace("manager");
        let account = cluster.account(&home, "manager");
        cluster.grant(&account, &options.rules);
        let server = options.server.clone().unwrap_or_else(|| cluster.server());
        let kubeconfig = cluster.kubeconfig_at(&server, &account);
        let start = Start {
            kubeconfig: &kubeconfig,
            namespace: &home,
            flags: options.flags,
            ahead: options.ahead,
        };
        let manager = manager::spawn(cluster, &start);
        let driver = format!("{}.csi.local", cluster.unique("driver"));
        let (apps, driver_home) = (cluster.namespace("apps"), cluster.namespace("driver"));
        let rig = Self { cluster, home, apps, driver_home, driver, account, manager };
        if options.configured {
            rig.configure(&rig.driver, &rig.driver, &rig.driver_home);
        }
        // Times start at a request's creation: it must not be older than the manager.
        cluster.wait_for("the manager leads", || manager::leads(&rig.manager).then_some(()));
        rig
    }

    /// Another manager, which may or may not lead.
    pub fn another(&self, flags: &[&str]) -> Served {
        let kubeconfig = self.cluster.kubeconfig_of(&self.account);
        let start = Start { kubeconfig: &kubeconfig, namespace: &self.home, flags, ahead: None };
        manager::spawn(self.cluster, &start)
    }

    /// Creates a SnapshotServiceConfiguration.
    pub fn configure(&self, name: &str, driver: &str, namespace: &str) {
        let object = json!({
            "metadata": { "name": name, "labels": { DRIVER_LABEL: driver } },
            "spec": {
                "address": ADDRESS,
                "caCert": ByteString(CA.as_bytes().to_vec()),
                "driverNamespace": namespace,
            },
        });
        self.cluster.create(&self.cluster.api::<SnapshotServiceConfiguration>(), object);
    }

    /// A usable VolumeSnapshot of the rig's driver.
    pub fn snapshot(&self, name: &str) -> VolumeSnapshot {
        self.snapshot_of(&self.driver, name)
    }

    pub fn snapshot_of(&self, driver: &str, name: &str) -> VolumeSnapshot {
        let content = self.unready(driver, name);
        self.make_ready(&content, name)
    }

    /// A VolumeSnapshot that is not ready yet; returns the name of its content.
    pub fn unready(&self, driver: &str, name: &str) -> String {
        let content = self.cluster.unique("content");
        let spec = json!({
            "driver": driver,
            "deletionPolicy": "Retain",
            "source": { "snapshotHandle": format!("handle-{name}") },
            "volumeSnapshotRef": { "namespace": self.apps, "name": name },
        });
        let object = json!({ "metadata": { "name": content }, "spec": spec });
        self.cluster.create(&self.cluster.api::<VolumeSnapshotContent>(), object);
        let spec = json!({ "source": { "volumeSnapshotContentName": content } });
        let object = json!({ "metadata": { "name": name }, "spec": spec });
        self.cluster.create(&self.snapshots(), object);
        content
    }

    /// Writes the status like csi-snapshotter.
    pub fn make_ready(&self, content: &str, name: &str) -> VolumeSnapshot {
        let status = json!({
            "snapshotHandle": format!("handle-{name}"),
            "readyToUse": true,
            "creationTime": 1_700_000_000_000_000_000_i64,
        });
        let contents = self.cluster.api::<VolumeSnapshotContent>();
        self.cluster.merge_status(&contents, content, &status);
        self.cluster.wait_for("the VolumeSnapshot is ready", || {
            let found = self.cluster.get(&self.snapshots(), name)?;
            found.ready_content().is_some().then_some(found)
        })
    }

    pub fn snapshots(&self) -> Api<VolumeSnapshot> {
        self.cluster.api_in(&self.apps)
    }

    pub fn requests(&self) -> Api<SnapshotSessionRequest> {
        self.cluster.api_in(&self.apps)
    }

    /// Creates a request.
    pub fn request(&self, name: &str, snapshots: &[&str]) -> SnapshotSessionRequest {
        self.ask(name, json!({ "snapshots": snapshots }))
    }

    pub fn ask(&self, name: &str, spec: Value) -> SnapshotSessionRequest {
        let object = json!({ "metadata": { "name": name }, "spec": spec });
        self.cluster.create(&self.requests(), object)
    }

    pub fn get(&self, name: &str) -> Option<SnapshotSessionRequest> {
        self.cluster.get(&self.requests(), name)
    }

    /// Waits for a state.
    #[track_caller]
    pub fn wait_for(&self, name: &str, state: SessionState) -> SnapshotSessionRequest {
        self.cluster.wait_for(&format!("{name} is {state:?}"), || {
            self.get(name).filter(|found| found.status.is_some() && found.state() == state)
        })
    }

    /// A ready session; returns its token.
    pub fn session(&self, name: &str, snapshots: &[&str]) -> String {
        self.request(name, snapshots);
        token(&self.wait_for(name, SessionState::Ready))
    }

    /// Waits for a state that is final.
    #[track_caller]
    pub fn ended(&self, name: &str) -> SnapshotSessionRequest {
        self.cluster.wait_for(&format!("the end of {name}"), || {
            let is_final = |state| matches!(state, SessionState::Ready | SessionState::Failed);
            self.get(name).filter(|found| found.status.is_some() && is_final(found.state()))
        })
    }

    /// Waits until the request has failed with this reason; returns its error.
    #[track_caller]
    pub fn fails(&self, name: &str, reason: &str) -> String {
        let failed = self.wait_for(name, SessionState::Failed);
        assert_eq!(reason_of(&failed), reason);
        let status = failed.status.unwrap();
        assert_eq!((status.session_token, status.address), (None, None));
        status.error.unwrap()
    }

    /// All data of the rig's driver.
    pub fn data(&self) -> Vec<SnapshotSessionData> {
        self.cluster.list(&self.cluster.api_in(&self.driver_home))
    }

    pub fn data_of(&self, token: &str) -> Option<SnapshotSessionData> {
        self.cluster.get(&self.cluster.api_in::<SnapshotSessionData>(&self.driver_home), token)
    }

    pub fn wait_until_gone(&self, name: &str) {
        self.cluster.wait_until_gone(&self.requests(), name);
    }

    /// Writes the ConfigMap.
    pub fn lifetimes(&self, entries: Value) {
        let api = self.cluster.api_in::<k8s_openapi::api::core::v1::ConfigMap>(&self.home);
        let name = "csi-loopback-session-manager";
        match self.cluster.get(&api, name) {
            Some(_) => drop(self.cluster.merge(&api, name, &json!({ "data": entries }))),
            None => {
                let object = json!({ "metadata": { "name": name }, "data": entries });
                self.cluster.create(&api, object);
            }
        }
    }
}

pub fn token(request: &SnapshotSessionRequest) -> String {
    request.status.as_ref().unwrap().session_token.clone().unwrap()
}

/// The reason of the condition Ready.
pub fn reason_of(request: &SnapshotSessionRequest) -> String {
    let conditions = &request.status.as_ref().unwrap().conditions;
    assert_eq!(conditions.len(), 1, "{}: {conditions:?}", request.name_any());
    assert_eq!(conditions[0].type_, "Ready");
    conditions[0].reason.clone()
}

/// Seconds from the request's creation to its expiry.
pub fn lifetime(request: &SnapshotSessionRequest) -> i64 {
    let end = request.status.as_ref().unwrap().expiration_time.as_ref().unwrap().0.as_second();
    end - request.metadata.creation_timestamp.as_ref().unwrap().0.as_second()
}

/// Time in which a manager could do something wrong.
pub fn a_while() {
    std::thread::sleep(Duration::from_secs(2));
}
