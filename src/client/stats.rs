//! `volume stats`, of volumes that are kept and of those of pods: how full one is, and whether it is well.

use std::path::Path;

use anyhow::Result;
use serde_json::json;

use super::connection::{Connection, refused};
use super::volume::absolute;
use super::{Output, format};
use crate::proto::csi::v1 as csi;

/// Shows how a volume is that is in use at `path`.
pub async fn stats(
    connection: &Connection,
    volume_id: String,
    path: &Path,
    defer_fs_ops: bool,
    output: Output,
) -> Result<()> {
    let request = csi::NodeGetVolumeStatsRequest {
        volume_id: volume_id.clone(),
        volume_path: absolute(path)?,
        defer_fs_ops,
        ..csi::NodeGetVolumeStatsRequest::default()
    };
    let answer = connection.node().node_get_volume_stats(request).await.map_err(refused)?;
    let csi::NodeGetVolumeStatsResponse { usage, volume_condition } = answer.into_inner();
    let condition = volume_condition.unwrap_or_default();
    // Bytes come before inodes.
    let bytes = usage.into_iter().next();
    let total = bytes.map(|bytes| bytes.total);
    let used = bytes.map(|bytes| bytes.used);
    match output {
        Output::Json => format::print_json(&json!({
            "id": volume_id, "total_bytes": total, "used_bytes": used,
            "available_bytes": bytes.map(|bytes| bytes.available), "abnormal": condition.abnormal, "message": condition.message,
        })),
        Output::Table => {
            let shown = |bytes: Option<i64>| match bytes {
                Some(bytes) => format::bytes(u64::try_from(bytes).unwrap_or_default()),
                None => "unknown".to_owned(),
            };
            let facts = format::facts(&[
                ("volume", volume_id),
                ("total", shown(total)),
                ("used", shown(used)),
                ("condition", condition.message),
            ]);
            Ok(format::print(&facts)?)
        }
    }
}
