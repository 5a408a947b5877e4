//! A node of the cluster, run by hack/kubelet.sh: a released kubelet with containerd, so that pods
//! run with volumes of our driver. The first test that needs it starts it, and it stops with the
//! cluster.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use csi_loopback::backend::PoolKind;
use k8s_openapi::api::core::v1::{Event, Pod, Secret};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode};
use kube::api::{DeleteParams, PostParams};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tonic::Code;

use super::access::shipped;
use super::programs::{Process, stdout_of};
use super::{Cluster, NoCluster, await_ready};
use crate::driver::{
    Driver, PATIENCE, attached_of_pool, binary, loops_named, map, mounts, request_detach_named,
    stats, wait_for,
};
use crate::inline::{self, is_mounted};
use crate::process::text_of;
use crate::{REPOSITORY, path};

/// The default container of a pod.
const CONTAINER: &str = "main";
/// The only image of the node.
const IMAGE: &str = "localhost/busybox:node";

/// The node of a cluster. Dropping it stops the node.
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

    /// The process of hack/kubelet.sh.
    pub fn script(&self) -> Pid {
        self.process.pid()
    }

    /// Kubelet's --root-dir.
    pub fn root(&self) -> PathBuf {
        self.directory.join("kubelet")
    }

    /// The directory that crust_ops and csi-loopback-runc share.
    pub fn crust(&self) -> PathBuf {
        self.directory.join("crust")
    }

    /// The environment variable with the configuration of csi-loopback-runc, as NAME=VALUE.
    pub fn runtime_environment(&self) -> String {
        format!("CSI_LOOPBACK_RUNC_CONFIG={}", path(&self.directory.join("oci-runtime.yaml")))
    }

    /// The first process in the node's namespaces.
    pub fn pid(&self) -> String {
        fs::read_to_string(self.directory.join("pid")).unwrap().trim().to_owned()
    }

    /// The log of all runs of kubelet.
    pub fn log(&self) -> String {
        text_of(&self.directory.join("kubelet.log"))
    }

    /// A command that runs in the node's namespaces, and is killed with its parent.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.pid(), "--mount", "--pid", "--"]);
        command.args(["setpriv", "--pdeathsig", "KILL", "--", program]);
        command
    }

    /// The response of a path of kubelet; None while kubelet does not run.
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

    /// Kills kubelet until [`Node::resume`]. Containers continue to run.
    pub fn halt(&self) {
        fs::write(self.directory.join("stop"), "").unwrap();
        wait_for("the end of kubelet", || !self.directory.join("ready").exists());
    }

    pub fn resume(&self) {
        fs::remove_file(self.directory.join("stop")).unwrap();
        wait_for("another kubelet", || self.directory.join("ready").exists());
    }
}

/// A created pod.
#[derive(Debug, Clone)]
pub struct CreatedPod {
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

/// The shipped CSIDriver with another name and, optionally, other lifecycle modes, which are
/// immutable.
pub fn definition(name: &str, modes: Option<&[&str]>) -> Value {
    let mut object = shipped("deploy/base/csi-driver.yaml").remove(0);
    object["metadata"]["name"] = name.into();
    if let Some(modes) = modes {
        object["spec"]["volumeLifecycleModes"] = modes.into();
    }
    object
}

impl<'a> NodeRig<'a> {
    /// Reports a skip and returns None if the machine cannot run a node.
    pub fn new(cluster: &'a Cluster) -> Option<Self> {
        Self::with(cluster, &[], None)
    }

    /// With these flags of the driver, and other lifecycle modes.
    pub fn with(cluster: &'a Cluster, flags: &[&str], modes: Option<&[&str]>) -> Option<Self> {
        Self::with_socket(cluster, flags, modes, Driver::socket)
    }

    /// Registers the socket that `front` returns with kubelet, instead of the driver's.
    pub fn with_socket(
        cluster: &'a Cluster,
        flags: &[&str],
        modes: Option<&[&str]>,
        front: impl FnOnce(&Driver) -> PathBuf,
    ) -> Option<Self> {
        let node = cluster.node().map_err(NoCluster::report).ok()?;
        let driver_name = format!("{}.csi.local", cluster.unique("inline"));
        let driver =
            Driver::with(PoolKind::Image, &[&["--driver-name", &driver_name], flags].concat());
        cluster.create(&cluster.api::<CSIDriver>(), definition(&driver_name, modes));
        let namespace = cluster.namespace("pods");
        // No controller creates this ServiceAccount.
        cluster.account(&namespace, "default");
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
        wait_for("registration of the driver", || {
            let node = self.cluster.get(&nodes, "node");
            let mut drivers = node.into_iter().flat_map(|node| node.spec.drivers);
            drivers.any(|driver| driver.name == self.driver_name)
        });
    }

    /// An inline volume of a pod with this name and these fields of `csi`.
    pub fn inline(&self, name: &str, csi: Value) -> Value {
        let mut csi = csi;
        csi["driver"] = self.driver_name.as_str().into();
        json!({ "name": name, "csi": csi })
    }

    /// Creates a pod whose container sleeps, with each volume at `/NAME` and additional fields of
    /// its spec.
    pub fn create(&self, name: &str, volumes: &[Value], spec: &Value) -> CreatedPod {
        self.create_with(name, &json!({}), volumes, spec)
    }

    /// Creates a pod with these annotations.
    pub fn create_with(
        &self,
        name: &str,
        annotations: &Value,
        volumes: &[Value],
        spec: &Value,
    ) -> CreatedPod {
        let mut pod = pod(name, volumes, spec);
        pod["metadata"]["annotations"] = annotations.clone();
        let created = self.cluster.create(&self.pods(), pod);
        CreatedPod { name: name.to_owned(), uid: created.metadata.uid.unwrap() }
    }

    /// The result of a dry run of the creation of a pod.
    pub fn dry_run(&self, name: &str, volumes: &[Value]) -> kube::Result<Pod> {
        self.dry_run_with(name, volumes, &json!({}))
    }

    /// A dry run with additional fields of the spec.
    pub fn dry_run_with(&self, name: &str, volumes: &[Value], spec: &Value) -> kube::Result<Pod> {
        let pod = serde_json::from_value(pod(name, volumes, spec)).unwrap();
        let params = PostParams { dry_run: true, ..PostParams::default() };
        self.cluster.block_on(self.pods().create(&params, &pod))
    }

    /// Creates a pod and waits until it runs.
    pub fn run(&self, name: &str, volumes: &[Value], spec: &Value) -> CreatedPod {
        let pod = self.create(name, volumes, spec);
        self.wait_until_ready(&pod);
        pod
    }

    pub fn wait_until_ready(&self, pod: &CreatedPod) {
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

    /// Runs a script in the pod's container. Returns stdout and stderr; ignores the exit code.
    pub fn exec(&self, pod: &CreatedPod, script: &str) -> String {
        self.exec_in(pod, CONTAINER, script)
    }

    /// Runs a script in another container of the pod.
    pub fn exec_in(&self, pod: &CreatedPod, container: &str, script: &str) -> String {
        // Kubelet splits the command at spaces.
        let script = STANDARD.encode(format!("exec 2>&1\n{script}\ntrue"));
        let command = format!("sh -c echo${{IFS}}{script}|base64${{IFS}}-d|sh");
        let query: String = form_urlencoded::byte_serialize(command.as_bytes()).collect();
        let at = format!("/run/{}/{}/{container}?cmd={query}", self.namespace, pod.name);
        stdout_of(self.cluster.kubectl(&[
            &self.node.server(),
            "create",
            "--raw",
            &at,
            "-f",
            "/dev/null",
        ]))
    }

    /// Deletes the pod and waits until kubelet has removed it.
    pub fn delete(&self, pod: &CreatedPod) {
        self.cluster.delete(&self.pods(), &pod.name);
        self.cluster.wait_until_gone(&self.pods(), &pod.name);
    }

    /// Deletes the object immediately, also if the pod still runs.
    pub fn forget(&self, pod: &CreatedPod) {
        let now = DeleteParams::default().grace_period(0);
        self.cluster.block_on(self.pods().delete(&pod.name, &now)).unwrap();
        self.cluster.wait_until_gone(&self.pods(), &pod.name);
    }

    /// Waits for an event of the pod with all of these words, and returns its message.
    pub fn wait_for_event(&self, pod: &CreatedPod, words: &[&str]) -> String {
        self.cluster.wait_for(&format!("an event with {words:?}"), || self.event(pod, words))
    }

    /// The message of an event of the pod with all of these words, if any.
    pub fn event(&self, pod: &CreatedPod, words: &[&str]) -> Option<String> {
        let events = self.cluster.api_in::<Event>(&self.namespace);
        let all = self.cluster.block_on(events.list(&Default::default())).unwrap();
        let of_pod =
            all.into_iter().filter(|event| event.involved_object.uid.as_ref() == Some(&pod.uid));
        let mut messages = of_pod.filter_map(|event| event.message);
        messages.find(|message| words.iter().all(|word| message.contains(word)))
    }

    /// Creates or changes a Secret with these values.
    pub fn secret(&self, name: &str, values: &[(&str, &str)]) {
        let secrets = self.cluster.api_in::<Secret>(&self.namespace);
        let content = json!({ "metadata": { "name": name }, "stringData": map(values) });
        match self.cluster.get(&secrets, name) {
            None => drop(self.cluster.create(&secrets, content)),
            Some(_) => drop(self.cluster.merge(&secrets, name, &content)),
        }
    }

    pub fn pod_directory(&self, pod: &CreatedPod) -> PathBuf {
        self.node.root().join("pods").join(&pod.uid)
    }

    /// The target path of the volume.
    pub fn target(&self, pod: &CreatedPod, volume: &str) -> PathBuf {
        self.pod_directory(pod).join("volumes/kubernetes.io~csi").join(volume).join("mount")
    }

    /// Whether the driver has published the volume with kubelet's handle and target path.
    pub fn is_published(&self, pod: &CreatedPod, volume: &str) -> bool {
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

    /// Waits until kubelet has removed the pod's directory, and asserts that the driver has
    /// unpublished its volumes.
    pub fn wait_until_cleaned_up(&self, pod: &CreatedPod, volumes: &[&str]) {
        let directory = self.pod_directory(pod);
        wait_for(&format!("removal of {}", directory.display()), || !directory.exists());
        for volume in volumes {
            assert!(!self.is_published(pod, volume), "{volume}");
        }
    }

    pub fn wait_until_detached(&self, volume_id: &str) {
        wait_for("detachment of the volume", || loops_named(volume_id).is_empty());
    }

    /// Mounts of volumes, directories of pods and files of volumes. A deferred volume has no mount
    /// on this host.
    fn remains(&self) -> Vec<PathBuf> {
        [self.volume_mounts(), self.pod_directories(), self.attached()].concat()
    }

    fn attached(&self) -> Vec<PathBuf> {
        attached_of_pool(&self.driver.data_dir())
    }

    fn pod_directories(&self) -> Vec<PathBuf> {
        let pods = fs::read_dir(self.node.root().join("pods")).into_iter().flatten().flatten();
        pods.map(|pod| pod.path()).collect()
    }

    /// Each after the one that it is on.
    fn volume_mounts(&self) -> Vec<PathBuf> {
        let root = self.node.root();
        let targets = mounts().into_iter().map(|mount| mount.target);
        targets.filter(|target| *target != root && target.starts_with(&root)).collect()
    }

    /// Removes what kubelet has left.
    fn remove_remains(&self) {
        for target in self.volume_mounts().iter().rev() {
            let _ = Command::new("umount").arg("--lazy").arg(target).status();
        }
        for file in self.attached() {
            request_detach_named(file.file_name().unwrap().to_str().unwrap());
        }
        // A directory may only be removed without a mount below it: it could be one of the host.
        if self.volume_mounts().is_empty() {
            self.pod_directories().iter().for_each(|pod| drop(fs::remove_dir_all(pod)));
        }
    }

    /// The number of lines of the driver's log with all of these words.
    pub fn calls(&self, words: &[&str]) -> usize {
        let log = self.driver.log();
        log.lines().filter(|line| words.iter().all(|word| line.contains(word))).count()
    }
}

/// A pod for the node. Completes the containers in `spec`, or adds one that sleeps.
fn pod(name: &str, volumes: &[Value], spec: &Value) -> Value {
    let mounts = volumes.iter().map(|volume| {
        let name = volume["name"].as_str().unwrap();
        json!({ "name": name, "mountPath": format!("/{name}") })
    });
    let mut object = json!({ "metadata": { "name": name }, "spec": spec });
    object["spec"]["nodeName"] = "node".into();
    object["spec"]["hostNetwork"] = true.into();
    object["spec"]["automountServiceAccountToken"] = false.into();
    // `sleep` ignores SIGTERM as the first process of a container.
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

/// Kubelet's handle of an inline volume.
pub fn handle(pod: &CreatedPod, volume: &str) -> String {
    inline::handle(&pod.uid, volume)
}

impl Drop for NodeRig<'_> {
    /// The driver stops after kubelet has removed the pods and their volumes. Tests of a cluster run
    /// one at a time, so what remains belongs to this test: it fails, and the next one does not.
    fn drop(&mut self) {
        let _ = fs::remove_file(self.node.directory.join("stop"));
        let now = DeleteParams::default().grace_period(0);
        let _ = self.cluster.block_on(self.pods().delete_collection(&now, &Default::default()));
        if !self.remains().is_empty() && !self.driver.is_running() {
            let _ = self.driver.try_start();
        }
        let until = Instant::now() + PATIENCE;
        while !self.remains().is_empty() && Instant::now() < until {
            thread::sleep(Duration::from_millis(50));
        }
        let left = self.remains();
        if left.is_empty() {
            return;
        }
        self.remove_remains();
        let message = format!("kubelet did not remove {left:?} in {PATIENCE:?}");
        assert!(thread::panicking(), "{message}");
        eprintln!("{message}");
    }
}
