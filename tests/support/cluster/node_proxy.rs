//! A node with the node proxy before a driver, and no kubelet: the test makes kubelet's calls, with its paths, in its order and each
//! on a connection of its own (pkg/volume/csi of Kubernetes), for pods that are objects of the API server and bound to this node.
//! The proxy is a process with the rights of a ServiceAccount that has only the ClusterRole of deploy/node-proxy.

use std::any::Any;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use csi::node_service_capability::{Type as Capability, rpc};
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use csi_loopback::backend::PoolKind;
use csi_loopback::crust::{Directory, Entry, Target};
use csi_loopback::proto::csi::v1 as csi;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim, Pod, ServiceAccount};
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::api::DeleteParams;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use super::Cluster;
use super::access::Account;
use super::programs::{Process, free_port};
use super::recorder::Recorder;
use crate::support::driver::{
    BINARY, Driver, PATIENCE, Rpc, block, create, mounted_as, stats, unpublishing, unstaging,
    wait_for,
};
use crate::support::ops::Ops;
use crate::support::{MIB, keep, path};

pub const ANNOTATION: &str = "cbt.storage.k8s.io/defer-fs-mount";

/// Bytes of a volume.
pub const SIZE: u64 = 32 * MIB;

/// What the proxy may do, as it is shipped.
pub fn node_proxy_rules() -> Vec<PolicyRule> {
    shipped_rules("deploy/node-proxy/proxy/rbac.yaml")
}

/// What it may do besides where it is to tell a pod's claims apart.
pub fn claim_rules() -> Vec<PolicyRule> {
    shipped_rules("deploy/components/node-proxy-claims/rbac.yaml")
}

/// The rules of the one ClusterRole of a file.
fn shipped_rules(file: &str) -> Vec<PolicyRule> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    let objects = text.split("\n---\n").map(|one| serde_saphyr::from_str::<Value>(one).unwrap());
    let mut roles = objects.filter(|object| object["kind"] == "ClusterRole");
    let role = roles.next().expect(file);
    assert!(roles.next().is_none(), "{file}");
    serde_json::from_value(role["rules"].clone()).unwrap()
}

/// The driver behind the proxy.
pub trait Behind {
    /// Whether kubelet tells it which pod a volume is for (CSIDriver.spec.podInfoOnMount).
    const POD_INFO: bool;

    fn driver_name(&self) -> &str;

    fn socket(&self) -> PathBuf;

    /// Makes a volume; its id, and what kubelet is to pass on for it.
    fn volume(&self, name: &str, wanted: csi::VolumeCapability) -> (String, Value);

    /// Hears of a request that the proxy is about to pass on.
    fn note(&self, _request: &dyn Any) {}
}

/// The driver of this project with crust_ops.
pub struct Ours {
    name: String,
    // Dropped in this order: the driver takes back what is handed over.
    pub driver: Driver,
    pub ops: Ops,
}

impl Ours {
    pub fn start(cluster: &Cluster) -> Self {
        let ops = Ops::start(&[]);
        let name = format!("{}.csi.local", cluster.unique("loopback"));
        let driver = Driver::with(PoolKind::Image, &words(&flags(&name, &ops, true)));
        Self { name, driver, ops }
    }

    /// The driver starts anew, with the capabilities of the proposal or without.
    pub fn restart(&mut self, deferring: bool) {
        self.driver.restart_with(&words(&flags(&self.name, &self.ops, deferring)));
    }
}

fn flags(name: &str, ops: &Ops, deferring: bool) -> Vec<String> {
    let endpoint = path(&ops.socket()).to_owned();
    let mut flags = vec!["--driver-name".into(), name.into(), "--crust-endpoint".into(), endpoint];
    if deferring {
        flags.push("--enable-defer-fs-ops".into());
    }
    flags
}

fn words(owned: &[String]) -> Vec<&str> {
    owned.iter().map(String::as_str).collect()
}

impl Behind for Ours {
    const POD_INFO: bool = true;

    fn driver_name(&self) -> &str {
        &self.name
    }

    fn socket(&self) -> PathBuf {
        self.driver.socket()
    }

    fn volume(&self, name: &str, wanted: csi::VolumeCapability) -> (String, Value) {
        let volume = self.driver.ok(create(name, SIZE, wanted)).volume.unwrap();
        (volume.volume_id, json!(volume.volume_context))
    }

    fn note(&self, request: &dyn Any) {
        self.driver.note(request);
    }
}

impl Behind for Recorder<'_> {
    const POD_INFO: bool = false;

    fn driver_name(&self) -> &str {
        &self.name
    }

    fn socket(&self) -> PathBuf {
        self.socket()
    }

    fn volume(&self, name: &str, _: csi::VolumeCapability) -> (String, Value) {
        (format!("handle-of-{name}"), json!({ "tier": "fast" }))
    }
}

/// One of a pod's volumes.
#[derive(Debug, Clone)]
pub struct Volume {
    /// In the pod.
    pub name: String,
    /// What is said of it in spec.volumes.
    pub source: Value,
    /// Its PersistentVolume; none where it is an inline volume.
    pub persistent: Option<Persistent>,
}

#[derive(Debug, Clone)]
pub struct Persistent {
    /// The PersistentVolume's name, which kubelet puts into paths.
    pub name: String,
    /// The claim's name.
    pub claim: String,
    pub handle: String,
    pub access: String,
    /// None: a raw block volume.
    pub fs_type: Option<String>,
    pub options: Vec<String>,
    pub attributes: Value,
}

/// A pod that was made and is bound to the node.
#[derive(Debug, Clone)]
pub struct Bound {
    pub name: String,
    pub uid: String,
    pub fs_group: Option<i64>,
}

pub struct Rig<'a, B> {
    pub cluster: &'a Cluster,
    /// Of the pods.
    pub namespace: String,
    pub node: String,
    /// Whom the proxy is to the API server.
    pub account: Account,
    pub kubeconfig: PathBuf,
    /// Of the proxy, in addition to, or instead of, those that every test has.
    pub flags: Vec<String>,
    /// Whether kubelet tells the driver which pod a volume is for; as the driver wants it, at first.
    pub pod_info: bool,
    pub http_port: u16,
    // Dropped in this order: the driver undoes what is in the directory.
    proxy: Option<Process>,
    pub behind: B,
    directory: TempDir,
}

impl<'a> Rig<'a, Ours> {
    pub fn ours(cluster: &'a Cluster) -> Self {
        Self::start(cluster, Ours::start(cluster))
    }
}

impl<'a> Rig<'a, Recorder<'a>> {
    /// With a recording driver that has these capabilities.
    pub fn recording(cluster: &'a Cluster, capabilities: &[rpc::Type]) -> Self {
        Self::start(cluster, Recorder::start(cluster, capabilities))
    }
}

impl<'a, B: Behind> Rig<'a, B> {
    /// With a proxy that serves.
    pub fn start(cluster: &'a Cluster, behind: B) -> Self {
        let mut rig = Self::prepare(cluster, behind, &node_proxy_rules());
        rig.start_proxy();
        rig
    }

    /// The same with these flags of the proxy.
    pub fn with_flags(cluster: &'a Cluster, behind: B, flags: &[&str]) -> Self {
        let mut rig = Self::prepare(cluster, behind, &node_proxy_rules());
        rig.set_flags(flags);
        rig.start_proxy();
        rig
    }

    /// The same with a proxy that may ask for claims.
    pub fn telling_claims_apart(cluster: &'a Cluster, behind: B) -> Self {
        let rules = [node_proxy_rules(), claim_rules()].concat();
        let mut rig = Self::prepare(cluster, behind, &rules);
        rig.start_proxy();
        rig
    }

    /// All but the proxy, which will have these rights.
    pub fn prepare(cluster: &'a Cluster, behind: B, rules: &[PolicyRule]) -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let namespace = cluster.namespace("pods");
        // No controller makes it.
        let default = json!({ "metadata": { "name": "default" } });
        cluster.create(&cluster.api_in::<ServiceAccount>(&namespace), default);
        let account = cluster.account(&namespace, "node-proxy");
        cluster.grant(&account, rules);
        let kubeconfig = cluster.kubeconfig_of(&account);
        fs::create_dir_all(directory.path().join("kubelet/pods")).unwrap();
        Self {
            cluster,
            namespace,
            node: cluster.unique("node"),
            account,
            kubeconfig,
            flags: Vec::new(),
            pod_info: B::POD_INFO,
            http_port: free_port(),
            proxy: None,
            behind,
            directory,
        }
    }

    pub fn set_flags(&mut self, flags: &[&str]) {
        self.flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
    }

    pub fn scratch(&self) -> &Path {
        self.directory.path()
    }

    /// Kubelet's own directory.
    pub fn kubelet(&self) -> PathBuf {
        self.scratch().join("kubelet")
    }

    pub fn state_dir(&self) -> PathBuf {
        self.scratch().join("state")
    }

    /// The proxy's socket.
    pub fn socket(&self) -> PathBuf {
        self.scratch().join("proxy.sock")
    }

    /// Its command line.
    pub fn proxy_command(&self) -> Command {
        let (socket, behind) = (self.socket(), self.behind.socket());
        let http = format!("127.0.0.1:{}", self.http_port);
        let state = self.state_dir();
        let defaults = [
            ("--kubeconfig", path(&self.kubeconfig)),
            ("--endpoint", path(&socket)),
            ("--driver-endpoint", path(&behind)),
            ("--node-name", &self.node),
            ("--state-dir", path(&state)),
            ("--http-endpoint", &http),
            // A machine that has much to do is to be no reason to pass a call on.
            ("--pod-timeout", "50s"),
            ("--kube-api-qps", "1000"),
            ("--kube-api-burst", "1000"),
            ("--log-level", "debug"),
        ];
        let mut command = Command::new(BINARY);
        command.args(["--mode", "node-proxy"]).env_remove("CSI_ENDPOINT").env_remove("NODE_NAME");
        for (flag, value) in defaults {
            if !self.flags.iter().any(|given| given == flag) {
                command.args([flag, value]);
            }
        }
        command.args(&self.flags);
        command
    }

    /// Starts the proxy and waits until it serves.
    pub fn start_proxy(&mut self) {
        let command = self.proxy_command();
        let mut proxy = Process::spawn("node-proxy", command, self.scratch());
        let socket = self.socket();
        proxy.wait_for("the proxy serves", |_| UnixStream::connect(&socket).ok());
        self.proxy = Some(proxy);
    }

    pub fn proxy(&mut self) -> &mut Process {
        self.proxy.as_mut().expect("the proxy runs")
    }

    /// SIGTERM, and waits for its end.
    pub fn stop_proxy(&mut self) {
        let mut proxy = self.proxy.take().expect("the proxy runs");
        proxy.signal(Signal::SIGTERM);
        let status = proxy.wait(PATIENCE);
        assert!(status.is_some_and(|status| status.success()), "{status:?}\n{}", self.log());
    }

    /// SIGKILL.
    pub fn kill_proxy(&mut self) {
        let mut proxy = self.proxy.take().expect("the proxy runs");
        proxy.signal(Signal::SIGKILL);
        assert!(proxy.wait(PATIENCE).is_some());
    }

    pub fn restart_proxy(&mut self) {
        self.stop_proxy();
        self.start_proxy();
    }

    /// What the proxy has logged, over all of its starts.
    pub fn log(&self) -> String {
        let log = fs::read(self.scratch().join("node-proxy.log")).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    /// Its page of metrics.
    pub fn metrics(&self) -> String {
        let address = ([127, 0, 0, 1], self.http_port).into();
        crate::support::http::fetch(address, "/metrics").1
    }

    /// A metric's value by its name and labels as the page has them; 0 where it is not there.
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.metrics();
        let mut lines = page.lines().filter_map(|line| line.rsplit_once(' '));
        lines.find(|(of, _)| *of == name).map_or(0.0, |(_, value)| value.parse().unwrap())
    }

    /// `csi_loopback_deferred_failures_total` of a call and a reason.
    pub fn failures(&self, call: &str, reason: &str) -> f64 {
        self.metric(&format!(
            "csi_loopback_deferred_failures_total{{call=\"{call}\",reason=\"{reason}\"}}"
        ))
    }

    /// What the proxy has written down for a target.
    pub fn entry(&self, target: &Path) -> Entry {
        Directory::new(self.state_dir()).entry(&Target::new("target", target).unwrap())
    }

    /// Waits until the proxy has heard that the pod has opted in, which it writes down.
    pub fn wait_until_heard(&self, pod: &Bound) {
        let file = self.state_dir().join("opted-in/pods.json");
        wait_for("the proxy's word of the pod", || {
            fs::read_to_string(&file).is_ok_and(|text| text.contains(&pod.uid))
        });
    }

    /// The keys and values of its `vol_data.json`, if it has one.
    pub fn vol_data(&self, target: &Path) -> Option<Value> {
        let bytes = self.entry(target).read("vol_data.json").unwrap()?;
        Some(serde_json::from_slice(&bytes).unwrap())
    }

    // --- Pods and volumes ---

    /// A claim that is bound to a new volume of the driver; in pods the volume has the claim's name.
    pub fn claim(&self, name: &str) -> Volume {
        let source = json!({ "persistentVolumeClaim": { "claimName": name } });
        self.bound(name, name, source, Some("ext4"))
    }

    /// The same as a raw device.
    pub fn raw_claim(&self, name: &str) -> Volume {
        let source = json!({ "persistentVolumeClaim": { "claimName": name } });
        self.bound(name, name, source, None)
    }

    /// A generic ephemeral volume of a pod that is to have this name, with the claim that a controller would make for it.
    pub fn ephemeral(&self, pod: &str, name: &str) -> Volume {
        let spec = json!({
            "accessModes": ["ReadWriteOncePod"],
            "resources": { "requests": { "storage": SIZE.to_string() } },
        });
        let source = json!({ "ephemeral": { "volumeClaimTemplate": { "spec": spec } } });
        self.bound(name, &format!("{pod}-{name}"), source, Some("ext4"))
    }

    /// An inline volume.
    pub fn inline(&self, name: &str, attributes: &[(&str, &str)]) -> Volume {
        let attributes: serde_json::Map<_, _> =
            attributes.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
        let csi = json!({ "driver": self.behind.driver_name(), "volumeAttributes": attributes });
        Volume { name: name.to_owned(), source: json!({ "csi": csi }), persistent: None }
    }

    fn bound(&self, name: &str, claim: &str, source: Value, fs_type: Option<&str>) -> Volume {
        // As csi-provisioner maps it for a driver that tells single writers apart.
        let wanted = match fs_type {
            Some(fs_type) => mounted_as(fs_type, Mode::SingleNodeSingleWriter),
            None => block(),
        };
        let of_driver = format!("{}-{claim}", self.namespace);
        let (handle, attributes) = self.behind.volume(&of_driver, wanted);
        let csi = json!({
            "driver": self.behind.driver_name(), "volumeHandle": handle, "fsType": fs_type,
            "volumeAttributes": attributes,
        });
        let (mode, access) = match fs_type {
            Some(_) => ("Filesystem", "ReadWriteOncePod"),
            None => ("Block", "ReadWriteOnce"),
        };
        self.cluster.claim_of(&self.namespace, claim, mode, access, csi, SIZE);
        let persistent = Persistent {
            name: of_driver,
            claim: claim.to_owned(),
            handle,
            access: access.to_owned(),
            fs_type: fs_type.map(str::to_owned),
            options: Vec::new(),
            attributes,
        };
        Volume { name: name.to_owned(), source, persistent: Some(persistent) }
    }

    pub fn pods(&self) -> kube::Api<Pod> {
        self.cluster.api_in(&self.namespace)
    }

    /// Makes a pod with these volumes and binds it to the node; `opted` is the value of the annotation.
    pub fn pod(&self, name: &str, volumes: &[&Volume], opted: Option<&str>) -> Bound {
        self.pod_with(name, volumes, opted, json!({}))
    }

    /// The same with what its spec has besides.
    pub fn pod_with(
        &self,
        name: &str,
        volumes: &[&Volume],
        opted: Option<&str>,
        spec: Value,
    ) -> Bound {
        let made = self.cluster.create(&self.pods(), self.pod_object(name, volumes, opted, spec));
        let bound = Bound {
            name: name.to_owned(),
            uid: made.metadata.uid.unwrap(),
            fs_group: made.spec.and_then(|spec| spec.security_context?.fs_group),
        };
        for volume in volumes.iter().filter(|volume| !volume.source["ephemeral"].is_null()) {
            self.give(volume, &bound);
        }
        bound
    }

    /// The object that [`Rig::pod_with`] makes.
    pub fn pod_object(
        &self,
        name: &str,
        volumes: &[&Volume],
        opted: Option<&str>,
        spec: Value,
    ) -> Value {
        let mut object = json!({ "metadata": { "name": name }, "spec": spec });
        if let Some(names) = opted {
            object["metadata"]["annotations"] = json!({ ANNOTATION: names });
        }
        let in_pod = |volume: &&Volume| {
            let mut in_pod = volume.source.clone();
            in_pod["name"] = volume.name.as_str().into();
            in_pod
        };
        object["spec"]["nodeName"] = self.node.as_str().into();
        object["spec"]["automountServiceAccountToken"] = false.into();
        object["spec"]["volumes"] = volumes.iter().map(in_pod).collect();
        let (mut mounts, mut devices) = (Vec::new(), Vec::new());
        for volume in volumes {
            let at = format!("/{}", volume.name);
            match volume.is_raw() {
                true => devices.push(json!({ "name": volume.name, "devicePath": at })),
                false => mounts.push(json!({ "name": volume.name, "mountPath": at })),
            }
        }
        object["spec"]["containers"] = json!([{
            "name": "main", "image": "none", "volumeMounts": mounts, "volumeDevices": devices,
        }]);
        object
    }

    /// A claim of a generic ephemeral volume belongs to its pod.
    fn give(&self, volume: &Volume, pod: &Bound) {
        let claims = self.cluster.api_in::<PersistentVolumeClaim>(&self.namespace);
        let owner = json!({
            "apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid, "controller": true,
        });
        let patch = json!({ "metadata": { "ownerReferences": [owner] } });
        self.cluster.merge(&claims, &volume.persistent.as_ref().unwrap().claim, &patch);
    }

    /// Takes the pod away at once, as when its node has said that nothing of it runs.
    pub fn delete(&self, pod: &Bound) {
        let now = DeleteParams::default().grace_period(0);
        self.cluster.block_on(self.pods().delete(&pod.name, &now)).unwrap();
        self.cluster.wait_until_gone(&self.pods(), &pod.name);
    }

    /// Has the pod name volumes that it did not.
    pub fn opt_in(&self, pod: &Bound, names: &str) {
        let patch = json!({ "metadata": { "annotations": { ANNOTATION: names } } });
        self.cluster.merge(&self.pods(), &pod.name, &patch);
    }

    /// The pod's events, in no order.
    pub fn events(&self, pod: &Bound) -> Vec<Event> {
        let events = self.cluster.api_in::<Event>(&self.namespace);
        let all = self.cluster.block_on(events.list(&Default::default())).unwrap();
        let is_of_pod = |event: &Event| event.involved_object.uid.as_ref() == Some(&pod.uid);
        all.into_iter().filter(is_of_pod).collect()
    }

    /// Waits until an event of the pod has all of these words in its message.
    pub fn told(&self, pod: &Bound, words: &[&str]) -> Event {
        let has_all = |event: &Event| {
            let message = event.message.as_deref().unwrap_or_default();
            words.iter().all(|word| message.contains(word))
        };
        self.cluster.wait_for(&format!("an event with {words:?}"), || {
            self.events(pod).into_iter().find(has_all)
        })
    }

    // --- What kubelet does ---

    /// A connection of its own to the proxy, as kubelet makes one for each call.
    pub fn channel(&self) -> Channel {
        connect(self.cluster, self.socket())
    }

    /// A call to the proxy.
    pub fn call<R: Rpc>(&self, request: R) -> Result<R::Answer, Status> {
        self.behind.note(&request);
        self.send(self.channel(), request)
    }

    /// The same to the driver, around the proxy.
    pub fn call_driver<R: Rpc>(&self, request: R) -> Result<R::Answer, Status> {
        self.behind.note(&request);
        self.send(connect(self.cluster, self.behind.socket()), request)
    }

    fn send<R: Rpc>(&self, channel: Channel, request: R) -> Result<R::Answer, Status> {
        self.cluster.block_on(async {
            let answer = tokio::time::timeout(PATIENCE, request.send(channel)).await;
            answer.unwrap_or_else(|_| Err(Status::unknown("the test ran out of patience")))
        })
    }

    /// Whether the node's driver has a capability, as the proxy tells it.
    pub fn has(&self, wanted: rpc::Type) -> bool {
        let told = self.call(csi::NodeGetCapabilitiesRequest {}).unwrap().capabilities;
        told.iter().any(|one| {
            matches!(&one.r#type, Some(Capability::Rpc(rpc)) if rpc.r#type == i32::from(wanted))
        })
    }

    /// Where kubelet has the driver publish the volume.
    pub fn target(&self, pod: &Bound, volume: &Volume) -> PathBuf {
        match &volume.persistent {
            Some(Persistent { name, fs_type: None, .. }) => {
                let devices = self.kubelet().join("plugins/kubernetes.io/csi/volumeDevices");
                devices.join("publish").join(name).join(&pod.uid)
            }
            persistent => {
                let name = persistent.as_ref().map_or(&volume.name, |volume| &volume.name);
                let volumes = self.kubelet().join("pods").join(&pod.uid).join("volumes");
                volumes.join("kubernetes.io~csi").join(name).join("mount")
            }
        }
    }

    /// Where kubelet has the driver stage it; None for an inline volume.
    pub fn staging(&self, volume: &Volume) -> Option<PathBuf> {
        let plugin = self.kubelet().join("plugins/kubernetes.io/csi");
        let Persistent { name, handle, fs_type, .. } = volume.persistent.as_ref()?;
        Some(match fs_type {
            None => plugin.join("volumeDevices/staging").join(name),
            Some(_) => {
                let place = plugin.join(self.behind.driver_name()).join(digits(handle));
                place.join("globalmount")
            }
        })
    }

    pub fn staging_request(&self, pod: &Bound, volume: &Volume) -> csi::NodeStageVolumeRequest {
        let persistent = volume.persistent.as_ref().expect("an inline volume is not staged");
        csi::NodeStageVolumeRequest {
            volume_id: persistent.handle.clone(),
            staging_target_path: path(&self.staging(volume).unwrap()).to_owned(),
            volume_capability: Some(self.capability(pod, volume)),
            volume_context: serde_json::from_value(persistent.attributes.clone()).unwrap(),
            ..Default::default()
        }
    }

    pub fn publishing_request(
        &self,
        pod: &Bound,
        volume: &Volume,
    ) -> csi::NodePublishVolumeRequest {
        let attributes = match &volume.persistent {
            Some(persistent) => persistent.attributes.clone(),
            None => volume.source["csi"]["volumeAttributes"].clone(),
        };
        let mut volume_context: std::collections::HashMap<String, String> =
            serde_json::from_value(attributes).unwrap();
        if self.pod_info {
            volume_context.extend(self.pod_info_of(pod, volume));
        }
        let staging = self.staging(volume).filter(|_| self.has(rpc::Type::StageUnstageVolume));
        csi::NodePublishVolumeRequest {
            volume_id: volume.handle(pod),
            staging_target_path: staging.map(|path| path.display().to_string()).unwrap_or_default(),
            target_path: path(&self.target(pod, volume)).to_owned(),
            volume_capability: Some(self.capability(pod, volume)),
            volume_context,
            ..Default::default()
        }
    }

    /// What kubelet adds where the driver wants to know its pods.
    pub fn pod_info_of(&self, pod: &Bound, volume: &Volume) -> Vec<(String, String)> {
        let ephemeral = volume.persistent.is_none().to_string();
        [
            ("pod.name", pod.name.as_str()),
            ("pod.namespace", &self.namespace),
            ("pod.uid", &pod.uid),
            ("serviceAccount.name", "default"),
            ("ephemeral", &ephemeral),
        ]
        .map(|(key, value)| (format!("csi.storage.k8s.io/{key}"), value.to_owned()))
        .to_vec()
    }

    fn capability(&self, pod: &Bound, volume: &Volume) -> csi::VolumeCapability {
        let (fs_type, options, access) = match &volume.persistent {
            None => (Some(String::new()), Vec::new(), "ReadWriteOnce"),
            Some(volume) => {
                (volume.fs_type.clone(), volume.options.clone(), volume.access.as_str())
            }
        };
        let access_type = match fs_type {
            None => AccessType::Block(BlockVolume {}),
            Some(fs_type) => {
                let group = pod.fs_group.filter(|_| self.has(rpc::Type::VolumeMountGroup));
                AccessType::Mount(MountVolume {
                    fs_type,
                    mount_flags: options,
                    volume_mount_group: group.map(|id| id.to_string()).unwrap_or_default(),
                    ..MountVolume::default()
                })
            }
        };
        let tells_apart = self.has(rpc::Type::SingleNodeMultiWriter);
        let mode = match (access, tells_apart) {
            ("ReadWriteOnce", true) => Mode::SingleNodeMultiWriter,
            ("ReadWriteOncePod", true) => Mode::SingleNodeSingleWriter,
            ("ReadWriteOnce" | "ReadWriteOncePod", false) => Mode::SingleNodeWriter,
            (other, _) => panic!("{other}: kubelet does more than is played here"),
        };
        csi::VolumeCapability {
            access_type: Some(access_type),
            access_mode: Some(AccessMode { mode: mode.into() }),
        }
    }

    /// MountDevice, for volumes that are staged.
    pub fn stage(&self, pod: &Bound, volume: &Volume) -> Result<(), Status> {
        let Some(staging) = self.staging(volume) else { return Ok(()) };
        fs::create_dir_all(&staging).unwrap();
        if !self.has(rpc::Type::StageUnstageVolume) {
            return Ok(());
        }
        self.call(self.staging_request(pod, volume)).map(drop)
    }

    /// SetUp: NodePublishVolume, for what is staged. Where it fails for good the directory goes.
    pub fn publish(&self, pod: &Bound, volume: &Volume) -> Result<(), Status> {
        self.set_up(&self.publishing_request(pod, volume))
    }

    /// The same with this request.
    pub fn set_up(&self, request: &csi::NodePublishVolumeRequest) -> Result<(), Status> {
        let target = Path::new(&request.target_path);
        let parent = target.parent().unwrap();
        fs::create_dir_all(parent).unwrap();
        let is_device = target.to_string_lossy().contains("/volumeDevices/");
        if !is_device {
            let data = json!({ "volumeHandle": request.volume_id, "nodeName": self.node });
            fs::write(parent.join("vol_data.json"), data.to_string()).unwrap();
        }
        let answer = self.call(request.clone()).map(drop);
        if let Err(status) = &answer
            && is_final(status.code())
            && !is_device
        {
            remove_mount_dir(target);
        }
        answer
    }

    /// All that kubelet does before a container can have the volume. Returns the target.
    pub fn mount(&self, pod: &Bound, volume: &Volume) -> Result<PathBuf, Status> {
        self.stage(pod, volume)?;
        self.publish(pod, volume)?;
        Ok(self.target(pod, volume))
    }

    /// GetMetrics.
    pub fn stats(
        &self,
        pod: &Bound,
        volume: &Volume,
    ) -> Result<csi::NodeGetVolumeStatsResponse, Status> {
        self.call(stats(&volume.handle(pod), path(&self.target(pod, volume))))
    }

    pub fn expansion_request(
        &self,
        pod: &Bound,
        volume: &Volume,
        bytes: u64,
    ) -> csi::NodeExpandVolumeRequest {
        let staging = self.staging(volume);
        csi::NodeExpandVolumeRequest {
            volume_id: volume.handle(pod),
            volume_path: path(&self.target(pod, volume)).to_owned(),
            staging_target_path: staging.map(|path| path.display().to_string()).unwrap_or_default(),
            volume_capability: Some(self.capability(pod, volume)),
            capacity_range: Some(csi::CapacityRange {
                required_bytes: bytes as i64,
                limit_bytes: 0,
            }),
            ..Default::default()
        }
    }

    /// NodeExpand of a volume that is mounted. Returns the new size.
    pub fn expand(&self, pod: &Bound, volume: &Volume, bytes: u64) -> Result<i64, Status> {
        let request = self.expansion_request(pod, volume, bytes);
        self.call(request).map(|answer| answer.capacity_bytes)
    }

    /// TearDown: NodeUnpublishVolume, and what is left goes.
    pub fn unpublish(&self, pod: &Bound, volume: &Volume) -> Result<(), Status> {
        let target = self.target(pod, volume);
        self.call(unpublishing(&volume.handle(pod), path(&target)))?;
        remove_mount_dir(&target);
        Ok(())
    }

    /// UnmountDevice.
    pub fn unstage(&self, volume: &Volume) -> Result<(), Status> {
        let Some(persistent) = &volume.persistent else { return Ok(()) };
        let staging = self.staging(volume).unwrap();
        if self.has(rpc::Type::StageUnstageVolume) {
            self.call(unstaging(&persistent.handle, path(&staging)))?;
        }
        let _ = fs::remove_dir(&staging);
        let _ = fs::remove_dir(staging.parent().unwrap());
        Ok(())
    }

    /// All that kubelet does when the pod has ended.
    pub fn unmount(&self, pod: &Bound, volume: &Volume) {
        self.unpublish(pod, volume).unwrap();
        self.unstage(volume).unwrap();
        let directory = self.kubelet().join("pods").join(&pod.uid);
        // Until the last of its volumes is gone there is something in it.
        let _ = fs::remove_dir(directory.join("volumes/kubernetes.io~csi"));
        let _ = fs::remove_dir(directory.join("volumes"));
        let _ = fs::remove_dir(directory);
    }
}

impl Volume {
    pub fn is_raw(&self) -> bool {
        self.persistent.as_ref().is_some_and(|volume| volume.fs_type.is_none())
    }

    /// Its id in CSI, which for an inline volume is made from the pod.
    pub fn handle(&self, pod: &Bound) -> String {
        match &self.persistent {
            Some(persistent) => persistent.handle.clone(),
            None => format!("csi-{}", digits(&format!("{}{}", pod.uid, self.name))),
        }
    }
}

impl<B> Drop for Rig<'_, B> {
    fn drop(&mut self) {
        self.proxy = None;
        if keep() {
            println!("left in place: {}", path(self.directory.path()));
            self.directory.disable_cleanup(true);
        }
    }
}

fn connect(cluster: &Cluster, socket: PathBuf) -> Channel {
    cluster.block_on(async {
        Endpoint::from_static("http://localhost")
            .connect_timeout(Duration::from_secs(20))
            .connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
                let socket = socket.clone();
                async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
            }))
    })
}

fn digits(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether kubelet takes the operation for ended with this code (isFinalError).
fn is_final(code: Code) -> bool {
    use Code::*;
    !matches!(code, Cancelled | DeadlineExceeded | Unavailable | ResourceExhausted | Aborted)
}

/// What kubelet does with a target that is not mounted.
fn remove_mount_dir(target: &Path) {
    let _ = fs::remove_dir(target);
    let parent = target.parent().unwrap();
    let _ = fs::remove_file(parent.join("vol_data.json"));
    let _ = fs::remove_dir(parent);
}
