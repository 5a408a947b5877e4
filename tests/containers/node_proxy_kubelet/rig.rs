//! A node with our proxy between kubelet and driver, and claims of the shipped class: what is left to a runtime is what the annotation
//! of a pod names.

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
use support::cluster::kubelet::Made;
use support::cluster::node_proxy::{claim_rules, node_proxy_rules};
use support::cluster::programs::{Process, free_port};
use support::cluster::runtime::{self, demanding, shipped_class};
use support::cluster::sidecar::http_at;
use support::driver::{Driver, binary, expand, wait_for};
use support::{MIB, path};

/// Bytes of most volumes: the least that an xfs has.
pub const SIZE: u64 = 320 * MIB;

pub struct Rig<'a> {
    // Dropped in this order: kubelet takes volumes away by the proxy.
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
    /// None, which is told, where the machine cannot run a node.
    pub fn new(cluster: &'a Cluster) -> Option<Self> {
        let mut proxy = None;
        let front = |driver: &Driver| {
            let started = Proxy::start(cluster, &driver.socket());
            proxy.insert(started).socket.clone()
        };
        let runtime = runtime::Rig::behind(cluster, front)?;
        let storage_class = cluster.unique("plain");
        let mut class = shipped_class();
        class["metadata"] = json!({ "name": storage_class });
        class["provisioner"] = runtime.driver_name.as_str().into();
        cluster.create(&cluster.api::<StorageClass>(), class);
        Some(Self { runtime, proxy: proxy.unwrap(), storage_class })
    }

    /// Has kubelet publish each volume once, as it does for most drivers, and not every time it looks at a pod.
    pub fn publishes_once(&self) {
        let once = json!({ "spec": { "requiresRepublish": false } });
        self.cluster.merge(&self.cluster.api::<CSIDriver>(), &self.driver_name, &once);
    }

    /// A claim of the shipped class, but for its name, its driver and its filesystem. The volume's id.
    pub fn claim(&self, name: &str, bytes: u64) -> String {
        self.claim_with(name, &json!({}), bytes)
    }

    /// The claim that kube-controller-manager would make for a generic ephemeral volume. The volume's id.
    pub fn claim_for(&self, pod: &Made, volume: &str, bytes: u64) -> String {
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

    /// The webhooks, with a policy that leaves the claims to the pods' runtime.
    pub fn webhooks_for_claims(&self) -> Webhooks {
        self.webhooks(&[self.entry(&self.storage_class)])
    }

    /// Makes a pod that leaves the volumes which it names to its runtime.
    pub fn opted(&self, name: &str, named: &str, volumes: &[Value], spec: &Value) -> Made {
        self.create_with(name, &json!({ ANNOTATION: named }), volumes, spec)
    }

    /// A pod that runs, with all that the stories ask for and the claim `data`, which it leaves to its runtime.
    pub fn run_opted(&self, name: &str) -> Made {
        let spec = demanding(&self.class, "data");
        let pod = self.opted(name, "data", &[self.claimed("data")], &spec);
        self.wait_until_ready(&pod);
        pod
    }

    /// Somebody asks for so many bytes, and the driver and csi-resizer have done their part of it.
    pub fn grow(&self, claim: &str, volume_id: &str, bytes: u64) {
        let request =
            json!({ "spec": { "resources": { "requests": { "storage": bytes.to_string() } } } });
        self.cluster.merge(&self.claims(), claim, &request);
        // Kubelet publishes again and again, and one operation on a volume excludes another.
        self.driver.call_patiently(expand(volume_id, bytes)).unwrap();
        self.cluster.grown(&self.namespace, claim, bytes);
    }

    /// The bytes that a claim is said to have.
    pub fn capacity(&self, claim: &str) -> Option<String> {
        let status = self.cluster.get(&self.claims(), claim)?.status?;
        Some(status.capacity?.remove("storage")?.0)
    }

    /// What a condition of the claim says, where it has that condition.
    pub fn condition(&self, claim: &str, named: &str) -> Option<String> {
        let status = self.cluster.get(&self.claims(), claim)?.status?;
        let mut conditions = status.conditions.unwrap_or_default().into_iter();
        conditions.find(|one| one.type_ == named && one.status == "True")?.message
    }

    /// Waits until this component has told in an event of the pod, for this reason, all of these words.
    pub fn told_by(&self, component: &str, reason: &str, pod: &Made, words: &[&str]) {
        wait_for(&format!("what {component} tells of {}: {words:?}", pod.name), || {
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

    /// Whether the host has something mounted where the volume is published.
    pub fn is_on_the_host(&self, target: &Path) -> bool {
        let at_target = format!(" {} ", path(target));
        self.host_mounts().iter().any(|line| line.contains(&at_target))
    }

    /// As the runtime's rig has it, and nothing of it is remembered.
    pub fn gone(&self, pod: &Made, volumes: &[&str]) {
        self.runtime.gone(pod, volumes);
        self.proxy.remembers(0);
    }
}

/// Our proxy, with the rights of a ServiceAccount.
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

    /// SIGKILL.
    pub fn kill(&mut self) {
        let mut process = self.process.take().unwrap();
        process.signal(Signal::SIGKILL);
        assert!(process.wait(Duration::from_secs(20)).is_some());
    }

    /// Lines of its metrics that begin so.
    pub fn metrics(&self, begin: &str) -> Vec<String> {
        let page = http_at(self.http_port, "/metrics").unwrap();
        page.lines().filter(|line| line.starts_with(begin)).map(str::to_owned).collect()
    }

    /// The one number of that name, or the sum of all with these labels.
    pub fn number(&self, begin: &str) -> u64 {
        let value = |line: &String| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64;
        self.metrics(begin).iter().map(value).sum()
    }

    /// Waits until it remembers so many volumes.
    #[track_caller]
    pub fn remembers(&self, count: usize) {
        wait_for(&format!("memory of {count} volumes"), || self.remembered().len() == count);
    }

    /// The `vol_data.json` of each.
    pub fn remembered(&self) -> Vec<Value> {
        let entries = fs::read_dir(&self.state).unwrap().flatten();
        let files = entries.filter_map(|entry| fs::read(entry.path().join("vol_data.json")).ok());
        files.map(|file| serde_json::from_slice(&file).unwrap()).collect()
    }
}
