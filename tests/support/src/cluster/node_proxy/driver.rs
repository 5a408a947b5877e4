//! The drivers of the proxy: the driver of this project with crust_ops, and the recorder.

use std::any::Any;
use std::path::PathBuf;

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use serde_json::{Value, json};

use super::SIZE;
use crate::cluster::Cluster;
use crate::cluster::recorder::Recorder;
use crate::driver::{Driver, create};
use crate::ops::Ops;
use crate::path;

/// The driver of a proxy.
pub trait ProxiedDriver {
    /// CSIDriver.spec.podInfoOnMount.
    const POD_INFO: bool;

    fn driver_name(&self) -> &str;

    fn socket(&self) -> PathBuf;

    /// Creates a volume. Returns its handle and volume context.
    fn volume(&self, name: &str, capability: csi::VolumeCapability) -> (String, Value);

    /// Records for the cleanup a request that the proxy is about to forward.
    fn note(&self, _request: &dyn Any) {}
}

/// The driver of this project with crust_ops.
pub struct Ours {
    name: String,
    // Dropped in this order: the driver needs crust_ops for the cleanup.
    pub driver: Driver,
    pub ops: Ops,
}

impl Ours {
    pub fn start(cluster: &Cluster) -> Self {
        let ops = Ops::start(&[]);
        let name = format!("{}.csi.local", cluster.unique("loopback"));
        let driver = Driver::with(PoolKind::Image, &words(&flags(&name, &ops, true)));
        Self { name, driver, ops }
    }

    /// Restarts the driver with or without runtime assisted mounting.
    pub fn restart(&mut self, deferring: bool) {
        self.driver.restart_with(&words(&flags(&self.name, &self.ops, deferring)));
    }
}

fn flags(name: &str, ops: &Ops, deferring: bool) -> Vec<String> {
    let endpoint = path(&ops.socket()).to_owned();
    let mut flags = vec!["--driver-name".into(), name.into(), "--crust-endpoint".into(), endpoint];
    if deferring {
        flags.push("--enable-defer-fs-ops".into());
    }
    flags
}

fn words(owned: &[String]) -> Vec<&str> {
    owned.iter().map(String::as_str).collect()
}

impl ProxiedDriver for Ours {
    const POD_INFO: bool = true;

    fn driver_name(&self) -> &str {
        &self.name
    }

    fn socket(&self) -> PathBuf {
        self.driver.socket()
    }

    fn volume(&self, name: &str, capability: csi::VolumeCapability) -> (String, Value) {
        let volume = self.driver.ok(create(name, SIZE, capability)).volume.unwrap();
        (volume.volume_id, json!(volume.volume_context))
    }

    fn note(&self, request: &dyn Any) {
        self.driver.note(request);
    }
}

impl ProxiedDriver for Recorder<'_> {
    const POD_INFO: bool = false;

    fn driver_name(&self) -> &str {
        &self.name
    }

    fn socket(&self) -> PathBuf {
        self.socket()
    }

    fn volume(&self, name: &str, _: csi::VolumeCapability) -> (String, Value) {
        (format!("handle-of-{name}"), json!({ "tier": "fast" }))
    }
}
