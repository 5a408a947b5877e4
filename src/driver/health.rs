//! Health of volumes and of the pool (CSI v1.13). Clients of v1.12 get the same conditions from
//! ListVolumes, ControllerGetVolume and NodeGetVolumeStats.

use std::path::Path;

use super::request::{MAX_ENTRIES, page, token};
use super::{Plugin, request};
use crate::status::Answer;
use csi::node_get_storage_health_response::StorageBackendHealth;
use csi::volume_health::VolumeHealthEntry;
use csi::{StorageHealthErrorType, VolumeHealthErrorType};
use grpc::proto::csi::v1 as csi;
use storage::{Condition, HealthProblem};

/// ControllerGetVolumeHealth.
pub fn get_volume(
    plugin: &Plugin,
    req: csi::ControllerGetVolumeHealthRequest,
) -> Answer<csi::ControllerGetVolumeHealthResponse> {
    let id = request::id("volume_id", &req.volume_id)?;
    // Controller calls exclude inline volumes.
    let volume = plugin.backend.volume(id)?;
    let condition = plugin.backend.volume_condition(&volume.id)?;
    let volume_health = Some(health(volume.id, condition));
    Ok(csi::ControllerGetVolumeHealthResponse { volume_health })
}

/// ControllerListVolumeHealth. Each call checks a whole page of volumes, even if few are abnormal.
pub fn list(
    plugin: &Plugin,
    req: csi::ControllerListVolumeHealthRequest,
) -> Answer<csi::ControllerListVolumeHealthResponse> {
    let max = page(request::max_entries(req.max_entries)?);
    let all = plugin.backend.volumes_with_conditions(token(&req.starting_token), MAX_ENTRIES)?;
    let conditions = all.items.into_iter().map(|(volume, condition)| (volume.id, condition));
    Ok(abnormal_page(conditions, all.next, max))
}

/// The first `max` abnormal volumes. The page token is the last volume that was checked, as in
/// ListVolumes.
fn abnormal_page(
    conditions: impl Iterator<Item = (String, Condition)>,
    next: Option<String>,
    max: usize,
) -> csi::ControllerListVolumeHealthResponse {
    let mut abnormal = conditions.filter(|(_, condition)| condition.is_abnormal());
    let entries: Vec<_> =
        abnormal.by_ref().take(max).map(|(id, condition)| health(id, condition)).collect();
    let next = match (abnormal.next(), entries.last()) {
        (Some(_), Some(last)) => Some(last.volume_id.clone()),
        _ => next,
    };
    csi::ControllerListVolumeHealthResponse { entries, next_token: next.unwrap_or_default() }
}

/// NodeGetVolumeHealth. The condition of a deferred volume includes the container runtime's report.
pub fn node_get_volume(
    plugin: &Plugin,
    req: csi::NodeGetVolumeHealthRequest,
) -> Answer<csi::NodeGetVolumeHealthResponse> {
    let id = request::id("volume_id", &req.volume_id)?;
    let path = match req.volume_publish_path.as_str() {
        "" => Path::new(&req.staging_target_path),
        published => Path::new(published),
    };
    let condition = match plugin.backend.is_deferred(id, path)? {
        true => plugin.backend.stats(id, path)?.condition,
        false => plugin.backend.volume_condition(id)?,
    };
    let volume_health = Some(health(id.to_owned(), condition));
    Ok(csi::NodeGetVolumeHealthResponse { volume_health })
}

/// NodeGetStorageHealth: the pool is the only storage.
pub fn node_get_storage(
    plugin: &Plugin,
    _: csi::NodeGetStorageHealthRequest,
) -> Answer<csi::NodeGetStorageHealthResponse> {
    let Condition { problem, message } = plugin.backend.pool_condition()?;
    let backend = problem.map(|problem| {
        let (status, reason) = status_and_reason(problem);
        StorageBackendHealth {
            status: storage_status(status).into(),
            reason: reason.to_owned(),
            message,
            volume_capability: None,
        }
    });
    Ok(csi::NodeGetStorageHealthResponse { backend_health: backend.into_iter().collect() })
}

fn health(volume_id: String, condition: Condition) -> csi::VolumeHealth {
    let Condition { problem, message } = condition;
    let entry = problem.map(|problem| {
        let (status, reason) = status_and_reason(problem);
        VolumeHealthEntry { status: status.into(), reason: reason.to_owned(), message }
    });
    csi::VolumeHealth { volume_id, health_statuses: entry.into_iter().collect() }
}

/// The status of the pool for the status of its volumes.
fn storage_status(status: VolumeHealthErrorType) -> StorageHealthErrorType {
    match status {
        VolumeHealthErrorType::Degraded => StorageHealthErrorType::StorageDegraded,
        _ => StorageHealthErrorType::StorageUnreachable,
    }
}

/// Severity, and CSI's reason in CamelCase; docs/reference/driver.md has the table.
fn status_and_reason(problem: HealthProblem) -> (VolumeHealthErrorType, &'static str) {
    use VolumeHealthErrorType::{DataLoss, Degraded, Inaccessible};
    match problem {
        HealthProblem::PoolShutDown => (Inaccessible, "PoolShutDown"),
        HealthProblem::PoolNearlyFull => (Degraded, "PoolNearlyFull"),
        HealthProblem::BackingFileMissing => (DataLoss, "BackingFileMissing"),
        HealthProblem::BackingFileShort => (DataLoss, "BackingFileShort"),
        HealthProblem::WritesLost => (DataLoss, "WritesLost"),
        HealthProblem::ForeignLoopDevice => (Degraded, "ForeignLoopDevice"),
        HealthProblem::LoopDeviceMissing => (Inaccessible, "LoopDeviceMissing"),
        HealthProblem::LoopDeviceSize => (Degraded, "LoopDeviceSize"),
        HealthProblem::NotMounted => (Inaccessible, "NotMounted"),
        HealthProblem::NotGrown => (Degraded, "NotGrown"),
        HealthProblem::MountedOnHost => (Degraded, "MountedOnHost"),
        HealthProblem::Runtime => (Degraded, "RuntimeReportsAbnormal"),
        HealthProblem::NotReady => (Inaccessible, "NotReady"),
        HealthProblem::Unknown => (Degraded, "ConditionUnknown"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use common::documented::{row, rows};

    const ALL: [HealthProblem; 14] = [
        HealthProblem::PoolShutDown,
        HealthProblem::PoolNearlyFull,
        HealthProblem::BackingFileMissing,
        HealthProblem::BackingFileShort,
        HealthProblem::WritesLost,
        HealthProblem::ForeignLoopDevice,
        HealthProblem::LoopDeviceMissing,
        HealthProblem::LoopDeviceSize,
        HealthProblem::NotMounted,
        HealthProblem::NotGrown,
        HealthProblem::MountedOnHost,
        HealthProblem::Runtime,
        HealthProblem::NotReady,
        HealthProblem::Unknown,
    ];

    #[test]
    fn the_documented_table_has_each_reason_and_status() {
        let page = include_str!("../../docs/reference/driver.md");
        let (_, page) = page.split_once("**Health.**").unwrap();
        let (table, _) = page.split_once("\n**").unwrap();
        for problem in ALL {
            let (status, reason) = status_and_reason(problem);
            assert_eq!(row(table, reason)[2], status.as_str_name(), "{reason}");
        }
        assert_eq!(rows(table).len(), ALL.len(), "rows for reasons that do not exist");
    }

    #[test]
    fn health_pages_omit_healthy_volumes_and_continue() {
        let listed = |max, next: Option<&str>| {
            let lost = || Condition::abnormal(HealthProblem::WritesLost, "lost");
            let conditions = [
                ("a", Condition::healthy("healthy")),
                ("b", lost()),
                ("c", Condition::healthy("healthy")),
                ("d", lost()),
            ];
            let conditions = conditions.map(|(id, condition)| (id.to_owned(), condition));
            let answer = abnormal_page(conditions.into_iter(), next.map(str::to_owned), max);
            let ids = answer.entries.iter().map(|one| one.volume_id.clone()).collect::<Vec<_>>();
            (ids.join(" "), answer.next_token)
        };
        let of = |ids: &str, token: &str| (ids.to_owned(), token.to_owned());
        assert_eq!(listed(2, None), of("b d", ""));
        assert_eq!(listed(7, Some("d")), of("b d", "d"));
        assert_eq!(listed(1, None), of("b", "b"));
        assert_eq!(listed(1, Some("d")), of("b", "b"));
    }

    #[test]
    fn only_an_abnormal_volume_has_a_health_entry() {
        assert!(health("v".into(), Condition::healthy("healthy")).health_statuses.is_empty());
        let broken =
            health("v".into(), Condition::abnormal(HealthProblem::BackingFileMissing, "gone"));
        let entry = VolumeHealthEntry {
            status: VolumeHealthErrorType::DataLoss.into(),
            reason: "BackingFileMissing".into(),
            message: "gone".into(),
        };
        assert_eq!((broken.volume_id.as_str(), broken.health_statuses), ("v", vec![entry]));
    }
}
