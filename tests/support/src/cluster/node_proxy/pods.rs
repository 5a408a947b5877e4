//! Pods in the API server that are bound to the rig's node, with volumes of each kind.

use csi::volume_capability::access_mode::Mode;
use csi_loopback::proto::csi::v1 as csi;
use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim, Pod};
use kube::api::DeleteParams;
use serde_json::{Value, json};

use super::driver::ProxiedDriver;
use super::{ANNOTATION, Rig, SIZE};
use crate::driver::{block, map, mounted_as};
use crate::inline::handle;

/// A volume of a pod.
#[derive(Debug, Clone)]
pub struct Volume {
    /// Name in the pod.
    pub name: String,
    /// Its entry in spec.volumes, without the name.
    pub source: Value,
    /// Its PersistentVolume; None for an inline volume.
    pub persistent: Option<Persistent>,
}

#[derive(Debug, Clone)]
pub struct Persistent {
    /// Name of the PersistentVolume, which is part of kubelet's paths.
    pub name: String,
    /// Name of the claim.
    pub claim: String,
    pub handle: String,
    pub access: String,
    /// None: a raw block volume.
    pub fs_type: Option<String>,
    pub options: Vec<String>,
    pub attributes: Value,
}

/// A pod that is bound to the node.
#[derive(Debug, Clone)]
pub struct BoundPod {
    pub name: String,
    pub uid: String,
    pub fs_group: Option<i64>,
}

impl Volume {
    /// The CSI handle; for an inline volume, kubelet derives it from the pod.
    pub fn handle(&self, pod: &BoundPod) -> String {
        match &self.persistent {
            Some(persistent) => persistent.handle.clone(),
            None => handle(&pod.uid, &self.name),
        }
    }
}

impl<B: ProxiedDriver> Rig<'_, B> {
    /// A claim that is bound to a new volume of the driver. The pod volume has the claim's name.
    pub fn claim(&self, name: &str) -> Volume {
        let source = json!({ "persistentVolumeClaim": { "claimName": name } });
        self.bound(name, name, source, Some("ext4"))
    }

    /// A claim of a raw block volume.
    pub fn raw_claim(&self, name: &str) -> Volume {
        let source = json!({ "persistentVolumeClaim": { "claimName": name } });
        self.bound(name, name, source, None)
    }

    /// A generic ephemeral volume for a pod of this name, with the claim that a controller would
    /// create.
    pub fn ephemeral(&self, pod: &str, name: &str) -> Volume {
        let spec = json!({
            "accessModes": ["ReadWriteOncePod"],
            "resources": { "requests": { "storage": SIZE.to_string() } },
        });
        let source = json!({ "ephemeral": { "volumeClaimTemplate": { "spec": spec } } });
        self.bound(name, &format!("{pod}-{name}"), source, Some("ext4"))
    }

    /// An inline volume.
    pub fn inline(&self, name: &str, attributes: &[(&str, &str)]) -> Volume {
        let attributes = map(attributes);
        let csi = json!({ "driver": self.driver.driver_name(), "volumeAttributes": attributes });
        Volume { name: name.to_owned(), source: json!({ "csi": csi }), persistent: None }
    }

    fn bound(&self, name: &str, claim: &str, source: Value, fs_type: Option<&str>) -> Volume {
        // As csi-provisioner maps the access mode for a driver with SINGLE_NODE_MULTI_WRITER.
        let capability = match fs_type {
            Some(fs_type) => mounted_as(fs_type, Mode::SingleNodeSingleWriter),
            None => block(),
        };
        let of_driver = format!("{}-{claim}", self.namespace);
        let (handle, attributes) = self.driver.volume(&of_driver, capability);
        let csi = json!({
            "driver": self.driver.driver_name(), "volumeHandle": handle, "fsType": fs_type,
            "volumeAttributes": attributes,
        });
        let (mode, access) = match fs_type {
            Some(_) => ("Filesystem", "ReadWriteOncePod"),
            None => ("Block", "ReadWriteOnce"),
        };
        let common = json!({ "accessModes": [access], "volumeMode": mode, "storageClassName": "" });
        self.cluster.claim_with(&self.namespace, claim, &json!({}), &common, csi, SIZE);
        let persistent = Persistent {
            name: of_driver,
            claim: claim.to_owned(),
            handle,
            access: access.to_owned(),
            fs_type: fs_type.map(str::to_owned),
            options: Vec::new(),
            attributes,
        };
        Volume { name: name.to_owned(), source, persistent: Some(persistent) }
    }

    pub fn pods(&self) -> kube::Api<Pod> {
        self.cluster.api_in(&self.namespace)
    }

    /// Creates a pod with these volumes that is bound to the node. `opted` is the value of the
    /// annotation.
    pub fn pod(&self, name: &str, volumes: &[&Volume], opted: Option<&str>) -> BoundPod {
        self.pod_with(name, volumes, opted, json!({}))
    }

    /// A claim `data`, and a pod `app` that opts in for it.
    pub fn app(&self) -> (Volume, BoundPod) {
        let claim = self.claim("data");
        let pod = self.pod("app", &[&claim], Some("data"));
        (claim, pod)
    }

    /// Creates a pod with additional fields of its spec.
    pub fn pod_with(
        &self,
        name: &str,
        volumes: &[&Volume],
        opted: Option<&str>,
        spec: Value,
    ) -> BoundPod {
        let mut object = json!({ "metadata": { "name": name }, "spec": spec });
        if let Some(names) = opted {
            object["metadata"]["annotations"] = json!({ ANNOTATION: names });
        }
        let in_pod = |volume: &&Volume| {
            let mut in_pod = volume.source.clone();
            in_pod["name"] = volume.name.as_str().into();
            in_pod
        };
        object["spec"]["nodeName"] = self.node.as_str().into();
        object["spec"]["automountServiceAccountToken"] = false.into();
        object["spec"]["volumes"] = volumes.iter().map(in_pod).collect();
        let (mut mounts, mut devices) = (Vec::new(), Vec::new());
        for volume in volumes {
            let at = format!("/{}", volume.name);
            match &volume.persistent {
                Some(Persistent { fs_type: None, .. }) => {
                    devices.push(json!({ "name": volume.name, "devicePath": at }));
                }
                _ => mounts.push(json!({ "name": volume.name, "mountPath": at })),
            }
        }
        object["spec"]["containers"] = json!([{
            "name": "main", "image": "none", "volumeMounts": mounts, "volumeDevices": devices,
        }]);
        let made = self.cluster.create(&self.pods(), object);
        let bound = BoundPod {
            name: name.to_owned(),
            uid: made.metadata.uid.unwrap(),
            fs_group: made.spec.and_then(|spec| spec.security_context?.fs_group),
        };
        for volume in volumes.iter().filter(|volume| !volume.source["ephemeral"].is_null()) {
            self.set_owner(volume, &bound);
        }
        bound
    }

    /// Sets the pod as owner of the claim of a generic ephemeral volume.
    fn set_owner(&self, volume: &Volume, pod: &BoundPod) {
        let claims = self.cluster.api_in::<PersistentVolumeClaim>(&self.namespace);
        let owner = json!({
            "apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid, "controller": true,
        });
        let patch = json!({ "metadata": { "ownerReferences": [owner] } });
        self.cluster.merge(&claims, &volume.persistent.as_ref().unwrap().claim, &patch);
    }

    /// Deletes the pod immediately, as after its node has reported that it has ended.
    pub fn delete(&self, pod: &BoundPod) {
        let now = DeleteParams::default().grace_period(0);
        self.cluster.block_on(self.pods().delete(&pod.name, &now)).unwrap();
        self.cluster.wait_until_gone(&self.pods(), &pod.name);
    }

    /// Sets the annotation of the pod.
    pub fn opt_in(&self, pod: &BoundPod, names: &str) {
        let patch = json!({ "metadata": { "annotations": { ANNOTATION: names } } });
        self.cluster.merge(&self.pods(), &pod.name, &patch);
    }

    /// The events of the pod, without order.
    pub fn events(&self, pod: &BoundPod) -> Vec<Event> {
        let events = self.cluster.api_in::<Event>(&self.namespace);
        let all = self.cluster.block_on(events.list(&Default::default())).unwrap();
        let is_of_pod = |event: &Event| event.involved_object.uid.as_ref() == Some(&pod.uid);
        all.into_iter().filter(is_of_pod).collect()
    }

    /// Waits for an event of the pod with all of these words in its message.
    pub fn wait_for_event(&self, pod: &BoundPod, words: &[&str]) -> Event {
        let has_all = |event: &Event| {
            let message = event.message.as_deref().unwrap_or_default();
            words.iter().all(|word| message.contains(word))
        };
        self.cluster.wait_for(&format!("an event with {words:?}"), || {
            self.events(pod).into_iter().find(has_all)
        })
    }
}
