//! Volume health of CSI v1.13, compared with the conditions of v1.12.

use std::fs::{self, File};
use std::path::Path;

use csi::VolumeHealthErrorType::{self as Status, DataLoss};
use csi::volume_health::VolumeHealthEntry;
use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use support::driver::*;
use support::{MIB, path};
use tonic::Code;

fn health(driver: &Driver, id: &str) -> Vec<VolumeHealthEntry> {
    let volume_id = id.to_owned();
    let req = csi::ControllerGetVolumeHealthRequest { volume_id, ..Default::default() };
    let health = driver.ok(req).volume_health.unwrap();
    assert_eq!(health.volume_id, id);
    health.health_statuses
}

/// The volumes of each page.
fn pages(driver: &Driver, max_entries: i32) -> Vec<Vec<String>> {
    let (mut pages, mut starting_token) = (Vec::new(), String::new());
    loop {
        let req = csi::ControllerListVolumeHealthRequest {
            max_entries,
            starting_token,
            ..Default::default()
        };
        let answer = driver.ok(req);
        for entry in &answer.entries {
            assert_eq!(entry.health_statuses, health(driver, &entry.volume_id));
        }
        pages.push(answer.entries.into_iter().map(|entry| entry.volume_id).collect());
        starting_token = answer.next_token;
        if starting_token.is_empty() {
            return pages;
        }
    }
}

fn found(entries: &[VolumeHealthEntry]) -> Vec<(Status, &str)> {
    entries.iter().map(|entry| (entry.status(), entry.reason.as_str())).collect()
}

#[test]
fn health_equals_the_condition_and_lists_only_abnormal_volumes() {
    let Some(driver) = driver_with(PoolKind::Copy, &[]) else { return };
    let [gone, short, whole] =
        ["gone", "short", "whole"].map(|name| driver.volume(name, 2 * MIB, block()));
    let device = driver.publish(&short, &block());
    assert_eq!(pages(&driver, 0), [Vec::<String>::new()]);
    fs::remove_file(driver.backing_file(&gone)).unwrap();
    let file = File::options().write(true).open(driver.backing_file(&short)).unwrap();
    file.set_len(MIB).unwrap();
    for (id, reason, words) in [
        (&gone, "BackingFileMissing", "is missing"),
        (&short, "BackingFileShort", "expected 2097152"),
    ] {
        let reported = health(&driver, id);
        assert_eq!(found(&reported), [(DataLoss, reason)]);
        let condition = driver.ok(get_volume(id)).status.unwrap().volume_condition.unwrap();
        assert_eq!((condition.abnormal, &condition.message), (true, &reported[0].message));
        assert!(condition.message.contains(words), "{condition:?}");
        // In use or not, and whatever path the caller passes.
        for at in ["", path(&device), "/nowhere"] {
            assert_eq!(health_on_node(&driver, id, Path::new(at)), reported);
        }
    }
    assert!(health(&driver, &whole).is_empty());
    for entry in driver.ok(csi::ListVolumesRequest::default()).entries {
        let condition = entry.status.unwrap().volume_condition.unwrap();
        let id = entry.volume.unwrap().volume_id;
        assert_eq!(condition.abnormal, id != whole, "{id}: {condition:?}");
    }
    assert!(driver.ok(stats(&short, path(&device))).volume_condition.unwrap().abnormal);
    driver.refused(create_snapshot("s", &gone), Code::DataLoss, "is missing");
    driver.refused(driver.staging_of(&gone, &block()), Code::DataLoss, "is missing");
    let mut abnormal = [gone.clone(), short.clone()];
    abnormal.sort_unstable();
    assert_eq!(pages(&driver, 0), [abnormal.to_vec()]);
    assert_eq!(pages(&driver, 1).concat(), abnormal);
    assert!(pages(&driver, 1).iter().all(|page| page.len() <= 1));
    file.set_len(2 * MIB).unwrap();
    assert!(health(&driver, &short).is_empty());
    driver.take_down(&short);
    driver.ok(delete_volume(&gone));
}

#[test]
fn health_of_unknown_volumes_and_tokens_is_refused() {
    with_driver(|driver| {
        let of = |volume_id: &str| csi::ControllerGetVolumeHealthRequest {
            volume_id: volume_id.to_owned(),
            ..Default::default()
        };
        let on_node = |volume_id: &str| csi::NodeGetVolumeHealthRequest {
            volume_id: volume_id.to_owned(),
            ..Default::default()
        };
        driver.refused(of(NO_VOLUME), Code::NotFound, NO_VOLUME);
        driver.refused(on_node(NO_VOLUME), Code::NotFound, NO_VOLUME);
        let list = |max_entries, token: &str| csi::ControllerListVolumeHealthRequest {
            max_entries,
            starting_token: token.to_owned(),
            ..Default::default()
        };
        driver.refused(list(-1, ""), Code::InvalidArgument, "max_entries");
        driver.refused(list(0, "no token"), Code::Aborted, "");
        assert!(driver.ok(csi::NodeGetStorageHealthRequest::default()).backend_health.is_empty());
    });
}
