//! A released API server, run by hack/cluster.sh, with helpers for tests: objects, accounts and
//! tokens (`access`), volumes and snapshots (`storage`), released programs (`programs`), a
//! connection that can be interrupted (`proxy`) or balanced (`balancer`), certificates (`tls`),
//! drivers (`rig`, `fake_driver`, `recorder`), the node proxy with a simulated kubelet
//! (`node_proxy`), the sidecar and its clients (`sidecar`, `sidecar_rig`, `cbt_http`), the session
//! manager (`manager`), mover pods (`movers`), the admission webhooks (`admission`), the aggregated
//! API server (`aggregated`), a node with pods (`kubelet`), also with deferred volumes (`runtime`),
//! snapshot sessions (`session`), and the cluster that all tests of a binary share (`shared`).

pub mod access;
pub mod admission;
pub mod aggregated;
pub mod balancer;
pub mod cbt_http;
pub mod dialect;
pub mod fake_driver;
pub mod foreign;
pub mod kubelet;
pub mod manager;
pub mod movers;
pub mod node_proxy;
pub mod nodes;
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
use std::process::{Command, Output};
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

use crate::driver::{PATIENCE, wait_for};
use crate::process::text_of;
use crate::{REPOSITORY, keep, path, skip};
use kubelet::Node;
use programs::Process;
pub use shared::shared;

/// Time limit of a start. The first one also builds the tools.
const START: Duration = Duration::from_secs(1800);

/// High, so that tests do not wait for rate limits.
const RATE: Rate = Rate { per_second: 1000.0, burst: 1000 };

/// The reason why there is no cluster.
#[derive(Debug, Clone)]
pub enum NoCluster {
    /// The machine does not meet a requirement.
    Unavailable(String),
    Failed(String),
}

impl NoCluster {
    /// Reports a skip. Panics if it is a failure.
    fn report(&self) {
        match self {
            Self::Unavailable(why) => skip(why),
            Self::Failed(why) => panic!("{why}"),
        }
    }
}

/// Waits until a script reports in its directory that it is ready.
fn await_ready(script: &str, process: &mut Process, directory: &Path) -> Result<(), NoCluster> {
    let until = Instant::now() + START;
    while !directory.join("ready").exists() {
        if let Some(status) = process.ended() {
            let log = process.log();
            return Err(match status.code() {
                Some(77) => NoCluster::Unavailable(log.lines().last().unwrap_or("").to_owned()),
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

/// A cluster. Dropping it stops the cluster.
pub struct Cluster {
    client: Client,
    runtime: Runtime,
    names: AtomicU32,
    /// Start of this test's requests in the audit log, in bytes.
    requests_from: AtomicU64,
    node: OnceLock<Result<Node, NoCluster>>,
    guard: Option<shared::Guard>,
    // Dropped in this order.
    process: Process,
    directory: TempDir,
}

impl Cluster {
    /// Starts a cluster and waits until it is ready.
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

    /// The node of the cluster. The first call starts it.
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

    /// The directory of hack/cluster.sh with logs, keys and tools.
    pub fn directory(&self) -> PathBuf {
        self.directory.path().join("cluster")
    }

    /// A private directory for tests.
    pub fn scratch(&self) -> &Path {
        self.directory.path()
    }

    /// The administrator's kubeconfig.
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

    /// A client with another kubeconfig.
    pub fn client_of(&self, kubeconfig: &Path) -> Client {
        self.block_on(connect(Some(kubeconfig), RATE)).unwrap()
    }

    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Spawns a task that runs in parallel to the test.
    pub fn spawn_task<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.runtime.spawn(future)
    }

    /// Runs kubectl as administrator.
    pub fn kubectl(&self, arguments: &[&str]) -> Output {
        self.kubectl_with_cache("kubectl-cache", arguments)
    }

    /// Runs kubectl with a cache directory of this name.
    fn kubectl_with_cache(&self, cache: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new(self.tool("kubectl"));
        command.env("KUBECONFIG", self.kubeconfig()).arg("--cache-dir");
        command.arg(self.scratch().join(cache)).args(arguments);
        programs::finish(command)
    }

    /// A unique name in this cluster.
    pub fn unique(&self, prefix: &str) -> String {
        format!("{prefix}-{}", self.names.fetch_add(1, Ordering::Relaxed))
    }

    /// Creates a namespace with a unique name that starts with `prefix`.
    pub fn namespace(&self, prefix: &str) -> String {
        let name = self.unique(prefix);
        self.create(&self.api::<Namespace>(), json!({ "metadata": { "name": name } }));
        name
    }

    /// The API of cluster-scoped objects, or of all namespaces.
    pub fn api<K: Resource<DynamicType = ()>>(&self) -> Api<K> {
        Api::all(self.client())
    }

    pub fn api_in<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client(), namespace)
    }

    /// Creates an object. Adds its kind and version.
    pub fn create<K: Object>(&self, api: &Api<K>, mut object: Value) -> K {
        object["apiVersion"] = K::api_version(&()).into();
        object["kind"] = K::kind(&()).into();
        let object: K = serde_json::from_value(object).unwrap();
        self.block_on(api.create(&PostParams::default(), &object)).unwrap()
    }

    pub fn get<K: Object>(&self, api: &Api<K>, name: &str) -> Option<K> {
        self.block_on(api.get_opt(name)).unwrap()
    }

    pub fn list<K: Object>(&self, api: &Api<K>) -> Vec<K> {
        self.block_on(api.list(&Default::default())).unwrap().items
    }

    /// Applies a merge patch (RFC 7386).
    pub fn merge<K: Object>(&self, api: &Api<K>, name: &str, patch: &Value) -> K {
        self.try_merge(api, name, patch).unwrap()
    }

    pub fn try_merge<K: Object>(&self, api: &Api<K>, name: &str, patch: &Value) -> kube::Result<K> {
        self.block_on(api.patch(name, &PatchParams::default(), &Patch::Merge(patch)))
    }

    /// Patches the status, as a controller does.
    pub fn merge_status<K: Object>(&self, api: &Api<K>, name: &str, status: &Value) -> K {
        self.merge_at_status(api, name, &json!({ "status": status })).unwrap()
    }

    /// Applies a merge patch to the subresource of the status.
    pub fn merge_at_status<K: Object>(
        &self,
        api: &Api<K>,
        name: &str,
        patch: &Value,
    ) -> kube::Result<K> {
        self.block_on(api.patch_status(name, &PatchParams::default(), &Patch::Merge(patch)))
    }

    /// Requests the deletion of an object, which finalizers can delay.
    pub fn delete<K: Object>(&self, api: &Api<K>, name: &str) {
        self.block_on(api.delete(name, &DeleteParams::default())).unwrap();
    }

    pub fn wait_until_gone<K: Object>(&self, api: &Api<K>, name: &str) {
        self.wait_for(&format!("deletion of {} {name}", K::kind(&())), || {
            self.get(api, name).is_none().then_some(())
        });
    }

    /// Waits until `poll` returns a value.
    pub fn wait_for<T>(&self, what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
        let mut found = None;
        wait_for(what, || {
            found = poll();
            found.is_some()
        });
        found.unwrap()
    }

    /// The completed requests to the API server since the test started, from its audit log, with
    /// `verb`, `requestURI`, `objectRef`, `user.username`, `userAgent`, `responseStatus.code`.
    pub fn requests(&self) -> Vec<Value> {
        let mut log = File::open(self.request_log()).unwrap();
        log.seek(SeekFrom::Start(self.requests_from.load(Ordering::Relaxed))).unwrap();
        // The last line can be incomplete.
        let lines = BufReader::new(log).lines();
        lines.filter_map(|line| serde_json::from_str(&line.ok()?).ok()).collect()
    }

    fn request_log(&self) -> PathBuf {
        self.directory().join("requests.log")
    }

    /// Removes earlier requests from [`Cluster::requests`]: the log grows by a thousand lines per
    /// second.
    fn forget_requests(&self) {
        let length = fs::metadata(self.request_log()).unwrap().len();
        self.requests_from.store(length, Ordering::Relaxed);
    }

    /// The number of requests of a user, as by [`Cluster::count_requests`]. Not counted: watches,
    /// which end and begin again on their own.
    pub fn requests_by(&self, user: &str) -> usize {
        self.count_requests(|one| one["user"]["username"] == user && one["verb"] != "watch")
    }

    /// The number of these requests, once no more are logged: the log has a request some time after
    /// its response.
    pub fn count_requests(&self, is_counted: impl Fn(&Value) -> bool) -> usize {
        let count = || self.requests().iter().filter(|one| is_counted(one)).count();
        let (mut counted, begun, mut since) = (count(), Instant::now(), Instant::now());
        while since.elapsed() < Duration::from_millis(500) {
            assert!(begun.elapsed() < PATIENCE, "requests do not end: {counted}");
            thread::sleep(Duration::from_millis(50));
            let now = count();
            if now != counted {
                (counted, since) = (now, Instant::now());
            }
        }
        counted
    }

    /// The log of a program: etcd, kube-apiserver, snapshot-controller.
    pub fn log(&self, program: &str) -> String {
        text_of(&self.directory().join(format!("{program}.log")))
    }

    /// Writes a file with a unique name to the scratch directory.
    pub fn write(&self, name: &str, content: &str) -> PathBuf {
        let file = self.scratch().join(self.unique(name));
        fs::write(&file, content).unwrap();
        file
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Stop kubelet before the API server.
        self.node.take();
        self.process.stop();
        if keep() {
            println!("kept: {}", path(self.scratch()));
            self.directory.disable_cleanup(true);
        }
    }
}

/// A Kubernetes object of the tests.
pub trait Object:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize
{
}

impl<K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize> Object for K {}

/// Ids and command lines of processes whose working directory is `directory`, or whose command line
/// contains it.
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

/// A stopped program. Dropping it continues the program.
pub struct Paused(Vec<Pid>);

impl Drop for Paused {
    fn drop(&mut self) {
        for pid in &self.0 {
            let _ = kill(*pid, Signal::SIGCONT);
        }
    }
}

impl Cluster {
    /// Stops a program (`snapshot-controller`, …) with SIGSTOP.
    pub fn pause(&self, program: &str) -> Paused {
        let pids = self.pids_of(program);
        assert!(!pids.is_empty(), "{program} does not run");
        pids.iter().for_each(|pid| kill(*pid, Signal::SIGSTOP).unwrap());
        Paused(pids)
    }

    fn pids_of(&self, program: &str) -> Vec<Pid> {
        let all = processes_of(&self.directory()).into_iter();
        let tool = format!("tools/{program} ");
        all.filter(|(_, line)| line.contains(&tool)).map(|(pid, _)| pid).collect()
    }

    /// Kills the API server and waits until its replacement is ready.
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
