//! `volume show`: a volume with its use on this node.

use anyhow::{Context, Result};
use serde::Serialize;

use super::connection::Connection;
use super::{Output, format, names, node};
use grpc::proto::admin::v1 as admin;

pub async fn run(connection: &Connection, reference: &str, output: Output) -> Result<()> {
    let volume_id = names::volume(connection, reference).await?.volume_id;
    let volume = node::details(connection, &volume_id).await?.with_context(|| {
        "the driver has no VolumeAdmin service, which `volume show` needs; use `volume list` and `volume stats`"
    })?;
    format::print_one(output, &Shown::from(volume), facts)
}

/// A volume as it is printed.
#[derive(Debug, Serialize)]
struct Shown {
    name: String,
    id: String,
    capacity_bytes: u64,
    allocated_bytes: u64,
    used_bytes: Option<u64>,
    /// `block` or `filesystem`.
    access: &'static str,
    filesystem: Option<String>,
    change_tracking: bool,
    sector_size_bytes: Option<u32>,
    source: Option<String>,
    staging_path: Option<String>,
    device: Option<String>,
    published: Vec<Target>,
    abnormal: bool,
    message: String,
}

#[derive(Debug, Serialize)]
struct Target {
    path: String,
    read_only: bool,
    deferred: bool,
}

impl From<admin::Volume> for Shown {
    fn from(volume: admin::Volume) -> Self {
        let set = |text: String| Some(text).filter(|text| !text.is_empty());
        let target = |one: admin::Publication| Target {
            path: one.target_path,
            read_only: one.read_only,
            deferred: one.deferred,
        };
        Self {
            name: volume.name,
            id: volume.volume_id,
            capacity_bytes: volume.capacity_bytes,
            allocated_bytes: volume.allocated_bytes,
            used_bytes: volume.used_bytes,
            access: if volume.raw_block { "block" } else { "filesystem" },
            filesystem: set(volume.fs_type),
            change_tracking: volume.change_tracking,
            sector_size_bytes: Some(volume.sector_size_bytes).filter(|bytes| *bytes > 0),
            source: set(volume.source_snapshot_id).or(set(volume.source_volume_id)),
            staging_path: set(volume.staging_path),
            device: set(volume.device),
            published: volume.publications.into_iter().map(target).collect(),
            abnormal: volume.abnormal,
            message: volume.message,
        }
    }
}

fn facts(volume: &Shown) -> String {
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let access = match &volume.filesystem {
        Some(filesystem) => format!("{}, {filesystem}", volume.access),
        None => format!("{}, no filesystem yet", volume.access),
    };
    let used = match volume.used_bytes {
        Some(bytes) => format::bytes(bytes),
        None => "unknown: the filesystem is not mounted on this host".to_owned(),
    };
    let mut facts = vec![
        ("volume", volume.name.clone()),
        ("id", volume.id.clone()),
        ("capacity", format::bytes(volume.capacity_bytes)),
        ("allocated", format::bytes(volume.allocated_bytes)),
        ("access", if volume.access == "block" { "raw block".to_owned() } else { access }),
        ("tracking", if volume.change_tracking { "on" } else { "off" }.to_owned()),
        ("source", or_dash(&volume.source)),
        ("staged", or_dash(&volume.staging_path)),
        ("device", or_dash(&volume.device)),
        ("condition", volume.message.clone()),
    ];
    if let Some(bytes) = volume.sector_size_bytes {
        facts.insert(5, ("sectors", format!("{bytes} bytes")));
    }
    if volume.access == "filesystem" {
        facts.insert(4, ("used", used));
    }
    for target in &volume.published {
        let read_only = if target.read_only { ", read-only" } else { "" };
        let deferred = if target.deferred { ", mounted by a container runtime" } else { "" };
        facts.push(("published", format!("{}{read_only}{deferred}", target.path)));
    }
    format::facts(&facts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_shown_with_its_paths() {
        let path =
            admin::Publication { target_path: "/t".to_owned(), read_only: true, deferred: false };
        let volume = admin::Volume {
            volume_id: "vol-v-0123456789abcdef".to_owned(),
            name: "v".to_owned(),
            capacity_bytes: 1 << 30,
            allocated_bytes: 1 << 20,
            fs_type: "xfs".to_owned(),
            change_tracking: true,
            source_snapshot_id: "snap-a-0123456789abcdef".to_owned(),
            staging_path: "/s".to_owned(),
            device: "/dev/loop1".to_owned(),
            publications: vec![path],
            used_bytes: Some(4096),
            message: "the volume is healthy".to_owned(),
            ..admin::Volume::default()
        };
        let expected = "\
volume     v
id         vol-v-0123456789abcdef
capacity   1Gi (1,073,741,824 bytes)
allocated  1Mi (1,048,576 bytes)
used       4Ki (4,096 bytes)
access     filesystem, xfs
tracking   on
source     snap-a-0123456789abcdef
staged     /s
device     /dev/loop1
condition  the volume is healthy
published  /t, read-only";
        assert_eq!(facts(&Shown::from(volume)), expected);
    }
}
