//! A driver with all three APIs: sidecar, session manager, aggregated API server. The sidecar
//! publishes its objects itself.

use std::ops::Deref;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, SystemTime};
use support::driver::binary;

use csi_loopback::backend::PoolKind;
use csi_loopback::kubernetes::client::{Rate, connect_as_user_once};
use csi_loopback::kubernetes::driver_discovery::DriverDiscovery;
use csi_loopback::kubernetes::snapshot_delta::VolumeSnapshotDelta;
use kube::Client;
use serde_json::{Value, json};

use support::cluster::Cluster;
use support::cluster::access::{Account, backup_rules, rule, sidecar_rules};
use support::cluster::aggregated::{Aggregated, path_in};
use support::cluster::cbt_http::cbt_http_rules;
use support::cluster::manager;
use support::cluster::programs::{Served, free_port, stdout_of};
use support::cluster::rig;
use support::cluster::session::session_rules;
use support::cluster::sidecar::{AUDIENCE, http, start_at};
use support::cluster::tls::{Authority, Certificate};
use support::path;

const OURS: &str = "cbt.storage.k8s.io";
/// Validity of the sidecar's certificate: less than a day would be reported as expiring.
const VALIDITY: Duration = Duration::from_secs(10 * 24 * 3600);
/// Rate limits that no test reaches.
pub const FAST: [&str; 8] =
    ["--user-qps", "100000", "--user-burst", "100000", "--qps", "100000", "--burst", "100000"];

pub struct Whole<'a> {
    pub aggregated: Aggregated<'a>,
    _manager: Served,
    pub sidecar: Served,
    pub backup: Account,
    certificate: Certificate,
    own: Account,
    home: String,
    // Dropped in this order.
    base: rig::Rig<'a>,
}

/// It has a rig.
impl<'a> Deref for Whole<'a> {
    type Target = rig::Rig<'a>;

    fn deref(&self) -> &Self::Target {
        &self.base
    }
}

impl<'a> Whole<'a> {
    pub fn new(cluster: &'a Cluster, driver: &[&str]) -> Self {
        Self::with(cluster, driver, &FAST)
    }

    /// With flags of the driver and of the aggregated API server.
    pub fn with(cluster: &'a Cluster, driver: &[&str], flags: &[&str]) -> Self {
        Self::of(cluster, driver, Aggregated::start(cluster, flags), None)
    }

    /// With an existing aggregated API server. If given, cbt-http listens at the port and is
    /// published at the address.
    pub fn of(
        cluster: &'a Cluster,
        driver: &[&str],
        aggregated: Aggregated<'a>,
        cbt_http: Option<(u16, &str)>,
    ) -> Self {
        let base = rig::Rig::with(cluster, PoolKind::Image, driver);
        let authority = Authority::new("backup authority");
        let port = free_port();
        let here = format!("localhost:{port}");
        let (cbt_http, found_at) = cbt_http.unwrap_or((port, &here));
        let (host, _) = found_at.split_once(':').unwrap();
        let now = SystemTime::now();
        let span = now - Duration::from_secs(3600)..now + VALIDITY;
        let certificate = authority.certify_span(base.driver.scratch(), "sidecar", host, span);
        std::fs::write(certificate.file.with_file_name("ca.crt"), authority.pem()).unwrap();
        let home = cluster.namespace("driver");
        let own = sidecars_account(cluster, &home);
        let place =
            Place { cluster, base: &base, home: &home, own: &own, certificate: &certificate };
        let sidecar = place.sidecar(cbt_http, found_at);
        let manager = manager::start(cluster);
        let backup = cluster.account(&base.namespace, "backup");
        cluster.grant(&backup, &backup_rules());
        let ours = [
            rule(OURS, &["snapshotsessionrequests"], &["create", "get", "delete"]),
            rule(OURS, &["volumesnapshotdeltas"], &["create"]),
        ];
        cluster.grant_in(&base.namespace, &backup, &ours);
        let whole =
            Self { aggregated, _manager: manager, sidecar, backup, certificate, own, home, base };
        whole.wait_until_reached();
        whole
    }

    /// A second sidecar, whose cbt-http listens at this port and is published at the other.
    pub fn another_sidecar(&self, cbt_http: u16, found_at: &str) -> Served {
        let Self { base, home, own, certificate, .. } = self;
        Place { cluster: base.cluster, base, home, own, certificate }.sidecar(cbt_http, found_at)
    }

    /// Waits until the DriverDiscovery reports the endpoint as reachable.
    fn wait_until_reached(&self) {
        let discoveries = self.cluster.api::<DriverDiscovery>();
        self.cluster.wait_for("the driver's endpoint to be reached", || {
            let status = self.cluster.get(&discoveries, &self.driver_name)?.status?;
            let is = |kind: &str| {
                status.conditions.iter().any(|one| one.type_ == kind && one.status == "True")
            };
            ["EndpointReachable", "CapabilityPresent", "CertificateValid"]
                .into_iter()
                .all(is)
                .then_some(())
        });
    }

    /// Pages that the sidecar has returned so far.
    pub fn pages(&self) -> u64 {
        let metrics = http(&self.sidecar, "/metrics");
        let count = metrics.lines().find_map(|line| {
            line.strip_prefix("csi_loopback_sidecar_cbt_http_requests_total{outcome=\"ok\"} ")
        });
        count.map_or(0, |count| count.parse().unwrap())
    }

    /// `csi-loopback snapshot …` as the backup application.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary());
        let kubeconfig = self.cluster.kubeconfig_of(&self.backup);
        command
            .arg("snapshot")
            .args(arguments)
            .args(["--namespace", &self.namespace, "--kubeconfig", path(&kubeconfig)])
            .args(["--output", "json", "--limit-rows", "0"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// The output of such a command.
    pub fn listed(&self, arguments: &[&str]) -> Value {
        listed(self.command(arguments).output().unwrap())
    }

    /// A client of the API server without retries.
    pub fn client(&self, account: &Account) -> Client {
        let kubeconfig = self.cluster.kubeconfig_of(account);
        let rate = Rate { per_second: 1000.0, burst: 1000 };
        self.cluster
            .block_on(connect_as_user_once(Some(kubeconfig.as_path()).into(), rate))
            .unwrap()
    }

    /// Creates one VolumeSnapshotDelta with this client.
    pub fn ask(&self, client: &Client, spec: &Value) -> kube::Result<VolumeSnapshotDelta> {
        let object = json!({
            "apiVersion": format!("{OURS}/v1alpha1"), "kind": "VolumeSnapshotDelta",
            "metadata": { "name": "delta" }, "spec": spec,
        });
        let request = http::Request::post(path_in(&self.namespace))
            .header("Content-Type", "application/json")
            .body(object.to_string().into_bytes())
            .unwrap();
        self.cluster.block_on(client.request(request))
    }
}

/// Parameters of a sidecar's start.
struct Place<'p> {
    cluster: &'p Cluster,
    base: &'p rig::Rig<'p>,
    home: &'p str,
    own: &'p Account,
    certificate: &'p Certificate,
}

impl Place<'_> {
    fn sidecar(&self, cbt_http: u16, found_at: &str) -> Served {
        let kubeconfig = self.cluster.kubeconfig_of(self.own);
        let port = free_port();
        let flags = [
            "--namespace",
            self.home,
            "--audience",
            AUDIENCE,
            "--session-api",
            "--manage-service",
            "--service-address",
            &format!("localhost:{port}"),
            "--cbt-http",
            "--cbt-http-port",
            &cbt_http.to_string(),
            "--cbt-http-service-address",
            found_at,
            "--cbt-http-lease-duration",
            "3s",
        ];
        let socket = self.base.driver.socket();
        start_at(port, self.cluster, &socket, &kubeconfig, self.certificate, &flags)
    }
}

fn sidecars_account(cluster: &Cluster, home: &str) -> Account {
    let own = cluster.account(home, "sidecar");
    let kinds = ["snapshotmetadataservices", "snapshotserviceconfigurations", "driverdiscoveries"];
    let kept = rule(OURS, &kinds, &["get", "list", "watch", "create", "patch"]);
    cluster.grant(&own, &[sidecar_rules(), cbt_http_rules(), vec![kept]].concat());
    cluster.grant_in(home, &own, &session_rules(&["get", "list", "watch"]));
    own
}

/// The listing without its duration.
#[track_caller]
pub fn listed(output: Output) -> Value {
    let mut json: Value = serde_json::from_str(&stdout_of(output)).unwrap();
    for time in ["first_message_seconds", "seconds"] {
        json.as_object_mut().unwrap().remove(time).unwrap();
    }
    json
}
