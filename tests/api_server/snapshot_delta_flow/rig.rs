//! The service of VolumeSnapshotDeltas in this process with separate permissions; a user; a driver
//! that is only an [`Endpoint`], and its snapshots.

use std::time::Duration;

use csi_loopback::aggregated_api::delta::metrics::Metrics;
use csi_loopback::aggregated_api::delta::{Deltas, Settings, TIMEOUT};
use csi_loopback::aggregated_api::endpoint::Endpoints;
use csi_loopback::aggregated_api::failure::{Cause, Failure};
use csi_loopback::kubernetes::client::Rate;
use csi_loopback::kubernetes::driver_discovery::DriverDiscovery;
use csi_loopback::kubernetes::snapshot::{VolumeSnapshot, VolumeSnapshotContent};
use csi_loopback::kubernetes::snapshot_delta::{
    API_VERSION, KIND, VolumeSnapshotDelta, VolumeSnapshotDeltaSpec, VolumeSnapshotDeltaStatus,
};
use csi_loopback::telemetry::shutdown::{Phase, Shutdown};
use k8s_openapi::ByteString;
use k8s_openapi::api::authentication::v1::UserInfo;
use k8s_openapi::api::rbac::v1::PolicyRule;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::endpoint::{Endpoint, page};
use support::cluster::Cluster;
use support::cluster::access::{Account, rule};
use support::cluster::storage::Ready;
use support::cluster::tls::Authority;

pub const SNAPSHOT_GROUP: &str = "snapshot.storage.k8s.io";
pub const GROUP: &str = "cbt.storage.k8s.io";

pub struct Rig<'a> {
    pub cluster: &'a Cluster,
    /// Namespace of the users.
    pub apps: String,
    pub driver: String,
    /// The accounts of the server and of the user.
    pub server: Account,
    pub user: Account,
    pub authority: Authority,
    pub endpoint: Endpoint,
    pub deltas: Deltas,
    pub phase: watch::Sender<Phase>,
    class: String,
}

/// Options of a rig.
pub struct Options {
    pub rules: Vec<PolicyRule>,
    pub user_rules: Vec<PolicyRule>,
    pub user_rate: Rate,
    pub rate: Rate,
    pub max_limit: u32,
    pub timeout: Duration,
    /// Whether the driver has a DriverDiscovery.
    pub discovered: bool,
}

pub const FAST: Rate = Rate { per_second: 1000.0, burst: 1000 };

impl Default for Options {
    fn default() -> Self {
        Self {
            rules: server_rules(),
            user_rules: user_rules(),
            user_rate: FAST,
            rate: FAST,
            max_limit: 4096,
            timeout: TIMEOUT,
            discovered: true,
        }
    }
}

/// The server's permissions.
pub fn server_rules() -> Vec<PolicyRule> {
    vec![
        rule("authorization.k8s.io", &["subjectaccessreviews"], &["create"]),
        rule(
            SNAPSHOT_GROUP,
            &["volumesnapshots", "volumesnapshotcontents"],
            &["get", "list", "watch"],
        ),
        rule(GROUP, &["driverdiscoveries"], &["get", "list", "watch"]),
        rule(GROUP, &["driverdiscoveries/status"], &["patch"]),
        rule("", &["serviceaccounts/token"], &["create"]),
        rule("", &["secrets"], &["get"]),
    ]
}

/// The rules without the rules for this resource.
pub fn without(rules: Vec<PolicyRule>, resource: &str) -> Vec<PolicyRule> {
    let has =
        |rule: &PolicyRule| rule.resources.as_ref().unwrap().iter().any(|one| one == resource);
    rules.into_iter().filter(|rule| !has(rule)).collect()
}

/// A user's permissions.
pub fn user_rules() -> Vec<PolicyRule> {
    vec![
        rule(GROUP, &["volumesnapshotdeltas"], &["create"]),
        rule(SNAPSHOT_GROUP, &["volumesnapshots"], &["get"]),
    ]
}

/// A request for these two; an empty name means no base.
pub fn spec(base: &str, target: &str) -> VolumeSnapshotDeltaSpec {
    VolumeSnapshotDeltaSpec {
        base_volume_snapshot_name: base.into(),
        target_volume_snapshot_name: target.into(),
        ..VolumeSnapshotDeltaSpec::default()
    }
}

fn info_of(account: &Account) -> UserInfo {
    UserInfo { username: Some(account.user()), ..UserInfo::default() }
}

impl<'a> Rig<'a> {
    pub fn new(cluster: &'a Cluster) -> Self {
        Self::with(cluster, Options::default())
    }

    pub fn with(cluster: &'a Cluster, options: Options) -> Self {
        let (home, apps) = (cluster.namespace("aggregated"), cluster.namespace("apps"));
        let server = cluster.account(&home, "aggregated-api");
        cluster.grant(&server, &options.rules);
        let user = cluster.account(&apps, "backup");
        cluster.grant_in(&apps, &user, &options.user_rules);
        let driver = format!("{}.csi.local", cluster.unique("delta"));
        let authority = Authority::new("cbt-http");
        let certificate = authority.certify(cluster.scratch(), &driver);
        let endpoint = Endpoint::start(cluster, &certificate);
        endpoint.says(page(&[1, 2], None));
        let (phase, shutdown) = Shutdown::manual();
        let mut registry = Registry::default();
        let metrics = Metrics::new(&mut registry);
        let client = cluster.client_as(&server);
        let settings = Settings {
            reviews: cluster.client_as(&server),
            review_ttl: Duration::ZERO,
            endpoints: Endpoints::new(client.clone(), &home, &server.name),
            client,
            max_limit: options.max_limit,
            user_rate: options.user_rate,
            rate: options.rate,
            timeout: options.timeout,
            metrics,
            shutdown,
        };
        let deltas = cluster.block_on(async { Deltas::new(settings) });
        let class = cluster.snapshot_class(&driver, &[]);
        let rig =
            Self { cluster, apps, driver, server, user, authority, endpoint, deltas, phase, class };
        if options.discovered {
            rig.discover(&rig.endpoint.url(), &rig.authority.pem());
        }
        rig
    }

    /// Creates the driver's DriverDiscovery.
    pub fn discover(&self, url: &str, authorities: &str) {
        let config = json!({ "url": url, "caBundle": ByteString(authorities.into()) });
        let object = json!({
            "metadata": { "name": self.driver },
            "spec": { "driverName": self.driver, "clientConfig": config },
        });
        self.cluster.create(&self.cluster.api::<DriverDiscovery>(), object);
    }

    /// A usable VolumeSnapshot of the driver.
    pub fn snapshot(&self, name: &str) -> Ready {
        let handle = format!("handle-{name}");
        self.cluster.snapshot_with_status(&self.apps, name, &self.driver, &self.class, &handle)
    }

    /// One that was taken of the claim `data` at this time, and not imported.
    pub fn taken(&self, name: &str, time: i64) -> Ready {
        let cluster = self.cluster;
        cluster.request_snapshot(&self.apps, name, "data", &self.class);
        let snapshots = cluster.api_in::<VolumeSnapshot>(&self.apps);
        let content = cluster.wait_for("the content", || {
            cluster.get(&snapshots, name)?.status?.bound_volume_snapshot_content_name
        });
        // Like csi-snapshotter.
        let status = json!({
            "readyToUse": true, "snapshotHandle": format!("handle-{name}"), "creationTime": time,
        });
        cluster.merge_status(&cluster.api::<VolumeSnapshotContent>(), &content, &status);
        cluster.wait_until_ready(&self.apps, name)
    }

    /// The result for the user.
    pub fn ask(&self, spec: VolumeSnapshotDeltaSpec) -> Result<VolumeSnapshotDelta, Failure> {
        self.ask_as(&self.user, spec)
    }

    /// Starts a request.
    pub fn begin(
        &self,
        spec: VolumeSnapshotDeltaSpec,
    ) -> JoinHandle<Result<VolumeSnapshotDelta, Failure>> {
        let (deltas, user, apps) = (self.deltas.clone(), info_of(&self.user), self.apps.clone());
        self.cluster.spawn_task(async move { deltas.create(&user, &apps, request(spec)).await })
    }

    pub fn ask_as(
        &self,
        account: &Account,
        spec: VolumeSnapshotDeltaSpec,
    ) -> Result<VolumeSnapshotDelta, Failure> {
        self.cluster.block_on(self.deltas.create(&info_of(account), &self.apps, request(spec)))
    }

    /// The status of a request that must succeed.
    pub fn answer(&self, spec: VolumeSnapshotDeltaSpec) -> VolumeSnapshotDeltaStatus {
        self.ask(spec).unwrap().status.unwrap()
    }

    /// The refusal of a request, which must have this cause.
    #[track_caller]
    pub fn refused(&self, cause: Cause, spec: VolumeSnapshotDeltaSpec) -> Failure {
        let failure = self.ask(spec).unwrap_err();
        assert_eq!(failure.cause, cause, "{failure}");
        failure
    }

    /// Repeats the request until it is refused for this cause: caches follow with a delay.
    pub fn fails(&self, cause: Cause, spec: &VolumeSnapshotDeltaSpec) -> Failure {
        self.cluster.wait_for(cause.label(), || {
            self.ask(spec.clone()).err().filter(|failure| failure.cause == cause)
        })
    }
}

pub fn number(registry: &Registry, name: &str) -> u64 {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

fn request(spec: VolumeSnapshotDeltaSpec) -> VolumeSnapshotDelta {
    VolumeSnapshotDelta {
        api_version: API_VERSION.into(),
        kind: KIND.into(),
        spec,
        ..VolumeSnapshotDelta::default()
    }
}

/// The `details` of a refusal, as a client sees them.
pub fn details(failure: &Failure) -> Value {
    failure.status()["details"].clone()
}
