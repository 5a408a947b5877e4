//! `volume stats` and `volume inline stats`: usage and health of a volume in use.

use std::path::Path;

use anyhow::Result;
use serde::Serialize;

use super::connection::{Connection, refused};
use super::volume::absolute;
use super::{Output, format};
use grpc::proto::csi::v1 as csi;

/// Prints usage and health of a volume in use at `path`.
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
    let response = connection.node().node_get_volume_stats(request).await.map_err(refused)?;
    format::print_one(output, &Stats::new(volume_id, response.into_inner()), facts)
}

#[derive(Debug, Serialize)]
struct Stats {
    id: String,
    total_bytes: Option<i64>,
    /// `None` where the driver does not know, as of a raw block volume.
    used_bytes: Option<i64>,
    available_bytes: Option<i64>,
    raw_block: bool,
    abnormal: bool,
    message: String,
}

impl Stats {
    fn new(id: String, response: csi::NodeGetVolumeStatsResponse) -> Self {
        let csi::NodeGetVolumeStatsResponse { usage, volume_condition } = response;
        let condition = volume_condition.unwrap_or_default();
        // A raw block volume has a size, no inodes, and zeros in the place of what the driver
        // cannot know.
        let raw_block = matches!(usage.as_slice(), [one] if one.used == 0 && one.available == 0);
        // Bytes come before inodes.
        let bytes = usage.first();
        let of_filesystem = bytes.filter(|_| !raw_block);
        Self {
            id,
            total_bytes: bytes.map(|bytes| bytes.total),
            used_bytes: of_filesystem.map(|bytes| bytes.used),
            available_bytes: of_filesystem.map(|bytes| bytes.available),
            raw_block,
            abnormal: condition.abnormal,
            message: condition.message,
        }
    }
}

fn facts(stats: &Stats) -> String {
    let unknown = if stats.raw_block { "unknown: raw block volume" } else { "unknown" };
    let shown = |bytes: Option<i64>| match bytes {
        Some(bytes) => format::bytes(u64::try_from(bytes).unwrap_or_default()),
        None => unknown.to_owned(),
    };
    format::facts(&[
        ("volume", stats.id.clone()),
        ("total", shown(stats.total_bytes)),
        ("used", shown(stats.used_bytes)),
        ("available", shown(stats.available_bytes)),
        ("condition", stats.message.clone()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(total: i64, used: i64, available: i64) -> csi::VolumeUsage {
        csi::VolumeUsage { total, used, available, unit: 1 }
    }

    #[test]
    fn the_usage_of_a_raw_block_volume_is_unknown_not_zero() {
        let of = |usage: Vec<csi::VolumeUsage>| {
            let response = csi::NodeGetVolumeStatsResponse { usage, volume_condition: None };
            Stats::new("v".to_owned(), response)
        };
        let raw = of(vec![usage(8192, 0, 0)]);
        let counted = (raw.total_bytes, raw.used_bytes, raw.available_bytes);
        assert_eq!(counted, (Some(8192), None, None));
        assert!(facts(&raw).contains("used       unknown: raw block volume"), "{}", facts(&raw));
        let filesystem = of(vec![usage(8192, 0, 8192), usage(10, 1, 9)]);
        assert_eq!((filesystem.raw_block, filesystem.used_bytes), (false, Some(0)));
    }
}
