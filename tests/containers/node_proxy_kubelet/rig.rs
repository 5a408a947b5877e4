//! A node with the proxy between kubelet and driver, and claims of the shipped class. Only the
//! volumes that a pod's annotation names are deferred.

use std::fs;
use std::ops::{Deref, DerefMut};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use csi_loopback::kubernetes::defer_annotation::ANNOTATION;
use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use support::cluster::Cluster;
use support::cluster::admission::Webhooks;
use support::cluster::kubelet::CreatedPod;
use support::cluster::node_proxy::{claim_rules, node_proxy_rules};
use support::cluster::programs::{Process, free_port};
use support::cluster::runtime::{self, assert_served, demanding, device_of, shipped_class};
use support::cluster::sidecar::http_at;
use support::driver::{Driver, binary, expand, loops_named, wait_for};
use support::{MIB, path};

/// Bytes of most volumes: the minimum of xfs.
pub const SIZE: u64 = 320 * MIB;

pub struct Rig<'a> {
    // Dropped in this order: kubelet unmounts volumes through the proxy.
    runtime: runtime::Rig<'a>,
    pub proxy: Proxy,
    pub storage_class: String,
}

impl<'a> Deref for Rig<'a> {
    type Target = runtime::Rig<'a>;

    fn deref(&self) -> &runtime::Rig<'a> {
        &self.runtime
    }
}

impl DerefMut for Rig<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.runtime
    }
}

impl<'a> Rig<'a> {
    /// `None`, with a message, if the machine cannot run a node.
    pub fn new(cluster: &'a Cluster) -> Option<Self> {
        let mut proxy = None;
        let front = |driver: &Driver| {
            let started = Proxy::start(cluster, &driver.socket());
            proxy.insert(started).socket.clone()
        };
        let runtime = runtime::Rig::with_socket(cluster, front)?;
        let storage_class = cluster.unique("plain");
        let mut class = shipped_class();
        class["metadata"] = json!({ "name": storage_class });
        class["provisioner"] = runtime.driver_name.as_str().into();
        cluster.create(&cluster.api::<StorageClass>(), class);
        Some(Self { runtime, proxy: proxy.unwrap(), storage_class })
    }

    /// Makes kubelet publish each volume once, as for most drivers, and not at every sync of a pod.
    pub fn publishes_once(&self) {
        let once = json!({ "spec": { "requiresRepublish": false } });
        self.cluster.merge(&self.cluster.api::<CSIDriver>(), &self.driver_name, &once);
    }

    /// Creates a claim of the shipped class with another name, driver and filesystem. Returns the
    /// volume's id.
    pub fn claim(&self, name: &str, bytes: u64) -> String {
        self.claim_with(name, &json!({}), bytes)
    }

    /// Creates the claim that kube-controller-manager would create for a generic ephemeral volume.
    /// Returns the volume's id.
    pub fn claim_for(&self, pod: &CreatedPod, volume: &str, bytes: u64) -> String {
        let owner = json!({
            "apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid,
            "controller": true, "blockOwnerDeletion": true,
        });
        let name = format!("{}-{volume}", pod.name);
        self.claim_with(&name, &json!({ "ownerReferences": [owner] }), bytes)
    }

    fn claim_with(&self, name: &str, metadata: &Value, bytes: u64) -> String {
        let csi = self.provision(name, &shipped_class(), bytes);
        let id = csi["volumeHandle"].as_str().unwrap().to_owned();
        let common = json!({
            "accessModes": ["ReadWriteOncePod"], "volumeMode": "Filesystem",
            "storageClassName": self.storage_class,
        });
        self.cluster.claim_with(&self.namespace, name, metadata, &common, csi, bytes);
        id
    }

    /// A generic ephemeral volume of a pod.
    pub fn ephemeral(&self, name: &str) -> Value {
        let spec = json!({
            "accessModes": ["ReadWriteOncePod"], "storageClassName": self.storage_class,
            "resources": { "requests": { "storage": "1Gi" } },
        });
        json!({ "name": name, "ephemeral": { "volumeClaimTemplate": { "spec": spec } } })
    }

    /// Starts the webhooks with a policy that defers the claims.
    pub fn webhooks_for_claims(&self) -> Webhooks {
        self.webhooks(&[self.entry(&self.storage_class)])
    }

    /// Creates a pod that defers the named volumes.
    pub fn opted(&self, name: &str, named: &str, volumes: &[Value], spec: &Value) -> CreatedPod {
        self.create_with(name, &json!({ ANNOTATION: named }), volumes, spec)
    }

    /// Runs a pod with everything that the stories require and the claim `data`, which it defers.
    pub fn run_opted(&self, name: &str) -> CreatedPod {
        let spec = demanding(&self.class, "data");
        let pod = self.opted(name, "data", &[self.claimed("data")], &spec);
        self.wait_until_ready(&pod);
        pod
    }

    /// Checks that all containers of the pod use the claim `data`, which is the volume `id`, that
    /// kubelet reports its use, and that the host's directory is another one.
    pub fn assert_used(&self, pod: &CreatedPod, id: &str) {
        assert_served(self, pod);
        let device = device_of(self, pod, "main");
        assert_eq!(device_of(self, pod, "second"), device);
        assert_eq!(loops_named(id), [device]);
        self.exec(pod, "dd if=/dev/zero of=/data/large bs=1M count=64 2>/dev/null; sync");
        let (bytes, used) = self.cluster.wait_for("kubelet's statistics", || {
            self.summary(pod, "data").filter(|(_, used)| *used >= 64 * MIB)
        });
        assert!(bytes > 200 * MIB && bytes <= SIZE && used < 128 * MIB, "{bytes} {used}");
        // The directory that kubelet creates for the sub-path is not on the volume, and is removed
        // with the pod.
        let target = self.target_of_claim(pod, "data");
        assert!(target.join("deep/part").is_dir() && !target.join("init").exists());
    }

    /// Requests a larger claim, and performs the steps of the driver and csi-resizer.
    pub fn grow(&self, claim: &str, volume_id: &str, bytes: u64) {
        let request =
            json!({ "spec": { "resources": { "requests": { "storage": bytes.to_string() } } } });
        self.cluster.merge(&self.claims(), claim, &request);
        // kubelet republishes continuously, and operations on a volume exclude each other.
        self.driver.call_patiently(expand(volume_id, bytes)).unwrap();
        self.cluster.grown(&self.namespace, claim, bytes);
    }

    /// The capacity in the claim's status.
    pub fn capacity(&self, claim: &str) -> Option<String> {
        let status = self.cluster.get(&self.claims(), claim)?.status?;
        Some(status.capacity?.remove("storage")?.0)
    }

    /// The message of a condition of the claim, if the condition is true.
    pub fn condition(&self, claim: &str, named: &str) -> Option<String> {
        let status = self.cluster.get(&self.claims(), claim)?.status?;
        let mut conditions = status.conditions.unwrap_or_default().into_iter();
        conditions.find(|one| one.type_ == named && one.status == "True")?.message
    }

    /// Waits until this component has recorded an event of the pod with this reason and all of
    /// these words.
    pub fn wait_for_event(&self, component: &str, reason: &str, pod: &CreatedPod, words: &[&str]) {
        wait_for(&format!("an event of {component} for {}: {words:?}", pod.name), || {
            self.events().into_iter().any(|event| {
                let source = event.source.unwrap_or_default();
                let message = event.message.unwrap_or_default();
                event.involved_object.uid.as_ref() == Some(&pod.uid)
                    && event.reason.as_deref() == Some(reason)
                    && source.component.as_deref() == Some(component)
                    && words.iter().all(|word| message.contains(word))
            })
        });
    }

    fn events(&self) -> Vec<Event> {
        let events = self.cluster.api_in::<Event>(&self.namespace);
        self.cluster.block_on(events.list(&Default::default())).unwrap().items
    }

    pub fn kubelet_log(&self) -> String {
        self.node.log()
    }

    fn claims(&self) -> kube::Api<PersistentVolumeClaim> {
        self.cluster.api_in(&self.namespace)
    }

    /// Whether the host has a mount at the target.
    pub fn is_on_the_host(&self, target: &Path) -> bool {
        let at_target = format!(" {} ", path(target));
        self.host_mounts().iter().any(|line| line.contains(&at_target))
    }

    /// Deletes the pod as the runtime's rig does, and checks that the proxy stores no volume.
    pub fn delete_and_wait(&self, pod: &CreatedPod, volumes: &[&str]) {
        self.runtime.delete_and_wait(pod, volumes);
        self.proxy.wait_for_stored(0);
    }
}

/// The proxy, with the permissions of its ServiceAccount.
pub struct Proxy {
    process: Option<Process>,
    name: String,
    pub socket: PathBuf,
    driver: PathBuf,
    state: PathBuf,
    kubeconfig: PathBuf,
    scratch: PathBuf,
    http_port: u16,
}

impl Proxy {
    fn start(cluster: &Cluster, driver: &Path) -> Self {
        let name = cluster.unique("node-proxy");
        let account = cluster.account("default", &name);
        cluster.grant(&account, &[node_proxy_rules(), claim_rules()].concat());
        let scratch = cluster.scratch().to_owned();
        let mut proxy = Self {
            process: None,
            socket: scratch.join(format!("{name}.sock")),
            driver: driver.to_owned(),
            state: scratch.join(format!("{name}-state")),
            kubeconfig: cluster.kubeconfig_of(&account),
            http_port: free_port(),
            name,
            scratch,
        };
        proxy.start_again();
        proxy
    }

    pub fn start_again(&mut self) {
        let mut command = Command::new(binary());
        command.args(["--mode", "node-proxy", "--node-name", "node", "--collect-every", "1s"]);
        command.args(["--endpoint", path(&self.socket), "--driver-endpoint", path(&self.driver)]);
        command.args(["--state-dir", path(&self.state), "--kubeconfig", path(&self.kubeconfig)]);
        command.arg(format!("--http-endpoint=127.0.0.1:{}", self.http_port));
        let mut process = Process::spawn(&self.name, command, &self.scratch);
        process.wait_for("it serves", |_| UnixStream::connect(&self.socket).ok());
        self.process = Some(process);
    }

    /// Kills the proxy with SIGKILL.
    pub fn kill(&mut self) {
        let mut process = self.process.take().unwrap();
        process.signal(Signal::SIGKILL);
        assert!(process.wait(Duration::from_secs(20)).is_some());
    }

    /// The lines of its metrics with this prefix.
    pub fn metrics(&self, begin: &str) -> Vec<String> {
        let page = http_at(self.http_port, "/metrics").unwrap();
        page.lines().filter(|line| line.starts_with(begin)).map(str::to_owned).collect()
    }

    /// The value of a metric, or the sum over all labels.
    pub fn number(&self, begin: &str) -> u64 {
        let value = |line: &String| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64;
        self.metrics(begin).iter().map(value).sum()
    }

    /// Waits until the proxy stores this many volumes.
    #[track_caller]
    pub fn wait_for_stored(&self, count: usize) {
        wait_for(&format!("{count} stored volumes"), || self.stored_volumes().len() == count);
    }

    /// The `vol_data.json` of each stored volume.
    pub fn stored_volumes(&self) -> Vec<Value> {
        let entries = fs::read_dir(&self.state).unwrap().flatten();
        let files = entries.filter_map(|entry| fs::read(entry.path().join("vol_data.json")).ok());
        files.map(|file| serde_json::from_slice(&file).unwrap()).collect()
    }
}
