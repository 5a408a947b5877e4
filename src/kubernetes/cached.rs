//! What the caches keep of an object. A tenant may store a megabyte in an object that a role
//! watches: in annotations, labels, names of owners, or texts of the spec. So a cache keeps only
//! what its readers use, and of texts that a tenant writes only those that can be valid.

use std::marker::PhantomData;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use k8s_openapi::api::storage::v1::CSIDriver;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::PartialObjectMeta;
use serde::Serialize;

use super::cache::Object;
use super::driver_discovery::DriverDiscovery;
use super::metadata_service::{DRIVER_LABEL, SnapshotMetadataService};
use super::pod::Pod;
use super::pod_certificate::PodCertificateRequest;
use super::session::{SnapshotServiceConfiguration, SnapshotSessionData, SnapshotSessionRequest};
use super::snapshot::{
    CHANGE_ID, DEFAULT_CLASS, MANAGED_BY, VolumeSnapshot, VolumeSnapshotClass,
    VolumeSnapshotContent,
};
use common::text::truncate;

/// Annotations of a VolumeSnapshotContent by the snapshot-controller that name the Secret of its
/// class, for use after the class is deleted.
pub const DELETION_NAME_KEY: &str = "snapshot.storage.kubernetes.io/deletion-secret-name";
pub const DELETION_NAMESPACE_KEY: &str = "snapshot.storage.kubernetes.io/deletion-secret-namespace";
/// Labels of a namespace: the Pod Security level that is enforced, and the one that causes
/// warnings.
pub const ENFORCE: &str = "pod-security.kubernetes.io/enforce";
pub const WARN: &str = "pod-security.kubernetes.io/warn";
/// Label of an EndpointSlice: the name of its Service.
pub const SERVICE: &str = "kubernetes.io/service-name";
/// Label of a CSIDriver: the Pod Security level that a namespace must have for inline volumes of
/// the driver. OpenShift defines it.
pub const PROFILE: &str = "security.openshift.io/csi-ephemeral-volume-profile";

/// Maximum bytes of the name of an object.
const MAX_NAME: usize = 253;
/// Maximum bytes of an id of a driver. CSI allows 128.
const MAX_ID: usize = 512;
/// Maximum bytes of an error of another controller.
const MAX_ERROR: usize = 1024;

/// An object that a cache can hold.
pub trait Cached: Object {
    /// The form in which a cache holds it.
    type Kept: Kept<Self>;

    /// Removes what no reader of a cache uses.
    fn shrink(&mut self);
}

/// A form of an object in a cache.
pub trait Kept<K>: Send + Sync + 'static {
    fn of(object: K) -> Self;

    /// `None` if it is unusable; then the API server is queried.
    fn object(&self) -> Option<Arc<K>>;
}

impl<K: Object> Kept<K> for Arc<K> {
    fn of(object: K) -> Self {
        Self::new(object)
    }

    fn object(&self) -> Option<Self> {
        Some(self.clone())
    }
}

/// An object as JSON. Decoded it takes several times the memory: each map of labels alone has half a
/// kilobyte. For kinds with many objects, of which few are read.
pub struct Encoded<K> {
    json: Box<[u8]>,
    kind: PhantomData<fn() -> K>,
}

impl<K: Object + Serialize> Kept<K> for Encoded<K> {
    fn of(object: K) -> Self {
        let json = serde_json::to_vec(&object).unwrap_or_default().into_boxed_slice();
        Self { json, kind: PhantomData }
    }

    fn object(&self) -> Option<Arc<K>> {
        serde_json::from_slice(&self.json).ok().map(Arc::new)
    }
}

/// Keeps identity, version, times and finalizers, and of the rest these annotations and labels.
fn keep(metadata: &mut ObjectMeta, annotations: &[&str], labels: &[&str]) {
    let all = std::mem::take(metadata);
    let of = |all: Option<std::collections::BTreeMap<String, String>>, names: &[&str]| {
        let mut all = all?;
        Some(names.iter().filter_map(|name| all.remove_entry(*name)).collect())
    };
    *metadata = ObjectMeta {
        annotations: of(all.annotations, annotations),
        labels: of(all.labels, labels),
        name: all.name,
        namespace: all.namespace,
        uid: all.uid,
        resource_version: all.resource_version,
        generation: all.generation,
        creation_timestamp: all.creation_timestamp,
        deletion_timestamp: all.deletion_timestamp,
        ..ObjectMeta::default()
    };
}

/// Removes a name that no object can have.
fn keep_name(name: &mut Option<String>) {
    if name.as_ref().is_some_and(|name| name.len() > MAX_NAME) {
        *name = None;
    }
}

impl Cached for VolumeSnapshot {
    type Kept = Encoded<Self>;

    fn shrink(&mut self) {
        keep(&mut self.metadata, &[CHANGE_ID], &[]);
        if let Some(annotations) = &mut self.metadata.annotations {
            annotations.retain(|_, id| id.len() <= MAX_ID);
        }
        self.spec.source = Default::default();
        keep_name(&mut self.spec.volume_snapshot_class_name);
        let status = self.status.as_mut();
        let error = status.and_then(|status| status.error.as_mut());
        if let Some(message) = error.and_then(|error| error.message.as_mut()) {
            *message = truncate(message, MAX_ERROR);
        }
    }
}

impl Cached for VolumeSnapshotContent {
    type Kept = Encoded<Self>;

    fn shrink(&mut self) {
        keep(&mut self.metadata, &[DELETION_NAME_KEY, DELETION_NAMESPACE_KEY], &[MANAGED_BY]);
        if let Some(status) = &mut self.status {
            status.error = None;
        }
    }
}

impl Cached for VolumeSnapshotClass {
    type Kept = Arc<Self>;

    fn shrink(&mut self) {
        keep(&mut self.metadata, &[DEFAULT_CLASS], &[]);
    }
}

impl Cached for SnapshotSessionRequest {
    type Kept = Arc<Self>;

    fn shrink(&mut self) {
        // The controller writes them back without its own.
        let finalizers = self.metadata.finalizers.take();
        keep(&mut self.metadata, &[], &[]);
        self.metadata.finalizers = finalizers;
    }
}

impl Cached for PartialObjectMeta<SnapshotSessionRequest> {
    type Kept = Arc<Self>;

    fn shrink(&mut self) {
        keep(&mut self.metadata, &[], &[]);
    }
}

impl Cached for SnapshotSessionData {
    type Kept = Arc<Self>;

    fn shrink(&mut self) {
        keep(&mut self.metadata, &[], &[]);
    }
}

impl Cached for SnapshotServiceConfiguration {
    type Kept = Arc<Self>;

    fn shrink(&mut self) {
        keep(&mut self.metadata, &[], &[DRIVER_LABEL]);
    }
}

impl Cached for SnapshotMetadataService {
    type Kept = Arc<Self>;

    fn shrink(&mut self) {
        keep(&mut self.metadata, &[], &[]);
    }
}

impl Cached for DriverDiscovery {
    type Kept = Arc<Self>;

    fn shrink(&mut self) {
        keep(&mut self.metadata, &[], &[]);
        self.status = None;
    }
}

impl Cached for ConfigMap {
    type Kept = Arc<Self>;

    fn shrink(&mut self) {
        keep(&mut self.metadata, &[], &[]);
        self.binary_data = None;
    }
}

impl Cached for Namespace {
    type Kept = Arc<Self>;

    fn shrink(&mut self) {
        keep(&mut self.metadata, &[], &[ENFORCE, WARN]);
        (self.spec, self.status) = (None, None);
    }
}

impl Cached for CSIDriver {
    type Kept = Arc<Self>;

    fn shrink(&mut self) {
        keep(&mut self.metadata, &[], &[PROFILE]);
    }
}

impl Cached for EndpointSlice {
    type Kept = Arc<Self>;

    fn shrink(&mut self) {
        keep(&mut self.metadata, &[], &[SERVICE]);
        for endpoint in &mut self.endpoints {
            *endpoint = Endpoint {
                addresses: std::mem::take(&mut endpoint.addresses),
                conditions: endpoint.conditions.take(),
                node_name: endpoint.node_name.take(),
                ..Endpoint::default()
            };
        }
    }
}

impl Cached for PodCertificateRequest {
    type Kept = Arc<Self>;

    fn shrink(&mut self) {
        keep(&mut self.metadata, &[], &[]);
        // A signer reads whether there are any.
        self.spec.unverified_user_annotations.values_mut().for_each(String::clear);
        if let Some(status) = &mut self.status {
            status.certificate_chain.clear();
            status.conditions.truncate(1);
            status.conditions.iter_mut().for_each(|condition| condition.message.clear());
        }
        if !self.is_open() {
            self.spec.stub_pkcs10_request.0.clear();
            self.spec.unverified_user_annotations.clear();
        }
    }
}

impl Cached for Pod {
    type Kept = Arc<Self>;

    /// The type has only fields that are used.
    fn shrink(&mut self) {}
}

#[cfg(test)]
mod tests {
    use serde::Serialize;
    use serde_json::{Value, json};

    use super::*;

    const FAT: usize = 255 << 10;

    /// Bytes of the object as JSON after the cache has shrunk it. `kept` are annotations and labels
    /// that must remain.
    fn size<K: Cached + Serialize>(object: Value, kept: &[&str]) -> usize {
        let mut object = object;
        let fat = |count: usize| -> serde_json::Map<String, Value> {
            let pairs = (0..count).map(|one| (format!("a/{one}"), "x".repeat(FAT / count).into()));
            pairs.chain(kept.iter().map(|name| ((*name).into(), "kept".into()))).collect()
        };
        let owner =
            json!({ "apiVersion": "v1", "kind": "Pod", "name": "x".repeat(FAT), "uid": "u" });
        object["metadata"] = json!({
            "name": "s", "namespace": "shop", "uid": "u", "resourceVersion": "7",
            "annotations": fat(1), "labels": fat(4000), "ownerReferences": vec![owner; 4],
            "generateName": "x".repeat(FAT), "finalizers": ["example.com/keep"],
            "managedFields": vec![json!({ "manager": "x".repeat(FAT), "fieldsV1": { "f:a": {} } }); 4],
        });
        let mut object: K = serde_json::from_value(object).unwrap();
        object.shrink();
        let metadata = object.meta();
        assert_eq!(metadata.resource_version.as_deref(), Some("7"));
        for name in kept {
            let in_one = [&metadata.annotations, &metadata.labels];
            assert!(in_one.iter().any(|all| all.as_ref().unwrap().contains_key(*name)), "{name}");
        }
        let json = serde_json::to_value(&object).unwrap();
        let kept = K::Kept::of(object).object().unwrap();
        assert_eq!(serde_json::to_value(&*kept).unwrap(), json, "a cache changes the object");
        json.to_string().len()
    }

    #[test]
    fn caches_keep_at_most_two_kilobytes_of_a_tenants_object() {
        let long = || "x".repeat(FAT);
        let source = json!({ "persistentVolumeClaimName": long() });
        let error = json!({ "message": long() });
        let status =
            json!({ "readyToUse": true, "boundVolumeSnapshotContentName": "c", "error": error });
        let spec = json!({ "source": source, "volumeSnapshotClassName": long() });
        let snapshot = json!({ "spec": spec, "status": status });
        let requested = json!({ "spec": { "snapshots": ["a"] } });
        let sizes = [
            ("VolumeSnapshot", size::<VolumeSnapshot>(snapshot, &[CHANGE_ID])),
            ("SnapshotSessionRequest", size::<SnapshotSessionRequest>(requested, &[])),
            (
                "metadata of requests",
                size::<PartialObjectMeta<SnapshotSessionRequest>>(json!({}), &[]),
            ),
            ("Namespace", size::<Namespace>(json!({}), &[ENFORCE, WARN])),
        ];
        for (kind, bytes) in sizes {
            println!("report: the cache keeps {bytes} bytes of a {kind}");
            assert!(bytes < 2 << 10, "{kind}: {bytes}");
        }
    }

    #[test]
    fn caches_keep_what_their_readers_use() {
        let content = json!({
            "spec": {
                "driver": "d", "deletionPolicy": "Delete", "source": { "volumeHandle": "v" },
                "volumeSnapshotRef": { "name": "s", "namespace": "shop" },
            },
            "status": { "snapshotHandle": "h", "readyToUse": true, "error": { "message": "x" } },
        });
        let annotations = [DELETION_NAME_KEY, DELETION_NAMESPACE_KEY, MANAGED_BY];
        let configuration =
            json!({ "spec": { "address": "a:1", "caCert": "eA==", "driverNamespace": "n" } });
        let class = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotClass",
            "driver": "d", "deletionPolicy": "Delete",
        });
        let service = json!({ "spec": { "audience": "a", "address": "a:1", "caCert": "eA==" } });
        let pod = json!({ "kind": "Pod", "name": "x".repeat(FAT) });
        let slice = json!({
            "addressType": "IPv4",
            "endpoints": [{ "addresses": ["10.0.0.1"], "nodeName": "n", "targetRef": pod }],
        });
        let sizes = [
            size::<VolumeSnapshotContent>(content, &annotations),
            size::<SnapshotServiceConfiguration>(configuration, &[DRIVER_LABEL]),
            size::<VolumeSnapshotClass>(class, &[DEFAULT_CLASS]),
            size::<SnapshotMetadataService>(service, &[]),
            size::<CSIDriver>(json!({ "spec": {} }), &[PROFILE]),
            size::<ConfigMap>(json!({ "data": { "a": "b" } }), &[]),
            size::<EndpointSlice>(slice, &[SERVICE]),
        ];
        assert!(sizes.iter().all(|bytes| *bytes < 2 << 10), "{sizes:?}");
        let mut request: SnapshotSessionRequest = serde_json::from_value(json!({
            "metadata": { "finalizers": ["a", "b"] }, "spec": { "snapshots": ["a"] },
        }))
        .unwrap();
        request.shrink();
        assert_eq!(request.metadata.finalizers.unwrap(), ["a", "b"]);
    }
}
