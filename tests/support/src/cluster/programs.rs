//! Released Kubernetes programs.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

use super::Cluster;
use super::tls::Certificate;
use crate::path;
pub use crate::process::{Process, finish, finish_within, stdout_of};

/// The offset and size in each row of the lister's table.
pub fn table_extents(table: &str) -> Vec<(u64, u64)> {
    let rows = table.lines().skip(2);
    rows.map(|row| {
        let numbers: Vec<&str> = row.split_whitespace().collect();
        (numbers[3].parse().unwrap(), numbers[4].parse().unwrap())
    })
    .collect()
}

/// The offset and size of each extent in the lister's JSON, which omits an offset of zero.
pub fn json_extents(json: &Value) -> Vec<(u64, u64)> {
    let messages = json.as_array().unwrap().iter();
    messages
        .flat_map(|message| message["block_metadata"].as_array().unwrap())
        .map(|one| (one["byte_offset"].as_u64().unwrap_or(0), one["size_bytes"].as_u64().unwrap()))
        .collect()
}

/// A free port of 127.0.0.1 below the ephemeral ports. Each call of a process returns another port.
pub fn free_port() -> u16 {
    static NEXT: OnceLock<AtomicU32> = OnceLock::new();
    let next = NEXT.get_or_init(|| AtomicU32::new(getrandom::u32().unwrap() % 12_000));
    loop {
        let port = 20_000 + (next.fetch_add(1, Ordering::Relaxed) % 12_000) as u16;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}

impl Cluster {
    pub fn spawn(&self, name: &str, command: Command) -> Process {
        Process::spawn(&self.unique(name), command, self.scratch())
    }

    /// Starts csi-snapshotter for the driver on the socket, as administrator. Concurrent drivers
    /// need different names: two csi-snapshotters for one name process the same snapshots.
    pub fn snapshotter(&self, socket: &Path) -> Process {
        let mut command = Command::new(self.tool("csi-snapshotter"));
        command
            .args(["-kubeconfig", path(&self.kubeconfig()), "-csi-address", path(socket)])
            .args(["-retry-interval-start=200ms", "-retry-interval-max=2s"])
            .args(["-kube-api-qps=100", "-kube-api-burst=200"]);
        self.spawn("csi-snapshotter", command)
    }

    /// Starts the released sidecar for the driver on the socket, with additional `flags`, and waits
    /// until it is ready.
    pub fn released_sidecar(
        &self,
        socket: &Path,
        kubeconfig: &Path,
        certificate: &Certificate,
        flags: &[&str],
    ) -> Served {
        let (port, http_port) = (free_port(), free_port());
        let mut command = Command::new(self.tool("csi-snapshot-metadata"));
        command
            .args(["-csi-address", path(socket), "-kubeconfig", path(kubeconfig)])
            .args(["-tls-cert", path(&certificate.file), "-tls-key", path(&certificate.key)])
            .arg(format!("-port={port}"))
            .arg(format!("-http-endpoint=127.0.0.1:{http_port}"))
            .args(flags);
        let mut process = self.spawn("csi-snapshot-metadata", command);
        // It listens on this port after it has read the driver's capabilities.
        process.wait_for("it is ready", |_| TcpStream::connect(("127.0.0.1", http_port)).ok());
        Served { process, port, http_port }
    }

    /// Runs the released lister as the user of the kubeconfig.
    pub fn lister(&self, kubeconfig: &Path, arguments: &[&str]) -> Output {
        self.released_client("snapshot-metadata-lister", kubeconfig, arguments)
    }

    /// Runs the released verifier as the user of the kubeconfig.
    pub fn verifier(&self, kubeconfig: &Path, arguments: &[&str]) -> Output {
        self.released_client("snapshot-metadata-verifier", kubeconfig, arguments)
    }

    fn released_client(&self, name: &str, kubeconfig: &Path, arguments: &[&str]) -> Output {
        let mut command = Command::new(self.tool(name));
        command.args(["-kubeconfig", path(kubeconfig)]).args(arguments);
        finish(command)
    }
}

/// A running server.
pub struct Served {
    pub process: Process,
    /// Port of the service, with TLS.
    pub port: u16,
    /// Port of health and metrics.
    pub http_port: u16,
}

impl Served {
    /// The service's address in a SnapshotMetadataService.
    pub fn address(&self) -> String {
        format!("localhost:{}", self.port)
    }
}
