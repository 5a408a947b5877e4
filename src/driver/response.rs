//! Conversion of the backend's values to CSI messages.

use std::collections::HashMap;

use prost_types::Timestamp;

use super::Plugin;
use super::request::SECTOR_SIZE;
use super::topology::NodeTopology;
use csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
use csi::volume_usage::Unit;
use grpc::proto::csi::v1 as csi;
use storage::{Condition, GroupSnapshot, Snapshot, Source, Usage, Volume};

/// Bytes as the wire's int64. Volume sizes end at 64 TiB; a larger number saturates instead of
/// becoming negative.
pub fn bytes(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub fn volume(volume: &Volume, topology: &NodeTopology) -> csi::Volume {
    csi::Volume {
        capacity_bytes: bytes(volume.capacity_bytes),
        volume_id: volume.id.clone(),
        volume_context: context(volume),
        content_source: volume.source.as_ref().map(content_source),
        accessible_topology: vec![topology.to_csi()],
    }
}

/// What PersistentVolumes show of a volume.
fn context(volume: &Volume) -> HashMap<String, String> {
    let sector = Some(volume.sector_size).filter(|size| !size.is_default());
    sector.map(|size| (SECTOR_SIZE.to_owned(), size.bytes().to_string())).into_iter().collect()
}

fn content_source(source: &Source) -> csi::VolumeContentSource {
    let kind = match source {
        Source::Snapshot(id) => Type::Snapshot(SnapshotSource { snapshot_id: id.clone() }),
        Source::Volume(id) => Type::Volume(VolumeSource { volume_id: id.clone() }),
    };
    csi::VolumeContentSource { r#type: Some(kind) }
}

pub fn condition(condition: Condition) -> csi::VolumeCondition {
    csi::VolumeCondition { abnormal: condition.is_abnormal(), message: condition.message }
}

/// A snapshot is ready when it is created, because its copy is complete; an injected fault may
/// delay this. Volumes made from it have its topology.
pub fn snapshot(snapshot: &Snapshot, plugin: &Plugin) -> csi::Snapshot {
    csi::Snapshot {
        size_bytes: bytes(snapshot.capacity_bytes),
        snapshot_id: snapshot.id.clone(),
        source_volume_id: snapshot.volume_id.clone(),
        creation_time: Some(timestamp(snapshot.created_at)),
        ready_to_use: plugin.faults.ready(snapshot),
        group_snapshot_id: snapshot.group_id.clone().unwrap_or_default(),
        accessible_topology: vec![plugin.topology.to_csi()],
    }
}

/// A group is ready when all its snapshots are.
pub fn group(group: &GroupSnapshot, plugin: &Plugin) -> csi::VolumeGroupSnapshot {
    let snapshots: Vec<_> = group.snapshots.iter().map(|member| snapshot(member, plugin)).collect();
    csi::VolumeGroupSnapshot {
        group_snapshot_id: group.group.id.clone(),
        ready_to_use: snapshots.iter().all(|snapshot| snapshot.ready_to_use),
        snapshots,
        creation_time: Some(timestamp(group.group.created_at)),
    }
}

pub fn timestamp((seconds, nanoseconds): (u64, u32)) -> Timestamp {
    // Fewer than 10^9 nanoseconds always fit.
    Timestamp { seconds: bytes(seconds), nanos: i32::try_from(nanoseconds).unwrap_or_default() }
}

pub fn usage(usage: Usage) -> Vec<csi::VolumeUsage> {
    let entry = |unit: Unit, total, used, available| csi::VolumeUsage {
        unit: unit.into(),
        total: bytes(total),
        used: bytes(used),
        available: bytes(available),
    };
    match usage {
        Usage::Block { total_bytes } => vec![entry(Unit::Bytes, total_bytes, 0, 0)],
        Usage::Mount {
            total_bytes,
            used_bytes,
            available_bytes,
            total_inodes,
            used_inodes,
            free_inodes,
        } => vec![
            entry(Unit::Bytes, total_bytes, used_bytes, available_bytes),
            entry(Unit::Inodes, total_inodes, used_inodes, free_inodes),
        ],
    }
}
