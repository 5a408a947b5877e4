//! The snapshot objects of Kubernetes, `snapshot.storage.k8s.io/v1`, with the fields that this
//! project reads or, in tests, writes. The controllers of external-snapshotter own them. An object
//! has no status until its controller has processed it.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::core::ClusterResourceScope;
use kube::{CustomResource, Resource};
use serde::{Deserialize, Serialize};

use super::name;
use common::ids;

pub const GROUP: &str = "snapshot.storage.k8s.io";
const VERSION: &str = "v1";

/// Annotation of the class for VolumeSnapshots that name none.
pub const DEFAULT_CLASS: &str = "snapshot.storage.kubernetes.io/is-default-class";

/// Annotation of a VolumeSnapshot whose value its driver, vSphere's, takes as the base of a delta
/// instead of the snapshot's handle.
pub const CHANGE_ID: &str = "csi.vsphere.volume/change-id";

/// Label of a VolumeSnapshotContent: the node whose csi-snapshotter creates the snapshot, with
/// `--enable-distributed-snapshotting` of the snapshot-controller.
pub const MANAGED_BY: &str = "snapshot.storage.kubernetes.io/managed-by";

/// A user's request for a snapshot, and its status.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, CustomResource)]
#[kube(
    group = "snapshot.storage.k8s.io",
    version = "v1",
    kind = "VolumeSnapshot",
    namespaced,
    status = "VolumeSnapshotStatus",
    schema = "disabled",
    derive = "Default"
)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotSpec {
    pub source: VolumeSnapshotSource,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_snapshot_class_name: Option<String>,
}

/// Exactly one field is set.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotSource {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_snapshot_content_name: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotStatus {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound_volume_snapshot_content_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<VolumeSnapshotError>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VolumeSnapshotError {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
}

/// A snapshot in the storage system.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, CustomResource)]
#[kube(
    group = "snapshot.storage.k8s.io",
    version = "v1",
    kind = "VolumeSnapshotContent",
    status = "VolumeSnapshotContentStatus",
    schema = "disabled",
    derive = "Default"
)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotContentSpec {
    /// The VolumeSnapshot that it belongs to; without a uid until both are bound.
    pub volume_snapshot_ref: ObjectReference,
    /// Name of the CSI driver.
    pub driver: String,
    /// `Delete` or `Retain`.
    pub deletion_policy: String,
    pub source: VolumeSnapshotContentSource,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_snapshot_class_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_volume_mode: Option<String>,
}

/// Exactly one field is set: the volume to take a snapshot of, or an existing snapshot.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotContentSource {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_handle: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_handle: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotContentStatus {
    /// CSI handle of the snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_handle: Option<String>,
    /// When the snapshot was taken, in nanoseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_time: Option<i64>,
    /// Bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore_size: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_to_use: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<VolumeSnapshotError>,
}

/// Parameters of snapshots, and their secrets. A class has no spec.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshotClass {
    pub api_version: String,
    pub kind: String,
    pub metadata: ObjectMeta,
    /// Name of the CSI driver.
    pub driver: String,
    /// `Delete` or `Retain`.
    pub deletion_policy: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub parameters: BTreeMap<String, String>,
}

impl VolumeSnapshot {
    /// What identifies it as the base of a delta, if that is not its handle.
    ///
    /// Users write annotations. An id of this project's driver, which has no change ids, would be
    /// that of another snapshot, and could make the delta too small.
    pub fn change_id(&self) -> Option<&str> {
        let value = self.metadata.annotations.as_ref()?.get(CHANGE_ID)?;
        Some(value.as_str()).filter(|value| !value.is_empty() && ids::name_of(value).is_none())
    }

    /// Name of the bound content, if the snapshot is ready to use.
    pub fn ready_content(&self) -> Option<&str> {
        let status = self.status.as_ref().filter(|status| status.ready_to_use == Some(true))?;
        status.bound_volume_snapshot_content_name.as_deref().filter(|name| name::is_object(name))
    }
}

impl VolumeSnapshotContent {
    /// CSI handle of the snapshot, if it is ready to use.
    pub fn ready_handle(&self) -> Option<&str> {
        let status = self.status.as_ref().filter(|status| status.ready_to_use == Some(true))?;
        status.snapshot_handle.as_deref().filter(|handle| !handle.is_empty())
    }

    /// The node that holds the snapshot, as far as the snapshot-controller knows.
    pub fn node(&self) -> Option<&str> {
        let node = self.metadata.labels.as_ref()?.get(MANAGED_BY)?;
        Some(node.as_str()).filter(|node| name::is_object(node))
    }

    /// Whether it refers to the VolumeSnapshot: a reference in one direction proves nothing.
    pub fn belongs_to(&self, object: &VolumeSnapshot) -> bool {
        let back = &self.spec.volume_snapshot_ref;
        let same_uid = match back.uid.as_deref() {
            None | Some("") => true,
            uid => uid == object.metadata.uid.as_deref(),
        };
        same_uid && back.name == object.metadata.name && back.namespace == object.metadata.namespace
    }
}

/// Index of contents by CSI handle, whether ready or not.
pub fn handle(content: &VolumeSnapshotContent) -> Option<Cow<'_, str>> {
    let made = content.status.as_ref().and_then(|status| status.snapshot_handle.as_deref());
    made.or(content.spec.source.snapshot_handle.as_deref()).map(Cow::from)
}

impl VolumeSnapshotClass {
    pub fn new(name: &str, driver: &str) -> Self {
        Self {
            api_version: format!("{GROUP}/{VERSION}"),
            kind: "VolumeSnapshotClass".into(),
            metadata: ObjectMeta { name: Some(name.into()), ..ObjectMeta::default() },
            driver: driver.into(),
            deletion_policy: "Delete".into(),
            parameters: BTreeMap::new(),
        }
    }
}

impl Resource for VolumeSnapshotClass {
    type DynamicType = ();
    type Scope = ClusterResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "VolumeSnapshotClass".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        VERSION.into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "volumesnapshotclasses".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_id_is_never_an_id_of_this_projects_driver() {
        let annotated = |value: &str| {
            let mut object = VolumeSnapshot::new("monday", Default::default());
            let note = (CHANGE_ID.to_owned(), value.to_owned());
            object.metadata.annotations = Some([note].into());
            object.change_id().map(str::to_owned)
        };
        assert_eq!(annotated("52 21 4f/7").as_deref(), Some("52 21 4f/7"));
        for other in ["", "snap-tuesday-0123456789abcdef"] {
            assert_eq!(annotated(other), None, "{other}");
        }
    }
}
