//! A node whose driver defers mounts to the container runtime: with crust_ops, a RuntimeClass for
//! pods, and a watcher for mounts of deferred volumes on the node.

use std::fs;
use std::ops::{Deref, DerefMut};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use csi::volume_capability::access_mode::Mode;
use csi_loopback::kubernetes::defer_annotation::ANNOTATION;
use csi_loopback::proto::csi::v1 as csi;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::Cluster;
use super::access::shipped;
use super::admission::{Webhooks, With, set_policy};
use super::kubelet::{CreatedPod, NodeRig};
use super::programs::Process;
use crate::driver::{Driver, Watch, binary, create, mounted_as, wait_for};
use crate::path;

/// The shipped StorageClass.
const CLASS: &str = "deploy/base/classes.yaml";
/// Prefix of parameters for csi-provisioner.
const OF_KUBERNETES: &str = "csi.storage.k8s.io/";

pub struct Rig<'a> {
    // Dropped in this order: the pods and their volumes, then crust_ops.
    node: NodeRig<'a>,
    ops: Option<Process>,
    socket: PathBuf,
    /// The RuntimeClass of pods with deferred volumes.
    pub class: String,
}

impl<'a> Deref for Rig<'a> {
    type Target = NodeRig<'a>;

    fn deref(&self) -> &NodeRig<'a> {
        &self.node
    }
}

impl DerefMut for Rig<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.node
    }
}

impl<'a> Rig<'a> {
    /// Reports a skip and returns None if the machine cannot run a node.
    pub fn new(cluster: &'a Cluster) -> Option<Self> {
        Self::with_socket(cluster, Driver::socket)
    }

    /// Registers the socket that `front` returns with kubelet, instead of the driver's.
    pub fn with_socket(
        cluster: &'a Cluster,
        front: impl FnOnce(&Driver) -> PathBuf,
    ) -> Option<Self> {
        let socket = cluster.scratch().join(format!("{}.sock", cluster.unique("crust")));
        let endpoint = format!("--crust-endpoint={}", path(&socket));
        let flags = ["--enable-defer-fs-ops", &endpoint];
        let node = NodeRig::with_socket(cluster, &flags, None, front)?;
        let class = cluster.unique("deferring");
        let object = json!({ "metadata": { "name": class }, "handler": "csi-loopback" });
        cluster.create(&cluster.api::<RuntimeClass>(), object);
        let mut rig = Self { node, ops: None, socket, class };
        rig.start_ops();
        Some(rig)
    }

    /// Starts crust_ops in the namespaces of the node.
    pub fn start_ops(&mut self) {
        let mut command = self.node.node.command(binary());
        command.args(["--mode", "runtime-ops", "--endpoint", path(&self.socket)]);
        command.arg("--crust-dir").arg(self.node.node.crust());
        command.args(["--cli-env", &self.node.node.runtime_environment()]);
        // Shorter than the default of a minute, so that tests do not wait.
        command.args(["--collect-every", "1s"]);
        let mut ops = self.cluster.spawn("runtime-ops", command);
        let socket = self.socket.clone();
        ops.wait_for("it is ready", |_| UnixStream::connect(&socket).ok());
        self.ops = Some(ops);
    }

    /// Kills crust_ops.
    pub fn kill_ops(&mut self) {
        let mut ops = self.ops.take().unwrap();
        ops.signal(nix::sys::signal::Signal::SIGKILL);
        assert!(ops.wait(Duration::from_secs(20)).is_some());
        let socket = self.socket.clone();
        wait_for("the end of crust_ops", || UnixStream::connect(&socket).is_err());
    }

    /// Restarts the driver with or without runtime assisted mounting.
    pub fn restart_driver(&mut self, deferring: bool) {
        let (name, endpoint) = (self.driver_name.clone(), path(&self.socket).to_owned());
        let mut flags = vec!["--driver-name", &name, "--crust-endpoint", &endpoint];
        if deferring {
            flags.push("--enable-defer-fs-ops");
        }
        self.driver.restart_with(&flags);
    }

    /// Creates a volume as csi-provisioner does for a claim of this class. Returns the `csi` of its
    /// PersistentVolume.
    pub fn provision(&self, name: &str, class: &Value, bytes: u64) -> Value {
        let parameters = class["parameters"].as_object().unwrap();
        let fs_type = parameters[&format!("{OF_KUBERNETES}fstype")].as_str().unwrap();
        let of_driver = parameters.iter().filter(|(key, _)| !key.starts_with(OF_KUBERNETES));
        let request = csi::CreateVolumeRequest {
            parameters: of_driver
                .map(|(key, value)| (key.clone(), value.as_str().unwrap().to_owned()))
                .collect(),
            ..create(name, bytes, mounted_as(fs_type, Mode::SingleNodeSingleWriter))
        };
        let volume = self.driver.ok(request).volume.unwrap();
        json!({
            "driver": self.driver_name, "volumeHandle": volume.volume_id, "fsType": fs_type,
            "volumeAttributes": volume.volume_context,
        })
    }

    /// A pod volume for this claim, with the claim's name.
    pub fn claimed(&self, name: &str) -> Value {
        json!({ "name": name, "persistentVolumeClaim": { "claimName": name } })
    }

    /// The target path of the claim's volume.
    pub fn target_of_claim(&self, pod: &CreatedPod, name: &str) -> PathBuf {
        self.target(pod, &format!("{}-{name}", self.namespace))
    }

    /// Starts the webhooks for the driver, with a policy of these entries.
    pub fn webhooks(&self, entries: &[Value]) -> Webhooks {
        let policy = policy(entries);
        let with = With { policy: Some(&policy), ..With::default() };
        let webhooks = Webhooks::start(self.cluster, self.driver_name.clone(), &with);
        webhooks.configure(self.cluster, false, &self.namespace);
        let content = json!({ "volumeAttributes": { "content/a": "x" } });
        self.cluster.wait_for("the webhooks", || {
            let pod = self.dry_run("probe", &[self.inline("content", content.clone())]).ok()?;
            (pod.spec?.volumes?[0].csi.as_ref()?.read_only == Some(true)).then_some(())
        });
        webhooks
    }

    /// A policy entry with all features, for volumes of this StorageClass; the empty name is for
    /// inline volumes.
    pub fn entry(&self, storage_class: &str) -> Value {
        json!({
            "storageClass": storage_class, "runtimeClass": self.class, "fsGroup": true,
            "fsGroupChangePolicies": ["Always", "OnRootMismatch"], "subPath": true, "seLinux": false,
        })
    }

    /// The pod object in the API server.
    pub fn stored(&self, pod: &CreatedPod) -> Pod {
        self.cluster.get(&self.cluster.api_in::<Pod>(&self.namespace), &pod.name).unwrap()
    }

    /// The pod's annotation with its deferred volumes.
    pub fn opt_in(&self, pod: &CreatedPod) -> Option<String> {
        self.stored(pod).metadata.annotations?.remove(ANNOTATION)
    }

    /// Kubelet's statistics of the volume: capacity and used bytes.
    pub fn summary(&self, pod: &CreatedPod, volume: &str) -> Option<(u64, u64)> {
        let found = self.measured(pod, volume)?;
        Some((found["capacityBytes"].as_u64()?, found["usedBytes"].as_u64()?))
    }

    /// Waits until kubelet has new statistics of the volume.
    pub fn wait_for_new_stats(&self, pod: &CreatedPod, volume: &str) {
        let now = Timestamp::now();
        wait_for("new statistics of kubelet", || {
            let at =
                self.measured(pod, volume).map(|found| found["time"].as_str().unwrap().parse());
            at.is_some_and(|at: Result<Timestamp, _>| at.unwrap() > now)
        });
    }

    fn measured(&self, pod: &CreatedPod, volume: &str) -> Option<Value> {
        let page = self.node.node.page(self.cluster, "/stats/summary")?;
        let page: Value = serde_json::from_str(&page).unwrap();
        let mut pods = page["pods"].as_array()?.iter();
        let of_pod = pods.find(|one| one["podRef"]["uid"] == pod.uid.as_str())?;
        let mut volumes = of_pod["volume"].as_array()?.iter();
        volumes.find(|one| one["name"] == volume).cloned()
    }

    /// Watches the mounts of the host and of the node's namespace until the result is dropped.
    pub fn watch(&self) -> Watch {
        let (below, node) = (self.node.node.root(), self.node.node.pid());
        Watch::start(Duration::from_millis(2), move || {
            ["self", &node].into_iter().flat_map(|process| loop_mounts(process, &below)).collect()
        })
    }

    /// Mounts of loop devices in kubelet's directory, on the host.
    pub fn host_mounts(&self) -> Vec<String> {
        loop_mounts("self", &self.node.node.root())
    }

    /// Deletes the pod, and waits until its volumes and their entries are removed.
    pub fn delete_and_wait(&self, pod: &CreatedPod, volumes: &[&str]) {
        self.delete(pod);
        self.wait_until_cleaned_up(pod, volumes);
        wait_for("deletion of the entries", || self.handed_over() == 0);
        wait_for("the unmount on the host", || self.host_mounts().is_empty());
    }

    /// The number of entries of crust_ops.
    pub fn handed_over(&self) -> usize {
        let entries = fs::read_dir(self.node.node.crust()).unwrap().flatten();
        entries.filter(|entry| entry.file_name().len() == 64).count()
    }
}

/// The StorageClass of deploy/base, but with xfs: to grow a mounted ext4, the runtime needs
/// CAP_SYS_RESOURCE, which is not available on every test machine.
pub fn shipped_class() -> Value {
    let mut objects = shipped(CLASS).into_iter();
    let mut class = objects.find(|object| object["kind"] == "StorageClass").unwrap();
    class["parameters"][format!("{OF_KUBERNETES}fstype")] = "xfs".into();
    class
}

/// A policy with these entries, as JSON, which is valid YAML.
pub fn policy(entries: &[Value]) -> String {
    json!({ "deferral": entries }).to_string()
}

/// Changes the policy, and waits until `counts` reports that it is in effect.
pub fn change_policy(
    rig: &Rig<'_>,
    webhooks: &Webhooks,
    entries: &[Value],
    counts: impl Fn() -> bool,
) {
    set_policy(rig.cluster, &webhooks.home, &policy(entries));
    wait_for("the policy", counts);
}

/// Lines of a process's mount table with loop devices below the directory.
fn loop_mounts(process: &str, below: &Path) -> Vec<String> {
    let table = fs::read_to_string(format!("/proc/{process}/mountinfo")).unwrap();
    let is_one = |line: &&str| {
        let (mount, filesystem) = line.split_once(" - ").unwrap();
        let at = mount.split(' ').nth(4).unwrap();
        let source = filesystem.split(' ').nth(1).unwrap();
        source.starts_with("/dev/loop") && Path::new(at).starts_with(below)
    };
    table.lines().filter(is_one).map(str::to_owned).collect()
}

/// The spec of a pod that uses all features of a mount: fsGroup with OnRootMismatch, a subPath, an
/// init container and two containers.
pub fn demanding(class: &str, volume: &str) -> Value {
    let whole = json!({ "name": volume, "mountPath": "/data" });
    let part = json!({ "name": volume, "mountPath": "/part", "subPath": "deep/part" });
    json!({
        "runtimeClassName": class,
        "securityContext": { "fsGroup": 4321, "fsGroupChangePolicy": "OnRootMismatch" },
        "initContainers": [{
            "name": "init", "command": ["/bin/sh", "-c", "echo by init >>/data/init && echo in part >/part/init"],
            "volumeMounts": [whole, part],
        }],
        "containers": [
            { "name": "main", "volumeMounts": [whole] },
            { "name": "second", "securityContext": { "runAsUser": 1234, "runAsGroup": 1234 },
              "volumeMounts": [whole, part] },
        ],
    })
}

/// Asserts that all features of [`demanding`] work.
#[track_caller]
pub fn assert_served(rig: &Rig<'_>, pod: &CreatedPod) {
    assert_eq!(rig.exec(pod, "stat -c %g /data"), "4321\n");
    assert_eq!(rig.exec_in(pod, "second", "cat /part/init && echo mine >/part/own"), "in part\n");
    assert_eq!(rig.exec(pod, "stat -c '%u %g' /data/deep/part/own"), "1234 4321\n");
    rig.exec(pod, "echo shared >/data/shared; chmod 644 /data/shared");
    assert_eq!(rig.exec_in(pod, "second", "cat /data/shared"), "shared\n");
}

/// The device that the container has mounted at `/data`.
pub fn device_of(rig: &Rig<'_>, pod: &CreatedPod, container: &str) -> String {
    let mount = rig.exec_in(pod, container, "grep ' /data ' /proc/mounts");
    let device = mount.split(' ').next().unwrap().to_owned();
    assert!(device.starts_with("/dev/loop"), "{mount}");
    device
}
