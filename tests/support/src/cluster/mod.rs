//! A real API server, run by hack/cluster.sh, and what tests need of it: objects, accounts and tokens
//! (`access`), volumes and snapshots (`storage`), the released programs around them (`programs`), a
//! connection that can be cut (`proxy`) or shared out (`balancer`), certificates (`tls`), a driver to begin with (`rig`) and one that
//! behaves as ours would not (`fake_driver`), one that keeps what it is asked (`recorder`), our node proxy with who plays kubelet
//! before it (`node_proxy`), our sidecar and who asks one (`sidecar`, `sidecar_rig`, `cbt_http`), our session manager (`manager`),
//! our admission webhooks (`admission`), our aggregated API server (`aggregated`), a node on which pods run (`kubelet`), the same
//! with a driver that leaves volumes to the container runtime (`runtime`), snapshot sessions made by hand (`session`), and the one
//! cluster that all tests of a binary share (`shared`).

pub mod access;
pub mod admission;
pub mod aggregated;
pub mod balancer;
pub mod cbt_http;
pub mod everything;
pub mod fake_driver;
pub mod kubelet;
pub mod manager;
pub mod node_proxy;
pub mod programs;
pub mod proxy;
pub mod recorder;
pub mod rig;
pub mod runtime;
pub mod session;
mod shared;
pub mod sidecar;
pub mod sidecar_rig;
pub mod storage;
pub mod tls;

use std::fmt::Debug;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use csi_loopback::kubernetes::client::{Rate, connect};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use crate::driver::wait_for;
use crate::{REPOSITORY, keep, path};
use kubelet::Node;
use programs::Process;
pub use shared::shared;

/// Building the tools is part of the first start, where nobody did so before.
const START: Duration = Duration::from_secs(1800);

/// Tests are not to wait for a limit that is there to be kind to a server.
const RATE: Rate = Rate { per_second: 1000.0, burst: 1000 };

/// Why there is no cluster.
#[derive(Debug, Clone)]
pub enum NoCluster {
    /// The machine lacks something.
    Lacking(String),
    Failed(String),
}

/// Waits until a script says in its directory that all of it answers.
fn await_ready(script: &str, process: &mut Process, directory: &Path) -> Result<(), NoCluster> {
    let until = Instant::now() + START;
    while !directory.join("ready").exists() {
        if let Some(status) = process.ended() {
            let log = process.log();
            return Err(match status.code() {
                Some(77) => NoCluster::Lacking(log.lines().last().unwrap_or("").to_owned()),
                _ => NoCluster::Failed(format!("{script} ended with {status}:\n{log}")),
            });
        }
        assert!(
            Instant::now() < until,
            "{script} is not ready within {START:?}: {}",
            process.log()
        );
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// A cluster, which ends when it is dropped.
pub struct Cluster {
    client: Client,
    runtime: Runtime,
    names: AtomicU32,
    /// Bytes of the audit log.
    requests_from: AtomicU64,
    node: OnceLock<Result<Node, NoCluster>>,
    guard: Option<shared::Guard>,
    // Dropped in this order.
    process: Process,
    directory: TempDir,
}

impl Cluster {
    /// Starts one and waits until all of it answers.
    pub fn start() -> Result<Self, NoCluster> {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let dir = directory.path().join("cluster");
        let mut command = Command::new(Path::new(REPOSITORY).join("hack/cluster.sh"));
        command.arg(&dir);
        let mut process = Process::spawn("cluster.sh", command, directory.path());
        process.quiet = true;
        await_ready("hack/cluster.sh", &mut process, &dir)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let kubeconfig = dir.join("kubeconfig");
        let client = runtime.block_on(connect(Some(&kubeconfig), RATE)).unwrap();
        let (names, node) = (AtomicU32::new(0), OnceLock::new());
        let requests_from = AtomicU64::new(0);
        Ok(Self { client, runtime, names, requests_from, node, guard: None, process, directory })
    }

    /// A node, which is started when it is first asked for.
    pub fn node(&self) -> Result<&Node, &NoCluster> {
        self.node.get_or_init(|| self.start_node()).as_ref()
    }

    fn start_node(&self) -> Result<Node, NoCluster> {
        let node = Node::start(self)?;
        if let Some(guard) = &self.guard {
            guard.add(node.script());
        }
        Ok(node)
    }

    /// What hack/cluster.sh has made: logs, keys, tools.
    pub fn directory(&self) -> PathBuf {
        self.directory.path().join("cluster")
    }

    /// A directory beside it, in which tests may do what they like.
    pub fn scratch(&self) -> &Path {
        self.directory.path()
    }

    /// The administrator's.
    pub fn kubeconfig(&self) -> PathBuf {
        self.directory().join("kubeconfig")
    }

    /// `https://HOST:PORT`
    pub fn server(&self) -> String {
        let kubeconfig = fs::read_to_string(self.kubeconfig()).unwrap();
        let line = kubeconfig.lines().find_map(|line| line.trim().strip_prefix("server: "));
        line.unwrap().to_owned()
    }

    pub fn tool(&self, name: &str) -> PathBuf {
        self.directory().join("tools").join(name)
    }

    /// The administrator's client.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// A client with a kubeconfig of another one.
    pub fn client_of(&self, kubeconfig: &Path) -> Client {
        self.block_on(connect(Some(kubeconfig), RATE)).unwrap()
    }

    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Begins what goes on beside the test.
    pub fn beside<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.runtime.spawn(future)
    }

    /// Runs kubectl as administrator.
    pub fn kubectl(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(self.tool("kubectl"));
        command.env("KUBECONFIG", self.kubeconfig()).arg("--cache-dir");
        command.arg(self.scratch().join("kubectl-cache")).args(arguments).stdin(Stdio::null());
        programs::finish(command)
    }

    /// A name that no other object of this cluster has.
    pub fn unique(&self, prefix: &str) -> String {
        format!("{prefix}-{}", self.names.fetch_add(1, Ordering::Relaxed))
    }

    /// Makes a namespace, whose name begins with `prefix`.
    pub fn namespace(&self, prefix: &str) -> String {
        let name = self.unique(prefix);
        self.create(&self.api::<Namespace>(), json!({ "metadata": { "name": name } }));
        name
    }

    /// Objects that belong to no namespace, or those of all.
    pub fn api<K: Resource<DynamicType = ()>>(&self) -> Api<K> {
        Api::all(self.client())
    }

    pub fn api_in<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client(), namespace)
    }

    /// Makes an object; kind and version need not be given.
    pub fn create<K: Object>(&self, api: &Api<K>, mut object: Value) -> K {
        object["apiVersion"] = K::api_version(&()).into();
        object["kind"] = K::kind(&()).into();
        let object: K = serde_json::from_value(object).unwrap();
        self.block_on(api.create(&PostParams::default(), &object)).unwrap()
    }

    pub fn get<K: Object>(&self, api: &Api<K>, name: &str) -> Option<K> {
        self.block_on(api.get_opt(name)).unwrap()
    }

    /// Changes what `patch` names (RFC 7386).
    pub fn merge<K: Object>(&self, api: &Api<K>, name: &str, patch: &Value) -> K {
        self.block_on(api.patch(name, &PatchParams::default(), &Patch::Merge(patch))).unwrap()
    }

    /// Changes the status, as a controller does.
    pub fn merge_status<K: Object>(&self, api: &Api<K>, name: &str, status: &Value) -> K {
        let patch = json!({ "status": status });
        let patch = Patch::Merge(&patch);
        self.block_on(api.patch_status(name, &PatchParams::default(), &patch)).unwrap()
    }

    /// Asks for an object's end, which its finalizers may delay.
    pub fn delete<K: Object>(&self, api: &Api<K>, name: &str) {
        self.block_on(api.delete(name, &DeleteParams::default())).unwrap();
    }

    pub fn wait_until_gone<K: Object>(&self, api: &Api<K>, name: &str) {
        self.wait_for(&format!("the end of {} {name}", K::kind(&())), || {
            self.get(api, name).is_none().then_some(())
        });
    }

    /// Waits until there is something.
    pub fn wait_for<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let mut found = None;
        wait_for(what, || {
            found = look();
            found.is_some()
        });
        found.unwrap()
    }

    /// The requests that the API server has answered since the test started, as its audit log has them: `verb`,
    /// `requestURI`, `objectRef`, `user.username`, `userAgent`, `responseStatus.code`.
    pub fn requests(&self) -> Vec<Value> {
        let mut log = File::open(self.request_log()).unwrap();
        log.seek(SeekFrom::Start(self.requests_from.load(Ordering::Relaxed))).unwrap();
        // The last line may be half written.
        let lines = BufReader::new(log).lines();
        lines.filter_map(|line| serde_json::from_str(&line.ok()?).ok()).collect()
    }

    fn request_log(&self) -> PathBuf {
        self.directory().join("requests.log")
    }

    /// From here on [`Cluster::requests`] has no earlier ones: the log grows by a thousand lines a second.
    fn forget_requests(&self) {
        let length = fs::metadata(self.request_log()).unwrap().len();
        self.requests_from.store(length, Ordering::Relaxed);
    }

    /// How many requests a user has made so far.
    pub fn requests_by(&self, user: &str) -> usize {
        self.requests().iter().filter(|request| request["user"]["username"] == user).count()
    }

    /// What the part of that name has logged: etcd, kube-apiserver, snapshot-controller.
    pub fn log(&self, part: &str) -> String {
        let log = fs::read(self.directory().join(format!("{part}.log"))).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    /// Writes a file into the scratch directory under a name of its own.
    pub fn write(&self, name: &str, content: &str) -> PathBuf {
        let file = self.scratch().join(self.unique(name));
        fs::write(&file, content).unwrap();
        file
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Its kubelet has no use for an API server that is going.
        self.node.take();
        self.process.stop();
        if keep() {
            println!("left in place: {}", path(self.scratch()));
            self.directory.disable_cleanup(true);
        }
    }
}

/// What tests make and look at.
pub trait Object:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize
{
}

impl<K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize> Object for K {}

/// Pids and command lines of processes that work in the directory or name it.
pub fn processes_of(directory: &Path) -> Vec<(Pid, String)> {
    let name = path(directory);
    let processes = fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let line = fs::read(entry.path().join("cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            let works_there =
                fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd == directory);
            (works_there || line.contains(name)).then_some((Pid::from_raw(pid), line))
        })
        .collect()
}

/// A part of the cluster that stands still until this is dropped.
pub struct Paused(Vec<Pid>);

impl Drop for Paused {
    fn drop(&mut self) {
        for pid in &self.0 {
            let _ = kill(*pid, Signal::SIGCONT);
        }
    }
}

impl Cluster {
    /// Makes a part (`snapshot-controller`, …) stand still.
    pub fn pause(&self, part: &str) -> Paused {
        let pids = self.pids_of(part);
        assert!(!pids.is_empty(), "no {part} runs");
        pids.iter().for_each(|pid| kill(*pid, Signal::SIGSTOP).unwrap());
        Paused(pids)
    }

    fn pids_of(&self, part: &str) -> Vec<Pid> {
        let all = processes_of(&self.directory()).into_iter();
        let tool = format!("tools/{part} ");
        all.filter(|(_, line)| line.contains(&tool)).map(|(pid, _)| pid).collect()
    }

    /// Kills the API server and waits until another one answers in its place.
    pub fn restart_api_server(&self) {
        let before = self.pids_of("kube-apiserver");
        fs::write(self.directory().join("restart"), "").unwrap();
        before.iter().for_each(|pid| kill(*pid, Signal::SIGKILL).unwrap());
        wait_for("another API server", || {
            let now = self.pids_of("kube-apiserver");
            let ready = || self.kubectl(&["get", "--raw", "/readyz"]).status.success();
            now.iter().any(|pid| !before.contains(pid)) && ready()
        });
    }
}
