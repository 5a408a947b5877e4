//! The objects that a run creates.

use serde_json::{Value, json};

use super::super::door::{Source, Volume};
use super::super::in_pod::{Found, Work};
use crate::client::cluster::pods::outside_meshes;

/// Label of all objects of a run, with the run's name.
pub const RUN: &str = "conformance.loopback.csi.local/run";
/// Name of the only container of a pod.
pub const CONTAINER: &str = "device";
/// Path of the block device in the pod.
const DEVICE: &str = "/dev/csi-loopback-data";
/// Where kubelet reads the termination message.
const RESULT: &str = "/dev/termination-log";
/// Seconds after which a pod ends whose command was killed.
const EXPIRY: u64 = 600;

pub fn claim(name: &str, bytes: u64, class: &str, source: Option<Source<'_>>) -> Value {
    let mut spec = json!({
        "accessModes": ["ReadWriteOnce"],
        "volumeMode": "Block",
        "storageClassName": class,
        "resources": { "requests": { "storage": bytes.to_string() } },
    });
    match source {
        Some(Source::Snapshot(snapshot)) => {
            let group = kubernetes::snapshot::GROUP;
            spec["dataSource"] =
                json!({ "apiGroup": group, "kind": "VolumeSnapshot", "name": snapshot.id });
        }
        Some(Source::Volume(Volume { name, .. })) => {
            spec["dataSource"] = json!({ "kind": "PersistentVolumeClaim", "name": name });
        }
        None => {}
    }
    json!({ "metadata": { "name": name }, "spec": spec })
}

pub fn snapshot(name: &str, claim: &str, class: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": {
            "volumeSnapshotClassName": class,
            "source": { "persistentVolumeClaimName": claim },
        },
    })
}

/// A pod that works on the device of a claim. `rest` are further arguments.
pub fn pod(name: &str, claim: &str, image: &str, work: Work, rest: Vec<String>) -> Value {
    let work = match work {
        Work::Change => "change",
        Work::Compare => "compare",
        Work::Hold => "hold",
    };
    let mut args = vec!["conformance-device".to_owned(), work.to_owned()];
    args.extend([format!("--device={DEVICE}"), format!("--result={RESULT}")]);
    args.extend(rest);
    let mut metadata = json!({ "name": name });
    outside_meshes(&mut metadata);
    json!({
        "metadata": metadata,
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": EXPIRY,
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 1,
            "securityContext": { "seccompProfile": { "type": "RuntimeDefault" } },
            // Those of the driver: the pod runs on the node of its volume.
            "tolerations": [{ "operator": "Exists" }],
            "containers": [{
                "name": CONTAINER,
                "image": image,
                "args": args,
                "terminationMessagePath": RESULT,
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeDevices": [{ "name": "data", "devicePath": DEVICE }],
                "resources": { "requests": { "cpu": "50m", "memory": "32Mi" } },
                "securityContext": {
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    // Device nodes belong to root.
                    "runAsUser": 0,
                    "capabilities": { "drop": ["ALL"] },
                },
            }],
            "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": claim } }],
        },
    })
}

/// The termination message of a pod.
pub fn found(message: &str) -> Result<Found, String> {
    let found: Found = serde_json::from_str(message).map_err(|_| message.trim().to_owned())?;
    match found.error {
        Some(error) => Err(error),
        None => Ok(found),
    }
}
