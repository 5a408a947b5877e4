//! A session manager of this project as a process.

use crate::driver::binary;
use std::path::Path;
use std::process::Command;

use k8s_openapi::api::rbac::v1::PolicyRule;

use super::Cluster;
use super::access::rule;
use super::programs::{Process, Served, free_port};
use super::sidecar::http_at;
use crate::clock::faketime;
use crate::path;

/// The rights that the manager needs, in its namespace and in the cluster.
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
        rule(
            "admissionregistration.k8s.io",
            &["validatingadmissionpolicies", "validatingadmissionpolicybindings"],
            &["get"],
        ),
    ]
}

/// Options of a start.
pub struct Start<'s> {
    pub kubeconfig: &'s Path,
    /// The manager's namespace.
    pub namespace: &'s str,
    pub flags: &'s [&'s str],
    /// Offset of its clock, in the format of libfaketime: `+2h`.
    pub ahead: Option<&'s str>,
}

/// Starts a manager with its own account and namespace, without waiting.
pub fn start(cluster: &Cluster) -> Served {
    let home = cluster.namespace("manager");
    let account = cluster.account(&home, "manager");
    cluster.grant(&account, &manager_rules());
    let kubeconfig = cluster.kubeconfig_of(&account);
    let start = Start { kubeconfig: &kubeconfig, namespace: &home, flags: &[], ahead: None };
    spawn(cluster, &start)
}

/// Starts a manager with --self-signed, without waiting.
pub fn spawn(cluster: &Cluster, start: &Start<'_>) -> Served {
    let port = free_port();
    let address = format!("localhost:{port}");
    spawn_with_certificate(cluster, start, port, &["--self-signed", "--service-address", &address])
}

/// Starts a manager with these certificate flags, without waiting.
pub fn spawn_with_certificate(
    cluster: &Cluster,
    start: &Start<'_>,
    port: u16,
    certificate: &[&str],
) -> Served {
    let http_port = free_port();
    let mut command = Command::new(binary());
    command
        .args(["--mode", "session-manager", "--kubeconfig", path(start.kubeconfig)])
        .args(["--namespace", start.namespace])
        .args(["--port", &port.to_string()])
        .args(["--http-endpoint", &format!("127.0.0.1:{http_port}")])
        .args(certificate)
        .args(start.flags);
    if !start.flags.contains(&"--kube-api-qps") {
        command.args(["--kube-api-qps", "1000", "--kube-api-burst", "1000"]);
    }
    if let Some(ahead) = start.ahead {
        // Only the time of day, not the monotonic clock of timers.
        command
            .env("LD_PRELOAD", faketime().expect("libfaketime"))
            .env("FAKETIME", ahead)
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .env("DONT_FAKE_MONOTONIC", "1");
    }
    let process = Process::spawn(&cluster.unique("session-manager"), command, cluster.scratch());
    Served { process, port, http_port }
}

/// Whether this manager is the leader.
pub fn leads(manager: &Served) -> bool {
    http_at(manager.http_port, "/metrics")
        .is_some_and(|page| page.contains("\ncsi_loopback_session_manager_leading 1\n"))
}
