//! What acts on the objects of a run where no controllers and no kubelet exist: claims become volumes
//! of the driver, pods run on this machine with the device of their claim.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use csi_loopback::proto::csi::v1 as csi;
use csi_loopback::quantity;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::ResourceExt;
use serde_json::{Value, json};
use support::cluster::Cluster;
use support::cluster::sidecar_rig::Rig;
use support::driver::{Driver, Source, binary, block, from_source};
use support::requests::create;

/// A pod that has its device.
struct Held {
    process: Child,
    volume: String,
}

pub struct Controllers<'a> {
    cluster: &'a Cluster,
    driver: &'a Driver,
    driver_name: &'a str,
    namespace: &'a str,
    /// StorageClass of the claims.
    class: &'a str,
    held: BTreeMap<String, Held>,
    ended: Vec<String>,
}

impl<'a> Controllers<'a> {
    pub fn new(rig: &'a Rig<'_>, class: &'a str) -> Self {
        Self {
            cluster: rig.cluster,
            driver: &rig.driver,
            driver_name: &rig.driver_name,
            namespace: &rig.namespace,
            class,
            held: BTreeMap::new(),
            ended: Vec::new(),
        }
    }

    /// Acts until the flag is set, and then on what was deleted before.
    pub fn run_until(mut self, is_done: &AtomicBool) {
        loop {
            let is_last = is_done.load(Ordering::Relaxed);
            self.act();
            if is_last {
                return;
            }
            thread::sleep(Duration::from_millis(30));
        }
    }

    fn act(&mut self) {
        let pods = self.cluster.api_in::<Pod>(self.namespace);
        let pods = self.cluster.list(&pods);
        self.release(&pods);
        for pod in &pods {
            self.start(pod);
        }
        let claims = self.cluster.api_in::<PersistentVolumeClaim>(self.namespace);
        let all = self.cluster.list(&claims);
        let of_class = |claim: &&PersistentVolumeClaim| {
            claim.spec.as_ref().unwrap().storage_class_name.as_deref() == Some(self.class)
        };
        for claim in all.iter().filter(of_class) {
            match &claim.metadata.deletion_timestamp {
                Some(_) if pods.iter().any(|pod| claim_of(pod) == Some(claim.name_any())) => {}
                Some(_) => {
                    self.cluster.merge(&claims, &claim.name_any(), &without_finalizers());
                }
                None => self.provide(claim),
            }
        }
        self.delete_volumes();
    }

    /// Binds an unbound claim to a new volume; grows the volume of a bound one.
    fn provide(&self, claim: &PersistentVolumeClaim) {
        let spec = claim.spec.as_ref().unwrap();
        let requests = spec.resources.as_ref().unwrap().requests.as_ref().unwrap();
        let bytes = quantity::parse(&requests["storage"].0).unwrap();
        let claims = self.cluster.api_in::<PersistentVolumeClaim>(self.namespace);
        let name = claim.name_any();
        let Some(volume) = &spec.volume_name else { return self.bind(claim, bytes) };
        let capacity = claim.status.as_ref().and_then(|status| status.capacity.as_ref());
        let capacity =
            capacity.map_or(0, |capacity| quantity::parse(&capacity["storage"].0).unwrap());
        if bytes > capacity && capacity > 0 {
            let handle = self.handle(volume).unwrap();
            let request = csi::ControllerExpandVolumeRequest {
                volume_id: handle,
                capacity_range: Some(csi::CapacityRange {
                    required_bytes: bytes.try_into().unwrap(),
                    limit_bytes: 0,
                }),
                volume_capability: Some(block()),
                ..Default::default()
            };
            let grown = self.driver.call_patiently(request).unwrap();
            let capacity = json!({ "storage": grown.capacity_bytes.to_string() });
            self.cluster.merge_status(&claims, &name, &json!({ "capacity": capacity }));
        }
    }

    fn bind(&self, claim: &PersistentVolumeClaim, bytes: u64) {
        let (spec, name) = (claim.spec.as_ref().unwrap(), claim.name_any());
        let csi_name = format!("pvc-{name}");
        let request = match spec.data_source.as_ref().map(|source| (&*source.kind, &source.name)) {
            None => create(&csi_name, bytes, block()),
            Some(("VolumeSnapshot", snapshot)) => {
                let handle = super::handle(self.cluster, self.namespace, snapshot);
                from_source(&csi_name, Source::Snapshot(&handle), bytes)
            }
            Some((_, claim)) => {
                let claims = self.cluster.api_in::<PersistentVolumeClaim>(self.namespace);
                let source = self.cluster.get(&claims, claim).unwrap().spec.unwrap();
                let handle = self.handle(&source.volume_name.unwrap()).unwrap();
                from_source(&csi_name, Source::Volume(&handle), bytes)
            }
        };
        let Ok(made) = self.driver.call_patiently(request) else { return };
        let made = made.volume.unwrap();
        let volume = format!("{}-{name}", self.namespace);
        let capacity = json!({ "storage": made.capacity_bytes.to_string() });
        let volumes = self.cluster.api::<PersistentVolume>();
        self.cluster.create(
            &volumes,
            json!({
                "metadata": { "name": volume },
                "spec": {
                    "accessModes": ["ReadWriteOnce"], "volumeMode": "Block",
                    "storageClassName": self.class, "persistentVolumeReclaimPolicy": "Delete",
                    "capacity": capacity,
                    "csi": { "driver": self.driver_name, "volumeHandle": made.volume_id },
                    "claimRef": {
                        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "name": name,
                        "namespace": self.namespace, "uid": claim.metadata.uid,
                    },
                },
            }),
        );
        let claims = self.cluster.api_in::<PersistentVolumeClaim>(self.namespace);
        self.cluster.merge(&claims, &name, &json!({ "spec": { "volumeName": volume } }));
        let status = json!({ "phase": "Bound", "capacity": capacity });
        self.cluster.merge_status(&claims, &name, &status);
        self.cluster.merge_status(&volumes, &volume, &json!({ "phase": "Bound" }));
    }

    /// The CSI handle of a PersistentVolume.
    fn handle(&self, volume: &str) -> Option<String> {
        let volume = self.cluster.get(&self.cluster.api::<PersistentVolume>(), volume)?;
        Some(volume.spec?.csi?.volume_handle)
    }

    /// Deletes the volumes whose claims are gone.
    fn delete_volumes(&self) {
        let volumes = self.cluster.api::<PersistentVolume>();
        let claims = self.cluster.api_in::<PersistentVolumeClaim>(self.namespace);
        for volume in self.cluster.list(&volumes) {
            let (name, spec) = (volume.name_any(), volume.spec.unwrap());
            let Some(source) = spec.csi.filter(|source| source.driver == self.driver_name) else {
                continue;
            };
            let claim = spec.claim_ref.unwrap().name.unwrap();
            let is_kept = spec.persistent_volume_reclaim_policy.as_deref() == Some("Retain");
            if is_kept || self.cluster.get(&claims, &claim).is_some() {
                continue;
            }
            let volume_id = source.volume_handle;
            let request = csi::DeleteVolumeRequest { volume_id, ..Default::default() };
            if self.driver.call(request).is_ok() {
                self.cluster.merge(&volumes, &name, &without_finalizers());
                self.cluster.delete(&volumes, &name);
            }
        }
    }

    /// Runs a new pod.
    fn start(&mut self, pod: &Pod) {
        let name = pod.name_any();
        let claim = claim_of(pod).unwrap();
        let claims = self.cluster.api_in::<PersistentVolumeClaim>(self.namespace);
        let claim = self.cluster.get(&claims, &claim).and_then(|claim| claim.spec?.volume_name);
        let volume = claim.and_then(|volume| self.handle(&volume));
        let Some(volume) = volume.filter(|_| !self.ended.contains(&name)) else { return };
        if self.held.contains_key(&name) {
            return;
        }
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let device = self.driver.publish(&volume, &block());
        let result = self.driver.scratch().join(&name);
        let mut command = Command::new(binary());
        let args = container.args.iter().flatten();
        command.args(args.map(|arg| self.here(arg, container, &device, &result)));
        let mut process = command.stdin(Stdio::null()).spawn().unwrap();
        if container.args.as_ref().unwrap()[1] == "hold" {
            self.report(&name, "Running", json!({ "running": {} }));
            self.held.insert(name, Held { process, volume });
            return;
        }
        let code = process.wait().unwrap().code().unwrap();
        self.driver.take_down(&volume);
        let message = std::fs::read_to_string(&result).unwrap_or_default();
        let phase = if code == 0 { "Succeeded" } else { "Failed" };
        self.report(
            &name,
            phase,
            json!({ "terminated": { "exitCode": code, "message": message } }),
        );
        self.ended.push(name);
    }

    /// An argument with the paths of this machine.
    fn here(
        &self,
        argument: &str,
        container: &k8s_openapi::api::core::v1::Container,
        device: &Path,
        result: &Path,
    ) -> String {
        let devices = &container.volume_devices.as_ref().unwrap()[0];
        let message = container.termination_message_path.as_ref().unwrap();
        argument
            .replace(&devices.device_path, &device.display().to_string())
            .replace(message, &result.display().to_string())
    }

    fn report(&self, pod: &str, phase: &str, state: Value) {
        let status = json!({
            "name": "device", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": state,
        });
        let status = json!({ "phase": phase, "containerStatuses": [status] });
        let pods = self.cluster.api_in::<Pod>(self.namespace);
        // It may have been deleted.
        let _ = self.cluster.merge_at_status(&pods, pod, &json!({ "status": status }));
    }

    /// Ends the pods that were deleted.
    fn release(&mut self, pods: &[Pod]) {
        let is_gone = |name: &String| pods.iter().all(|pod| pod.name_any() != *name);
        let gone: Vec<String> = self.held.keys().filter(|name| is_gone(name)).cloned().collect();
        for name in gone {
            let mut held = self.held.remove(&name).unwrap();
            held.process.kill().unwrap();
            held.process.wait().unwrap();
            self.driver.take_down(&held.volume);
        }
    }
}

fn claim_of(pod: &Pod) -> Option<String> {
    let volume = pod.spec.as_ref()?.volumes.as_ref()?.first()?;
    Some(volume.persistent_volume_claim.as_ref()?.claim_name.clone())
}

fn without_finalizers() -> Value {
    json!({ "metadata": { "finalizers": null } })
}
