//! A node of the cluster, run by hack/kubelet.sh: a released kubelet with containerd, so that pods run with volumes of our
//! driver. The first test that needs it starts it; it ends with the cluster.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use csi_loopback::backend::PoolKind;
use k8s_openapi::api::core::v1::{Event, Pod, Secret, ServiceAccount};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode};
use kube::api::{DeleteParams, PostParams};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tonic::Code;

use super::programs::{Process, said};
use super::{Cluster, NoCluster, await_ready};
use crate::driver::{Driver, binary, mounts, stats, wait_for};
use crate::inline::is_mounted;
use crate::{REPOSITORY, path, skip};

/// The one container of a pod.
const CONTAINER: &str = "main";
/// The one image of the node.
const IMAGE: &str = "localhost/busybox:node";

/// How long kubelet may take to undo what a failed test has left.
const CLEAN_UP: Duration = Duration::from_secs(30);

/// The node of a cluster, which runs for as long as this is there.
pub struct Node {
    directory: PathBuf,
    process: Process,
}

impl Node {
    pub fn start(cluster: &Cluster) -> Result<Self, NoCluster> {
        let mut command = Command::new(Path::new(REPOSITORY).join("hack/kubelet.sh"));
        command.arg(cluster.directory()).env("CSI_LOOPBACK_BINARY", binary());
        let mut process = Process::spawn("kubelet.sh", command, cluster.scratch());
        process.quiet = true;
        let directory = cluster.directory().join("node");
        await_ready("hack/kubelet.sh", &mut process, &directory)?;
        Ok(Self { directory, process })
    }

    /// The process of the script that runs it.
    pub fn script(&self) -> Pid {
        self.process.pid()
    }

    /// Kubelet's own.
    pub fn root(&self) -> PathBuf {
        self.directory.join("kubelet")
    }

    /// What crust_ops and csi-loopback-runc hand each other over.
    pub fn crust(&self) -> PathBuf {
        self.directory.join("crust")
    }

    /// By which csi-loopback-runc finds its configuration, as NAME=VALUE.
    pub fn runtime_environment(&self) -> String {
        format!("CSI_LOOPBACK_RUNC_CONFIG={}", path(&self.directory.join("oci-runtime.yaml")))
    }

    /// The first process in the node's namespaces.
    pub fn pid(&self) -> String {
        fs::read_to_string(self.directory.join("pid")).unwrap().trim().to_owned()
    }

    /// What kubelet has logged, over all of its starts.
    pub fn log(&self) -> String {
        let log = fs::read(self.directory.join("kubelet.log")).unwrap();
        String::from_utf8_lossy(&log).into_owned()
    }

    /// A command that runs in the node's namespaces, and ends with whoever ends the process.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.pid(), "--mount", "--pid", "--"]);
        command.args(["setpriv", "--pdeathsig", "KILL", "--", program]);
        command
    }

    /// What kubectl gets from a page of kubelet's, where there is one now.
    pub fn page(&self, cluster: &Cluster, page: &str) -> Option<String> {
        let output = cluster.kubectl(&[&self.server(), "get", "--raw", page]);
        if !output.status.success() {
            println!("{page}: {}", String::from_utf8_lossy(&output.stderr).trim_end());
        }
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }

    fn server(&self) -> String {
        let port = fs::read_to_string(self.directory.join("port")).unwrap();
        format!("--server=https://127.0.0.1:{}", port.trim())
    }

    /// Kills kubelet, and has no other one run until this is undone by [`Node::resume`]. Containers go on.
    pub fn halt(&self) {
        fs::write(self.directory.join("stop"), "").unwrap();
        wait_for("kubelet's end", || !self.directory.join("ready").exists());
    }

    pub fn resume(&self) {
        fs::remove_file(self.directory.join("stop")).unwrap();
        wait_for("another kubelet", || self.directory.join("ready").exists());
    }
}

/// A pod that was made.
#[derive(Debug, Clone)]
pub struct Made {
    pub name: String,
    pub uid: String,
}

/// A driver that is registered with the node's kubelet, and a namespace for pods.
pub struct NodeRig<'a> {
    pub cluster: &'a Cluster,
    pub node: &'a Node,
    pub namespace: String,
    pub driver_name: String,
    // Dropped in this order.
    _registrar: Process,
    pub driver: Driver,
}

/// The driver as this repository installs it, under another name, and with other lifecycle modes if any are given, which
/// nobody can change later.
pub fn definition(name: &str, modes: Option<&[&str]>) -> Value {
    let shipped = Path::new(REPOSITORY).join("deploy/base/csi-driver.yaml");
    let mut object: Value = serde_saphyr::from_str(&fs::read_to_string(shipped).unwrap()).unwrap();
    object["metadata"]["name"] = name.into();
    if let Some(modes) = modes {
        object["spec"]["volumeLifecycleModes"] = modes.into();
    }
    object
}

impl<'a> NodeRig<'a> {
    /// None, which is told, where the machine cannot run a node.
    pub fn new(cluster: &'a Cluster) -> Option<Self> {
        Self::with(cluster, &[], None)
    }

    /// With these flags of the driver, and other lifecycle modes.
    pub fn with(cluster: &'a Cluster, flags: &[&str], modes: Option<&[&str]>) -> Option<Self> {
        Self::behind(cluster, flags, modes, Driver::socket)
    }

    /// The same, with this socket for kubelet in the place of the driver's own.
    pub fn behind(
        cluster: &'a Cluster,
        flags: &[&str],
        modes: Option<&[&str]>,
        front: impl FnOnce(&Driver) -> PathBuf,
    ) -> Option<Self> {
        let node = match cluster.node() {
            Ok(node) => node,
            Err(NoCluster::Lacking(why)) => {
                skip(why);
                return None;
            }
            Err(NoCluster::Failed(why)) => panic!("{why}"),
        };
        let driver_name = format!("{}.csi.local", cluster.unique("inline"));
        let driver =
            Driver::with(PoolKind::Image, &[&["--driver-name", &driver_name], flags].concat());
        cluster.create(&cluster.api::<CSIDriver>(), definition(&driver_name, modes));
        let namespace = cluster.namespace("pods");
        // No controller makes it.
        let account = json!({ "metadata": { "name": "default" } });
        cluster.create(&cluster.api_in::<ServiceAccount>(&namespace), account);
        let mut command = Command::new(cluster.tool("node-driver-registrar"));
        command.arg(format!("-driver-name={driver_name}"));
        command.arg(format!("-kubelet-registration-path={}", path(&front(&driver))));
        command.arg("-plugin-registration-path");
        command.arg(node.root().join("plugins_registry"));
        let registrar = cluster.spawn("registrar", command);
        let rig = Self { cluster, node, namespace, driver_name, _registrar: registrar, driver };
        rig.wait_until_registered();
        Some(rig)
    }

    fn wait_until_registered(&self) {
        let nodes = self.cluster.api::<CSINode>();
        wait_for("the driver's registration", || {
            let node = self.cluster.get(&nodes, "node");
            let mut drivers = node.into_iter().flat_map(|node| node.spec.drivers);
            drivers.any(|driver| driver.name == self.driver_name)
        });
    }

    /// An inline volume of a pod: its name there, and what else is in `csi`.
    pub fn inline(&self, name: &str, csi: Value) -> Value {
        let mut csi = csi;
        csi["driver"] = self.driver_name.as_str().into();
        json!({ "name": name, "csi": csi })
    }

    /// Makes a pod whose container sleeps, with each of the volumes at `/NAME`; `spec` is what its spec has besides.
    pub fn create(&self, name: &str, volumes: &[Value], spec: &Value) -> Made {
        self.create_with(name, &json!({}), volumes, spec)
    }

    /// The same with these annotations.
    pub fn create_with(
        &self,
        name: &str,
        annotations: &Value,
        volumes: &[Value],
        spec: &Value,
    ) -> Made {
        let mut pod = pod(name, volumes, spec);
        pod["metadata"]["annotations"] = annotations.clone();
        let made = self.cluster.create(&self.pods(), pod);
        Made { name: name.to_owned(), uid: made.metadata.uid.unwrap() }
    }

    /// What would become of such a pod: none is made.
    pub fn try_out(&self, name: &str, volumes: &[Value]) -> kube::Result<Pod> {
        self.try_with(name, volumes, &json!({}))
    }

    /// The same with what its spec has besides.
    pub fn try_with(&self, name: &str, volumes: &[Value], spec: &Value) -> kube::Result<Pod> {
        let pod = serde_json::from_value(pod(name, volumes, spec)).unwrap();
        let params = PostParams { dry_run: true, ..PostParams::default() };
        self.cluster.block_on(self.pods().create(&params, &pod))
    }

    /// The same, and waits until it runs.
    pub fn run(&self, name: &str, volumes: &[Value], spec: &Value) -> Made {
        let made = self.create(name, volumes, spec);
        self.wait_until_ready(&made);
        made
    }

    pub fn wait_until_ready(&self, pod: &Made) {
        wait_for(&format!("pod {} runs", pod.name), || self.is_ready(&pod.name));
    }

    pub fn pods(&self) -> kube::Api<Pod> {
        self.cluster.api_in(&self.namespace)
    }

    pub fn is_ready(&self, name: &str) -> bool {
        let status = self.cluster.get(&self.pods(), name).and_then(|pod| pod.status);
        let conditions =
            status.into_iter().flat_map(|status| status.conditions.unwrap_or_default());
        conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True")
    }

    /// Runs a script in the pod's container, with whatever success; what it says, errors among it.
    pub fn exec(&self, pod: &Made, script: &str) -> String {
        self.exec_in(pod, CONTAINER, script)
    }

    /// The same in the container of that name.
    pub fn exec_in(&self, pod: &Made, container: &str, script: &str) -> String {
        // Kubelet cuts the command at each space.
        let script = STANDARD.encode(format!("exec 2>&1\n{script}\ntrue"));
        let command = format!("sh -c echo${{IFS}}{script}|base64${{IFS}}-d|sh");
        let query: String = form_urlencoded::byte_serialize(command.as_bytes()).collect();
        let at = format!("/run/{}/{}/{container}?cmd={query}", self.namespace, pod.name);
        said(self.cluster.kubectl(&[
            &self.node.server(),
            "create",
            "--raw",
            &at,
            "-f",
            "/dev/null",
        ]))
    }

    /// Deletes the pod and waits until kubelet has said that nothing of it runs.
    pub fn delete(&self, pod: &Made) {
        self.cluster.delete(&self.pods(), &pod.name);
        self.cluster.wait_until_gone(&self.pods(), &pod.name);
    }

    /// Takes the object away, whatever runs.
    pub fn forget(&self, pod: &Made) {
        let now = DeleteParams::default().grace_period(0);
        self.cluster.block_on(self.pods().delete(&pod.name, &now)).unwrap();
        self.cluster.wait_until_gone(&self.pods(), &pod.name);
    }

    /// Waits until an event of the pod has all of these words, and returns its message.
    pub fn told(&self, pod: &Made, words: &[&str]) -> String {
        self.cluster.wait_for(&format!("an event with {words:?}"), || self.event(pod, words))
    }

    /// What an event of the pod says that has all of these words, if there is one by now.
    pub fn event(&self, pod: &Made, words: &[&str]) -> Option<String> {
        let events = self.cluster.api_in::<Event>(&self.namespace);
        let all = self.cluster.block_on(events.list(&Default::default())).unwrap();
        let of_pod =
            all.into_iter().filter(|event| event.involved_object.uid.as_ref() == Some(&pod.uid));
        let mut messages = of_pod.filter_map(|event| event.message);
        messages.find(|message| words.iter().all(|word| message.contains(word)))
    }

    /// Puts these values into a secret, which is made if it is not there.
    pub fn secret(&self, name: &str, values: &[(&str, &str)]) {
        let secrets = self.cluster.api_in::<Secret>(&self.namespace);
        let values: serde_json::Map<_, _> =
            values.iter().map(|(key, value)| ((*key).to_owned(), (*value).into())).collect();
        let content = json!({ "metadata": { "name": name }, "stringData": values });
        match self.cluster.get(&secrets, name) {
            None => drop(self.cluster.create(&secrets, content)),
            Some(_) => drop(self.cluster.merge(&secrets, name, &content)),
        }
    }

    pub fn pod_directory(&self, pod: &Made) -> PathBuf {
        self.node.root().join("pods").join(&pod.uid)
    }

    /// Where kubelet has the driver publish the volume.
    pub fn target(&self, pod: &Made, volume: &str) -> PathBuf {
        self.pod_directory(pod).join("volumes/kubernetes.io~csi").join(volume).join("mount")
    }

    /// Whether the driver knows the volume by kubelet's handle for it, at that place.
    pub fn is_published(&self, pod: &Made, volume: &str) -> bool {
        let target = self.target(pod, volume);
        match self.driver.call(stats(&handle(pod, volume), path(&target))) {
            Ok(_) => is_mounted(&target),
            Err(status) => {
                assert_eq!(status.code(), Code::NotFound, "{status:?}");
                assert!(!is_mounted(&target), "{} is mounted", target.display());
                false
            }
        }
    }

    /// Waits until neither driver nor kubelet has anything of the pod.
    pub fn wait_until_nothing_is_left(&self, pod: &Made, volumes: &[&str]) {
        let directory = self.pod_directory(pod);
        wait_for(&format!("the end of {}", directory.display()), || !directory.exists());
        for volume in volumes {
            assert!(!self.is_published(pod, volume), "{volume}");
        }
    }

    /// The calls that the driver has logged which name all of these.
    pub fn calls(&self, words: &[&str]) -> usize {
        let log = self.driver.log();
        log.lines().filter(|line| words.iter().all(|word| line.contains(word))).count()
    }
}

/// A pod of the node that sleeps. Containers that `spec` has are completed; else it has one.
fn pod(name: &str, volumes: &[Value], spec: &Value) -> Value {
    let mounts = volumes.iter().map(|volume| {
        let name = volume["name"].as_str().unwrap();
        json!({ "name": name, "mountPath": format!("/{name}") })
    });
    let mut object = json!({ "metadata": { "name": name }, "spec": spec });
    object["spec"]["nodeName"] = "node".into();
    object["spec"]["hostNetwork"] = true.into();
    object["spec"]["automountServiceAccountToken"] = false.into();
    // Who sleeps does not hear that it is to end.
    object["spec"]["terminationGracePeriodSeconds"] = 0.into();
    object["spec"]["volumes"] = volumes.into();
    if spec["containers"].is_null() {
        let main = json!({ "name": CONTAINER, "volumeMounts": mounts.collect::<Vec<_>>() });
        object["spec"]["containers"] = json!([main]);
    }
    for list in ["containers", "initContainers"] {
        for container in object["spec"][list].as_array_mut().into_iter().flatten() {
            container["image"] = IMAGE.into();
            container["imagePullPolicy"] = "Never".into();
        }
    }
    object
}

/// What kubelet calls a pod's own volume (pkg/volume/csi, makeVolumeHandle).
pub fn handle(pod: &Made, volume: &str) -> String {
    let digest = Sha256::digest(format!("{}{volume}", pod.uid));
    let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("csi-{digits}")
}

impl Drop for NodeRig<'_> {
    /// A test that has failed leaves pods: kubelet takes them and their volumes away before the driver goes.
    fn drop(&mut self) {
        let _ = fs::remove_file(self.node.directory.join("stop"));
        let now = DeleteParams::default().grace_period(0);
        let _ = self.cluster.block_on(self.pods().delete_collection(&now, &Default::default()));
        if !std::thread::panicking() {
            return;
        }
        if !self.driver.is_running() {
            let _ = self.driver.try_start();
        }
        // The tests of a cluster run one at a time: whatever is mounted there is of this one.
        let root = self.node.root();
        let is_there = |directory: PathBuf| {
            fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some())
        };
        // Not all volumes of pods are mounted.
        let at_work = || {
            mounts().iter().any(|mount| mount.target != root && mount.target.starts_with(&root))
                || is_there(root.join("pods"))
        };
        let until = Instant::now() + CLEAN_UP;
        while at_work() && Instant::now() < until {
            thread::sleep(Duration::from_millis(50));
        }
    }
}
