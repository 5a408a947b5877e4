//! Calls for persistent volumes do not know inline volumes.

use std::fs;

use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use super::internal_id;
use support::MIB;
use support::driver::*;
use support::inline::{is_mounted, pod_volume};

#[test]
fn calls_for_persistent_volumes_ignore_inline_volumes() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid-1", "scratch");
        driver.ok(volume.publishing(&[("size", "32Mi")]));
        fs::write(volume.file("mine"), "x").unwrap();
        let persistent = driver.volume("data", 32 * MIB, mounted(""));
        driver.stage(&persistent, &mounted(""));
        let internal = internal_id(&volume.target);
        for id in [volume.handle.as_str(), internal.as_str()] {
            let validate = csi::ValidateVolumeCapabilitiesRequest {
                volume_id: id.to_owned(),
                volume_capabilities: vec![mounted("")],
                ..Default::default()
            };
            driver.refused(get_volume(id), Code::NotFound, id);
            driver.refused(validate, Code::NotFound, id);
            driver.refused(expand(id, 64 * MIB), Code::NotFound, id);
            driver.refused(modify(id, &[("changeTracking", "false")]), Code::NotFound, id);
            driver.refused(create_snapshot("s", id), Code::NotFound, id);
            driver.refused(create_group_snapshot("g", &[&persistent, id]), Code::NotFound, id);
            driver.refused(from_source("c", Source::Volume(id), 0), Code::NotFound, id);
            driver.refused(from_source("c", Source::Snapshot(id), 0), Code::NotFound, id);
            driver.refused(driver.staging_of(id, &mounted("")), Code::NotFound, id);
            let published = driver.publishing(id, &driver.target(id), &mounted(""));
            driver.refused(published, Code::NotFound, id);
            driver.refused(allocated(id), Code::NotFound, id);
            driver.ok(delete_volume(id));
            driver.ok(delete_snapshot(id));
            driver.ok(unstaging(id, volume.target.to_str().unwrap()));
            let of_volume =
                csi::ListSnapshotsRequest { source_volume_id: id.to_owned(), ..Default::default() };
            assert!(snapshots_where(driver, of_volume).is_empty());
            let elsewhere = expand_on_node(id, &driver.staging(&persistent));
            assert!(driver.call(elsewhere).is_err());
            assert!(is_mounted(&volume.target));
        }
        // The internal id is not accepted by calls that know inline volumes either.
        let at = volume.target.to_str().unwrap();
        driver.refused(stats(&internal, at), Code::NotFound, &internal);
        driver.ok(unpublishing(&internal, at));
        driver.refused(expand_on_node(&internal, &volume.target), Code::NotFound, &internal);
        assert_eq!(volume_ids(driver), [persistent.as_str()]);
        assert!(all_snapshots(driver).is_empty());
        assert_eq!(fs::read_to_string(volume.file("mine")).unwrap(), "x");
        driver.unstage(&persistent);
        driver.unpublish(&volume.handle, &volume.target);
    });
}

#[test]
fn inline_calls_do_not_affect_persistent_volumes() {
    with_driver(|driver| {
        let persistent = driver.volume("data", 32 * MIB, mounted(""));
        let target = driver.publish(&persistent, &mounted(""));
        fs::write(target.join("mine"), "x").unwrap();
        let volume = pod_volume(driver, "uid-1", "scratch");
        let as_inline = csi::NodePublishVolumeRequest {
            volume_id: persistent.clone(),
            ..volume.publishing(&[])
        };
        driver.refused(as_inline, Code::InvalidArgument, "volume_id");
        // Its target is occupied.
        let over = csi::NodePublishVolumeRequest {
            target_path: target.display().to_string(),
            ..volume.publishing(&[])
        };
        driver.refused(over, Code::FailedPrecondition, "target_path");
        driver.ok(unpublishing(&volume.handle, target.to_str().unwrap()));
        assert_eq!(fs::read_to_string(target.join("mine")).unwrap(), "x");
        driver.take_down(&persistent);
    });
}
