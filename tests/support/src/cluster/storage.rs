//! Kubernetes objects for a driver's volumes and snapshots.

use std::thread;
use std::time::{Duration, Instant};

use csi_loopback::kubernetes::metadata_service::SnapshotMetadataService;
use csi_loopback::kubernetes::snapshot::{
    VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent,
};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Secret};
use serde_json::{Value, json};

use super::Cluster;
use crate::driver::{PATIENCE, map};

/// A VolumeSnapshot that is ready.
#[derive(Debug, Clone)]
pub struct Ready {
    pub namespace: String,
    pub name: String,
    /// Name of the VolumeSnapshotContent.
    pub content: String,
    /// The CSI handle.
    pub handle: String,
}

impl Cluster {
    /// Creates a claim that is bound to a volume of the driver; no controller binds claims. The
    /// PersistentVolume's name is `NAMESPACE-NAME`.
    pub fn claim(&self, namespace: &str, name: &str, driver: &str, handle: &str, bytes: u64) {
        self.claim_as("Block", namespace, name, driver, handle, bytes);
    }

    /// A claim with this volume mode, Block or Filesystem.
    pub fn claim_as(
        &self,
        mode: &str,
        namespace: &str,
        name: &str,
        driver: &str,
        handle: &str,
        bytes: u64,
    ) {
        let csi = json!({ "driver": driver, "volumeHandle": handle });
        let common = json!({
            "accessModes": ["ReadWriteOnce"], "volumeMode": mode, "storageClassName": "",
        });
        self.claim_with(namespace, name, &json!({}), &common, csi, bytes);
    }

    /// A claim with this metadata, and these fields in the specs of claim and PersistentVolume.
    pub fn claim_with(
        &self,
        namespace: &str,
        name: &str,
        metadata: &Value,
        common: &Value,
        csi: Value,
        bytes: u64,
    ) {
        let volume = format!("{namespace}-{name}");
        let mut object = json!({ "metadata": metadata, "spec": common });
        object["metadata"]["name"] = name.into();
        object["spec"]["volumeName"] = volume.as_str().into();
        object["spec"]["resources"] = json!({ "requests": { "storage": bytes.to_string() } });
        let claims = self.api_in::<PersistentVolumeClaim>(namespace);
        let uid = self.create(&claims, object).metadata.uid;
        let mut object = json!({ "metadata": { "name": volume }, "spec": common });
        object["spec"]["persistentVolumeReclaimPolicy"] = "Retain".into();
        object["spec"]["capacity"] = json!({ "storage": bytes.to_string() });
        object["spec"]["csi"] = csi;
        object["spec"]["claimRef"] = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "namespace": namespace, "name": name, "uid": uid,
        });
        let volumes = self.api::<PersistentVolume>();
        self.create(&volumes, object);
        self.merge_status(&volumes, &volume, &json!({ "phase": "Bound" }));
        let status = json!({ "phase": "Bound", "capacity": { "storage": bytes.to_string() } });
        self.merge_status(&claims, name, &status);
    }

    /// Sets the new capacity of the claim's volume, as csi-resizer does. Kubelet then grows the
    /// volume on the node.
    pub fn grown(&self, namespace: &str, name: &str, bytes: u64) {
        let capacity = json!({ "storage": bytes.to_string() });
        let volume = json!({ "spec": { "capacity": capacity } });
        let volumes = self.api::<PersistentVolume>();
        self.merge(&volumes, &format!("{namespace}-{name}"), &volume);
        let status = json!({
            "allocatedResources": capacity,
            "allocatedResourceStatuses": { "storage": "NodeResizePending" },
            "conditions": [{ "type": "FileSystemResizePending", "status": "True" }],
        });
        self.merge_status(&self.api_in::<PersistentVolumeClaim>(namespace), name, &status);
    }

    /// Creates a VolumeSnapshotClass with a unique name and these parameters.
    pub fn snapshot_class(&self, driver: &str, parameters: &[(&str, &str)]) -> String {
        let name = self.unique("class");
        let mut class = VolumeSnapshotClass::new(&name, driver);
        class.parameters =
            parameters.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        self.create(&self.api::<VolumeSnapshotClass>(), serde_json::to_value(class).unwrap());
        name
    }

    /// Creates a VolumeSnapshotClass with this Secret for creation, lists and metadata.
    pub fn snapshot_class_with_secret(&self, driver: &str, namespace: &str, name: &str) -> String {
        self.snapshot_class(
            driver,
            &[
                ("csi.storage.k8s.io/snapshotter-secret-name", name),
                ("csi.storage.k8s.io/snapshotter-secret-namespace", namespace),
                ("csi.storage.k8s.io/snapshotter-list-secret-name", name),
                ("csi.storage.k8s.io/snapshotter-list-secret-namespace", namespace),
            ],
        )
    }

    pub fn secret(&self, namespace: &str, name: &str, values: &[(&str, &str)]) {
        let object = json!({ "metadata": { "name": name }, "stringData": map(values) });
        self.create(&self.api_in::<Secret>(namespace), object);
    }

    /// Creates a VolumeSnapshot of a claim without waiting.
    pub fn request_snapshot(&self, namespace: &str, name: &str, claim: &str, class: &str) {
        let spec = json!({
            "source": { "persistentVolumeClaimName": claim },
            "volumeSnapshotClassName": class,
        });
        let object = json!({ "metadata": { "name": name }, "spec": spec });
        self.create(&self.api_in::<VolumeSnapshot>(namespace), object);
    }

    /// Takes a snapshot of a claim and waits until it is ready.
    pub fn snapshot(&self, namespace: &str, name: &str, claim: &str, class: &str) -> Ready {
        self.request_snapshot(namespace, name, claim, class);
        self.wait_until_ready(namespace, name)
    }

    /// Waits until snapshot-controller and csi-snapshotter report that the snapshot is ready.
    pub fn wait_until_ready(&self, namespace: &str, name: &str) -> Ready {
        let snapshots = self.api_in::<VolumeSnapshot>(namespace);
        let contents = self.api::<VolumeSnapshotContent>();
        let mut last = String::new();
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            let status = self.get(&snapshots, name).and_then(|snapshot| snapshot.status);
            last = format!("{status:?}");
            let status = status.filter(|status| status.ready_to_use == Some(true));
            let content = status.and_then(|status| status.bound_volume_snapshot_content_name);
            if let Some(content) = content {
                let status = self.get(&contents, &content).unwrap().status;
                let handle = status.unwrap().snapshot_handle.unwrap();
                let (namespace, name) = (namespace.to_owned(), name.to_owned());
                return Ready { namespace, name, content, handle };
            }
            thread::sleep(Duration::from_millis(20));
        }
        println!("--- snapshot-controller ---\n{}", self.log("snapshot-controller"));
        panic!("VolumeSnapshot {name} is not ready: {last}");
    }

    /// Creates a VolumeSnapshot and its content for an existing snapshot of the driver.
    pub fn adopt_snapshot(
        &self,
        namespace: &str,
        name: &str,
        driver: &str,
        handle: &str,
        class: Option<&str>,
    ) -> Ready {
        self.request_adoption(namespace, name, driver, handle, class);
        self.wait_until_ready(namespace, name)
    }

    /// The same with a status, for a driver without csi-snapshotter.
    pub fn snapshot_with_status(
        &self,
        namespace: &str,
        name: &str,
        driver: &str,
        class: &str,
        handle: &str,
    ) -> Ready {
        let content = self.request_adoption(namespace, name, driver, handle, Some(class));
        let status = json!({ "readyToUse": true, "snapshotHandle": handle });
        self.merge_status(&self.api::<VolumeSnapshotContent>(), &content, &status);
        self.wait_until_ready(namespace, name)
    }

    /// Creates both without waiting. Returns the name of the content.
    fn request_adoption(
        &self,
        namespace: &str,
        name: &str,
        driver: &str,
        handle: &str,
        class: Option<&str>,
    ) -> String {
        let content = self.unique("adopted");
        let spec = json!({
            "driver": driver,
            "deletionPolicy": "Retain",
            "source": { "snapshotHandle": handle },
            "sourceVolumeMode": "Block",
            "volumeSnapshotClassName": class,
            "volumeSnapshotRef": { "namespace": namespace, "name": name },
        });
        let object = json!({ "metadata": { "name": content }, "spec": spec });
        self.create(&self.api::<VolumeSnapshotContent>(), object);
        let spec = json!({
            "source": { "volumeSnapshotContentName": content },
            "volumeSnapshotClassName": class,
        });
        let object = json!({ "metadata": { "name": name }, "spec": spec });
        self.create(&self.api_in::<VolumeSnapshot>(namespace), object);
        content
    }

    /// Deletes a snapshot and waits until it is deleted, also in the driver.
    pub fn delete_snapshot(&self, snapshot: &Ready) {
        let snapshots = self.api_in::<VolumeSnapshot>(&snapshot.namespace);
        self.delete(&snapshots, &snapshot.name);
        self.wait_until_gone(&snapshots, &snapshot.name);
        self.wait_until_gone(&self.api::<VolumeSnapshotContent>(), &snapshot.content);
    }

    /// Creates the SnapshotMetadataService of the driver. `authorities` is PEM.
    pub fn metadata_service(&self, driver: &str, address: &str, audience: &str, authorities: &str) {
        let spec = json!({
            "address": address,
            "audience": audience,
            "caCert": ByteString(authorities.as_bytes().to_vec()),
        });
        let object = json!({ "metadata": { "name": driver }, "spec": spec });
        self.create(&self.api::<SnapshotMetadataService>(), object);
    }
}
