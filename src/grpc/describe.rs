//! Which fields of messages may appear in the log: names, ids and paths, never a secret. All
//! services are here, so that one page shows what a log can contain.

use crate::call::{Describe, Subject, note, note_session};
use crate::proto::admin::v1 as admin;
use crate::proto::crust;
use crate::proto::csi::v1 as csi;
use crate::proto::snapshotsession as session;

macro_rules! describe {
    ($package:ident: $($message:ident { $($logged:ident: $($field:ident).+),* })*) => {$(
        impl Describe for $package::$message {
            #[allow(unused_variables)]
            fn describe(&self, subject: &mut Subject) {
                $(subject.$logged = note(&self.$($field).+);)*
            }
        }
    )*};
}

describe! { csi:
    GetPluginInfoRequest {}
    GetPluginInfoResponse {}
    GetPluginCapabilitiesRequest {}
    GetPluginCapabilitiesResponse {}
    ProbeRequest {}
    ProbeResponse {}
    CreateVolumeRequest { name: name }
    DeleteVolumeRequest { volume_id: volume_id }
    DeleteVolumeResponse {}
    ControllerPublishVolumeRequest { volume_id: volume_id }
    ControllerPublishVolumeResponse {}
    ControllerUnpublishVolumeRequest { volume_id: volume_id }
    ControllerUnpublishVolumeResponse {}
    ValidateVolumeCapabilitiesRequest { volume_id: volume_id }
    ValidateVolumeCapabilitiesResponse {}
    ListVolumesRequest {}
    ListVolumesResponse {}
    ControllerListVolumeHealthRequest {}
    ControllerListVolumeHealthResponse {}
    ControllerGetVolumeHealthRequest { volume_id: volume_id }
    ControllerGetVolumeHealthResponse {}
    GetCapacityRequest {}
    GetCapacityResponse {}
    ControllerGetCapabilitiesRequest {}
    ControllerGetCapabilitiesResponse {}
    CreateSnapshotRequest { name: name, volume_id: source_volume_id }
    DeleteSnapshotRequest { snapshot_id: snapshot_id }
    DeleteSnapshotResponse {}
    ListSnapshotsRequest { volume_id: source_volume_id, snapshot_id: snapshot_id }
    ListSnapshotsResponse {}
    GetSnapshotRequest { snapshot_id: snapshot_id }
    GetSnapshotResponse {}
    ControllerExpandVolumeRequest { volume_id: volume_id }
    ControllerExpandVolumeResponse {}
    ControllerGetVolumeRequest { volume_id: volume_id }
    ControllerGetVolumeResponse {}
    ControllerModifyVolumeRequest { volume_id: volume_id }
    ControllerModifyVolumeResponse {}
    ListSnapshotDeltasRequest { base_snapshot_id: from_snapshot_id, snapshot_id: to_snapshot_id }
    ListSnapshotDeltasResponse {}
    GroupControllerGetCapabilitiesRequest {}
    GroupControllerGetCapabilitiesResponse {}
    DeleteVolumeGroupSnapshotRequest { group_snapshot_id: group_snapshot_id }
    DeleteVolumeGroupSnapshotResponse {}
    GetVolumeGroupSnapshotRequest { group_snapshot_id: group_snapshot_id }
    GetVolumeGroupSnapshotResponse {}
    NodeStageVolumeRequest { volume_id: volume_id, path: staging_target_path }
    NodeStageVolumeResponse {}
    NodeUnstageVolumeRequest { volume_id: volume_id, path: staging_target_path }
    NodeUnstageVolumeResponse {}
    NodePublishVolumeResponse {}
    NodeUnpublishVolumeResponse {}
    NodeGetVolumeStatsResponse {}
    NodeGetVolumeHealthRequest { volume_id: volume_id, path: volume_publish_path }
    NodeGetVolumeHealthResponse {}
    NodeGetStorageHealthRequest {}
    NodeGetStorageHealthResponse {}
    NodeExpandVolumeResponse {}
    NodeGetCapabilitiesRequest {}
    NodeGetCapabilitiesResponse {}
    NodeGetInfoRequest {}
    NodeGetInfoResponse {}
    GetMetadataAllocatedRequest { snapshot_id: snapshot_id }
    GetMetadataDeltaRequest { base_snapshot_id: base_snapshot_id, snapshot_id: target_snapshot_id }
}

describe! { admin:
    GetPoolRequest {}
    GetPoolResponse {}
    GrowPoolRequest {}
    GrowPoolResponse {}
    GetVolumeRequest { volume_id: volume_id }
    GetVolumeResponse {}
    ListInlineVolumesRequest {}
    ListInlineVolumesResponse {}
    ListBasesRequest { volume_id: volume_id, snapshot_id: target_snapshot_id }
    ListBasesResponse {}
    SetBaseRetentionRequest { snapshot_id: snapshot_id }
    SetBaseRetentionResponse {}
}

// Only the path: options must not be logged.
describe! { crust:
    RuntimeStageVolumeRequest { path: volume_target_path }
    RuntimeStageVolumeResponse {}
    RuntimeUnstageVolumeRequest { path: volume_target_path }
    RuntimeUnstageVolumeResponse {}
    RuntimeGetVolumeStatsRequest { path: volume_target_path }
    RuntimeGetVolumeStatsResponse {}
    RuntimeExpandVolumeRequest { path: volume_target_path }
    RuntimeExpandVolumeResponse {}
}

macro_rules! describe_deferrable {
    ($($message:ident: $path:ident,)*) => {$(
        impl Describe for csi::$message {
            fn describe(&self, subject: &mut Subject) {
                subject.volume_id = note(&self.volume_id);
                subject.path = note(&self.$path);
                subject.deferred = self.defer_fs_ops;
            }
        }
    )*};
}

describe_deferrable! {
    NodePublishVolumeRequest: target_path,
    NodeUnpublishVolumeRequest: target_path,
    NodeGetVolumeStatsRequest: volume_path,
    NodeExpandVolumeRequest: volume_path,
}

impl Describe for session::GetAllocatedRequest {
    fn describe(&self, subject: &mut Subject) {
        subject.session = note_session(&self.session_token);
        subject.volume_id = note(&self.volume_id);
        subject.snapshot_id = note(&self.snapshot);
    }
}

impl Describe for session::GetDeltaRequest {
    fn describe(&self, subject: &mut Subject) {
        subject.session = note_session(&self.session_token);
        subject.volume_id = note(&self.volume_id);
        subject.snapshot_id = note(&self.target_snapshot);
        subject.base_snapshot_id = note(&self.base_snapshot);
    }
}

impl Describe for csi::CreateVolumeResponse {
    fn describe(&self, subject: &mut Subject) {
        subject.volume_id = self.volume.as_ref().and_then(|volume| note(&volume.volume_id));
    }
}

impl Describe for csi::CreateSnapshotResponse {
    fn describe(&self, subject: &mut Subject) {
        subject.snapshot_id =
            self.snapshot.as_ref().and_then(|snapshot| note(&snapshot.snapshot_id));
    }
}

impl Describe for csi::CreateVolumeGroupSnapshotRequest {
    fn describe(&self, subject: &mut Subject) {
        subject.name = note(&self.name);
        subject.volume_id = note(&self.source_volume_ids.join(","));
    }
}

impl Describe for csi::CreateVolumeGroupSnapshotResponse {
    fn describe(&self, subject: &mut Subject) {
        let group = self.group_snapshot.as_ref();
        subject.group_snapshot_id = group.and_then(|group| note(&group.group_snapshot_id));
    }
}
