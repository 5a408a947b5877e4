//! A session manager of this project as a process.

use crate::driver::binary;
use std::path::{Path, PathBuf};
use std::process::Command;

use k8s_openapi::api::rbac::v1::PolicyRule;

use super::Cluster;
use super::access::rule;
use super::programs::{Process, Served, free_port};
use super::sidecar::http;
use crate::path;

/// What the manager needs, in the namespace of its own as everywhere.
pub fn manager_rules() -> Vec<PolicyRule> {
    let ours = "cbt.storage.k8s.io";
    vec![
        rule(ours, &["snapshotsessionrequests"], &["get", "list", "watch", "patch", "delete"]),
        rule(ours, &["snapshotsessionrequests/status"], &["patch"]),
        rule(ours, &["snapshotsessiondata"], &["get", "list", "watch", "create", "delete"]),
        rule(ours, &["snapshotserviceconfigurations"], &["get", "list", "watch"]),
        rule(
            "snapshot.storage.k8s.io",
            &["volumesnapshots", "volumesnapshotcontents"],
            &["get", "list", "watch"],
        ),
        rule("authorization.k8s.io", &["subjectaccessreviews"], &["create"]),
        rule("events.k8s.io", &["events"], &["create", "patch"]),
        rule("", &["configmaps"], &["get", "list", "watch"]),
        rule("", &["secrets"], &["get", "create", "update"]),
        rule("coordination.k8s.io", &["leases"], &["get", "create", "update"]),
        rule(
            "admissionregistration.k8s.io",
            &["validatingwebhookconfigurations"],
            &["get", "list", "watch", "patch"],
        ),
    ]
}

/// How a manager is started.
pub struct Start<'s> {
    pub kubeconfig: &'s Path,
    /// The manager's own.
    pub namespace: &'s str,
    pub flags: &'s [&'s str],
    /// How far its clock is ahead, as libfaketime has it: `+2h`.
    pub ahead: Option<&'s str>,
}

/// libfaketime, where Debian puts it: with it a process can have a clock of its own.
pub fn faketime() -> Option<PathBuf> {
    let of_machines = std::fs::read_dir("/usr/lib").ok()?.flatten();
    let mut files = of_machines.map(|of| of.path().join("faketime/libfaketimeMT.so.1"));
    files.find(|file| file.exists())
}

/// Starts one with an authority of its own and does not wait for it.
pub fn spawn(cluster: &Cluster, start: &Start<'_>) -> Served {
    let port = free_port();
    let address = format!("localhost:{port}");
    spawn_showing(cluster, start, port, &["--self-signed", "--service-address", &address])
}

/// Starts one with the certificate that these flags say.
pub fn spawn_showing(cluster: &Cluster, start: &Start<'_>, port: u16, shown: &[&str]) -> Served {
    let http_port = free_port();
    let mut command = Command::new(binary());
    command
        .args(["--mode", "session-manager", "--kubeconfig", path(start.kubeconfig)])
        .args(["--namespace", start.namespace])
        .args(["--port", &port.to_string()])
        .args(["--http-endpoint", &format!("127.0.0.1:{http_port}")])
        .args(shown)
        .args(["--kube-api-qps", "1000", "--kube-api-burst", "1000"])
        .args(start.flags);
    if let Some(ahead) = start.ahead {
        // Only the time of day: timers go on as they are.
        command
            .env("LD_PRELOAD", faketime().expect("libfaketime"))
            .env("FAKETIME", ahead)
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .env("DONT_FAKE_MONOTONIC", "1");
    }
    let process = Process::spawn(&cluster.unique("session-manager"), command, cluster.scratch());
    Served { process, port, http_port }
}

/// Whether this one looks after requests.
pub fn leads(manager: &Served) -> bool {
    http_page(manager, "/metrics").contains("\ncsi_loopback_session_manager_leading 1\n")
}

fn http_page(manager: &Served, page: &str) -> String {
    match std::net::TcpStream::connect(("127.0.0.1", manager.http_port)) {
        Ok(_) => http(manager, page),
        Err(_) => String::new(),
    }
}
