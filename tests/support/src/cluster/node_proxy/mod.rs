//! A node with the node proxy and a driver, without kubelet. The test makes kubelet's calls with
//! its paths and in its order, each with a new connection (pkg/volume/csi of Kubernetes), for pods
//! in the API server that are bound to this node. The proxy's ServiceAccount has only the
//! ClusterRole of deploy/node-proxy.

mod driver;
mod kubelet;
mod pods;

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use csi::node_service_capability::rpc;
use csi_loopback::crust::{Directory, Entry, Target};
use csi_loopback::proto::csi::v1 as csi;
use k8s_openapi::api::rbac::v1::PolicyRule;
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;

use super::Cluster;
use super::access::{Account, shipped_rules};
use super::programs::{Process, free_port};
use super::recorder::Recorder;
use crate::driver::{PATIENCE, binary, wait_for};
use crate::process::text_of;
use crate::{MIB, keep, owned, path};

#[allow(unused_imports)] // Each test binary uses a part.
pub use driver::{Ours, ProxiedDriver};
#[allow(unused_imports)]
pub use pods::{BoundPod, Persistent, Volume};

pub const ANNOTATION: &str = "cbt.storage.k8s.io/defer-fs-mount";

/// Bytes of a volume.
pub const SIZE: u64 = 32 * MIB;

/// The shipped rights of the proxy.
pub fn node_proxy_rules() -> Vec<PolicyRule> {
    shipped_rules("deploy/node-proxy/proxy/rbac.yaml")
}

/// The shipped additional rights to distinguish claims.
pub fn claim_rules() -> Vec<PolicyRule> {
    shipped_rules("deploy/components/node-proxy-claims/rbac.yaml")
}

pub struct Rig<'a, B> {
    pub cluster: &'a Cluster,
    /// Namespace of the pods.
    pub namespace: String,
    pub node: String,
    /// The proxy's ServiceAccount.
    pub account: Account,
    pub kubeconfig: PathBuf,
    /// Flags of the proxy, which override defaults.
    pub flags: Vec<String>,
    /// Run the proxy with the rights of deploy/node-proxy on the node: root without capabilities.
    pub confined: bool,
    /// Whether kubelet passes pod information to the driver (podInfoOnMount).
    pub pod_info: bool,
    pub http_port: u16,
    // Dropped in this order: the driver must clean up before its directory is removed.
    proxy: Option<Process>,
    pub driver: B,
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

impl<'a, B: ProxiedDriver> Rig<'a, B> {
    /// With a running proxy.
    pub fn start(cluster: &'a Cluster, driver: B) -> Self {
        Self::with_flags(cluster, driver, &[])
    }

    /// With these flags of the proxy.
    pub fn with_flags(cluster: &'a Cluster, driver: B, flags: &[&str]) -> Self {
        let mut rig = Self::prepare(cluster, driver, &node_proxy_rules());
        rig.set_flags(flags);
        rig.start_proxy();
        rig
    }

    /// With a proxy that has the right to get claims.
    pub fn with_claim_rights(cluster: &'a Cluster, driver: B) -> Self {
        let rules = [node_proxy_rules(), claim_rules()].concat();
        let mut rig = Self::prepare(cluster, driver, &rules);
        rig.start_proxy();
        rig
    }

    /// Without a running proxy, which will have these rights.
    pub fn prepare(cluster: &'a Cluster, driver: B, rules: &[PolicyRule]) -> Self {
        let directory = TempDir::with_prefix("csi-loopback-").unwrap();
        let namespace = cluster.namespace("pods");
        // No controller creates this ServiceAccount.
        cluster.account(&namespace, "default");
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
            confined: false,
            pod_info: B::POD_INFO,
            http_port: free_port(),
            proxy: None,
            driver,
            directory,
        }
    }

    pub fn set_flags(&mut self, flags: &[&str]) {
        self.flags = owned(flags);
    }

    pub fn scratch(&self) -> &Path {
        self.directory.path()
    }

    /// Kubelet's directory.
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
        let (socket, driver) = (self.socket(), self.driver.socket());
        let http = format!("127.0.0.1:{}", self.http_port);
        let state = self.state_dir();
        let defaults = [
            ("--kubeconfig", path(&self.kubeconfig)),
            ("--endpoint", path(&socket)),
            ("--driver-endpoint", path(&driver)),
            ("--node-name", &self.node),
            ("--state-dir", path(&state)),
            ("--http-endpoint", &http),
            // Long, so that a slow machine does not cause a timeout.
            ("--pod-timeout", "50s"),
            ("--kube-api-qps", "1000"),
            ("--kube-api-burst", "1000"),
            ("--log-level", "debug"),
        ];
        let mut command = match self.confined {
            false => Command::new(binary()),
            true => {
                let mut command = Command::new("setpriv");
                command.args([
                    "--bounding-set=-all",
                    "--inh-caps=-all",
                    "--no-new-privs",
                    binary(),
                ]);
                command
            }
        };
        command.args(["--mode", "node-proxy"]).env_remove("CSI_ENDPOINT").env_remove("NODE_NAME");
        for (flag, value) in defaults {
            if !self.flags.iter().any(|given| given == flag) {
                command.args([flag, value]);
            }
        }
        command.args(&self.flags);
        command
    }

    /// Starts the proxy and waits until it is ready.
    pub fn start_proxy(&mut self) {
        let command = self.proxy_command();
        let mut proxy = Process::spawn("node-proxy", command, self.scratch());
        let socket = self.socket();
        proxy.wait_for("the proxy is ready", |_| UnixStream::connect(&socket).ok());
        self.proxy = Some(proxy);
    }

    pub fn proxy(&mut self) -> &mut Process {
        self.proxy.as_mut().expect("the proxy runs")
    }

    /// Sends SIGTERM and waits for the end.
    pub fn stop_proxy(&mut self) {
        let mut proxy = self.proxy.take().expect("the proxy runs");
        proxy.signal(Signal::SIGTERM);
        let status = proxy.wait(PATIENCE);
        assert!(status.is_some_and(|status| status.success()), "{status:?}\n{}", self.log());
    }

    /// Sends SIGKILL and waits for the end.
    pub fn kill_proxy(&mut self) {
        let mut proxy = self.proxy.take().expect("the proxy runs");
        proxy.signal(Signal::SIGKILL);
        assert!(proxy.wait(PATIENCE).is_some());
    }

    pub fn restart_proxy(&mut self) {
        self.stop_proxy();
        self.start_proxy();
    }

    /// The log of all runs of the proxy.
    pub fn log(&self) -> String {
        text_of(&self.scratch().join("node-proxy.log"))
    }

    /// Its page of metrics.
    pub fn metrics(&self) -> String {
        let address = ([127, 0, 0, 1], self.http_port).into();
        crate::http::fetch(address, "/metrics").1
    }

    /// The value of a metric with these labels; 0 if missing.
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.metrics();
        let mut lines = page.lines().filter_map(|line| line.rsplit_once(' '));
        lines.find(|(of, _)| *of == name).map_or(0.0, |(_, value)| value.parse().unwrap())
    }

    /// The status code of an HTTP path.
    pub fn page(&self, path: &str) -> u16 {
        let (head, _) = crate::http::fetch(([127, 0, 0, 1], self.http_port).into(), path);
        head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status line")
    }

    /// `csi_loopback_deferred_failures_total` of a call and a reason.
    pub fn failures(&self, call: &str, reason: &str) -> f64 {
        self.metric(&format!(
            "csi_loopback_deferred_failures_total{{call=\"{call}\",reason=\"{reason}\"}}"
        ))
    }

    /// The proxy's stored state of a target.
    pub fn entry(&self, target: &Path) -> Entry {
        Directory::new(self.state_dir()).entry(&Target::new("target", target).unwrap())
    }

    /// Waits until the proxy has logged that the pod has opted in.
    pub fn wait_until_opted_in(&self, pod: &BoundPod) {
        let line = format!("a pod has opted in pod_uid=\"{}\"", pod.uid);
        wait_for(&line, || self.log().contains(&line));
    }

    /// The content of its `vol_data.json`, if any.
    pub fn vol_data(&self, target: &Path) -> Option<Value> {
        let bytes = self.entry(target).read("vol_data.json").unwrap()?;
        Some(serde_json::from_slice(&bytes).unwrap())
    }
}

impl<B> Drop for Rig<'_, B> {
    fn drop(&mut self) {
        self.proxy = None;
        if keep() {
            println!("kept: {}", path(self.directory.path()));
            self.directory.disable_cleanup(true);
        }
    }
}
