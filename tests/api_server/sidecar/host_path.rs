//! csi-driver-host-path as a process, if CSI_LOOPBACK_HOSTPATH names its binary, built by hand from
//! its source (`make build`). It needs loop devices.

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;
use support::cluster::Cluster;
use support::cluster::programs::{Process, finish, stdout_of};
use support::cluster::rig::CLAIM;
use support::driver::binary;
use support::{BLOCK, MIB, path, pattern};

use super::dialects::{Foreign, Stage};

const SIZE: u64 = 16 * MIB;

pub struct HostPath<'a> {
    name: String,
    endpoint: String,
    volume: String,
    state: PathBuf,
    cluster: &'a Cluster,
    // Dropped in this order.
    _snapshotter: Process,
    _process: Process,
}

impl<'a> HostPath<'a> {
    /// `None` without the binary.
    pub fn start(cluster: &'a Cluster, kind: &str) -> Option<Self> {
        let binary = env::var_os("CSI_LOOPBACK_HOSTPATH")?;
        let name = format!("{}.hostpath.example", cluster.unique("csi"));
        let state = cluster.scratch().join(cluster.unique("hostpath"));
        fs::create_dir(&state).unwrap();
        let socket = state.join("csi.sock");
        let endpoint = format!("unix://{}", socket.display());
        let mut command = Command::new(binary);
        command.args(["--drivername", &name, "--nodeid", "node", "--endpoint", &endpoint]);
        command.args(["--statedir", path(&state), "--enable-snapshot-metadata"]);
        command.args(["--snapshot-metadata-block-type", kind]);
        let mut process = cluster.spawn("hostpath", command);
        process.wait_for("its socket", |_| socket.exists().then_some(()));
        let snapshotter = cluster.snapshotter(&socket);
        let volume = String::new();
        let mut driver = Self {
            name,
            endpoint,
            volume,
            state,
            cluster,
            _snapshotter: snapshotter,
            _process: process,
        };
        let create = ["volume", "create", CLAIM, "--size", "16Mi", "--block"];
        driver.volume = driver.json(&create)["id"].as_str().unwrap().to_owned();
        Some(driver)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(binary());
        command.args(arguments).args(["--endpoint", &self.endpoint, "--output", "json"]);
        finish(command)
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&stdout_of(self.run(arguments))).unwrap()
    }
}

impl Drop for HostPath<'_> {
    fn drop(&mut self) {
        // It detaches the volume's loop device.
        let deleted = self.run(&["volume", "delete", &self.volume]);
        if !deleted.status.success() {
            println!("{}", String::from_utf8_lossy(&deleted.stderr));
        }
    }
}

impl Foreign for HostPath<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    fn metadata_endpoint(&self) -> &str {
        &self.endpoint
    }

    fn volume(&self) -> &str {
        &self.volume
    }

    fn size(&self) -> u64 {
        SIZE
    }

    fn secret(&self) -> Option<(&str, &str)> {
        None
    }

    fn write(&self, seed: u64, blocks: &[usize]) {
        let file = File::options().write(true).open(self.state.join(&self.volume)).unwrap();
        for block in blocks {
            let bytes = pattern(seed + *block as u64, BLOCK as usize);
            file.write_all_at(&bytes, *block as u64 * BLOCK).unwrap();
        }
    }

    fn snapshot(&self, stage: &Stage<'_>, name: &str) -> (String, PathBuf) {
        let ready = self.cluster.snapshot(&stage.namespace, name, CLAIM, &stage.class);
        // It copies the volume to this file; a test may delete the snapshot.
        let file = stage.directory.join(name);
        fs::copy(self.state.join(format!("{}.snap", ready.handle)), &file).unwrap();
        (ready.handle, file)
    }

    fn delete(&self, handle: &str) {
        stdout_of(self.run(&["snapshot", "delete", handle]));
    }

    fn keeps_bases(&self) -> bool {
        false
    }
}
