//! The content of the driver's log, and values that must never be logged.

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use support::driver::*;
use support::{BLOCK, MIB, path, pattern, write_direct};
use tonic::Code;

use csi::volume_capability::access_mode::Mode;

/// A part of every value in which a client may keep a secret.
const SECRET: &str = "1481516234";

fn secrets() -> std::collections::HashMap<String, String> {
    map(&[("password", SECRET), ("csi.storage.k8s.io/serviceAccount.tokens", SECRET)])
}

/// Every RPC with secrets or possibly secret values, once valid (with an error in another field)
/// and once invalid.
fn calls_with_secrets(driver: &Driver, volume: &str, snapshot: &str, group: &str) {
    macro_rules! send {
        ($request:expr, $($field:ident: $value:expr),*) => {{
            let mut request = $request;
            $(request.$field.clone_from($value);)*
            let _ = driver.call(request);
        }};
    }
    let secret = &secrets();
    let kubernetes = map(&[("csi.storage.k8s.io/pvc/name", SECRET)]);
    let bad = map(&[("changeTracking", SECRET), ("csi.storage.k8s.io/pvc/name", SECRET)]);
    let unknown = map(&[("colour", SECRET)]);
    let flagged = with_flags("", Mode::SingleNodeWriter, &[SECRET]);
    let (all, one) = (&vec![flagged.clone()], &Some(flagged));
    for values in [&kubernetes, &bad, &unknown] {
        for name in ["secretive", ""] {
            let new = create(name, MIB, block());
            send!(new, secrets: secret, parameters: values, mutable_parameters: values);
            send!(create_snapshot(name, volume), secrets: secret, parameters: values);
            send!(create_group_snapshot(name, &[volume]), secrets: secret, parameters: values);
        }
        for id in [volume, NO_VOLUME, ""].map(str::to_owned) {
            send!(modify(&id, &[]), secrets: secret, mutable_parameters: values);
            let validate = csi::ValidateVolumeCapabilitiesRequest {
                volume_id: id,
                parameters: values.clone(),
                mutable_parameters: values.clone(),
                volume_context: values.clone(),
                ..Default::default()
            };
            send!(validate, secrets: secret, volume_capabilities: all);
        }
        let capacity = csi::GetCapacityRequest::default();
        send!(capacity, parameters: values, volume_capabilities: all);
    }
    for id in [volume, NO_VOLUME, ""] {
        send!(expand(id, 2 * MIB), secrets: secret, volume_capability: one);
        let expand = expand_on_node(id, &driver.staging(volume));
        send!(expand, secrets: secret, volume_capability: one);
    }
    for id in [snapshot, NO_SNAPSHOT, ""].map(str::to_owned) {
        send!(csi::GetSnapshotRequest::default(), snapshot_id: &id, secrets: secret);
        send!(csi::ListSnapshotsRequest::default(), snapshot_id: &id, secrets: secret);
        send!(allocated(&id), secrets: secret);
        send!(delta(&id, snapshot), secrets: secret);
    }
    for id in [group, "group-none-0123456789abcdef", ""].map(str::to_owned) {
        let get = csi::GetVolumeGroupSnapshotRequest::default();
        send!(get, group_snapshot_id: &id, secrets: secret);
    }
    for id in [NO_VOLUME, ""].map(str::to_owned) {
        send!(delete_volume(&id), secrets: secret);
        send!(delete_snapshot(&id), secrets: secret);
        let delete = csi::DeleteVolumeGroupSnapshotRequest::default();
        send!(delete, group_snapshot_id: &id, secrets: secret);
        let publish = csi::ControllerPublishVolumeRequest::default();
        send!(publish, volume_id: &id, secrets: secret, volume_context: &unknown);
        let unpublish = csi::ControllerUnpublishVolumeRequest::default();
        send!(unpublish, volume_id: &id, secrets: secret);
    }
}

#[test]
fn secrets_mount_flags_and_parameters_are_never_logged() {
    for format in ["text", "json"] {
        let flags = ["--log-level", "trace", "--log-format", format];
        let Some(driver) = driver_with(PoolKind::Copy, &flags) else { return };
        let raw = driver.volume("raw", MIB, block());
        let snapshot = driver.snapshot("s", &raw);
        let group = driver.ok(create_group_snapshot("g", &[&raw])).group_snapshot.unwrap();
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        let secret = secrets();
        let context = map(&[("csi.storage.k8s.io/pod.name", SECRET)]);
        // A valid flag with a free value, and flags that no filesystem knows.
        let works = format!("init_itable={SECRET}");
        for flags in [&[SECRET][..], &["bind", SECRET], &[&works]] {
            let wanted = with_flags("", Mode::SingleNodeMultiWriter, flags);
            for values in [&context, &map(&[("colour", SECRET)])] {
                let _ = driver.call(csi::NodeStageVolumeRequest {
                    secrets: secret.clone(),
                    volume_context: values.clone(),
                    publish_context: values.clone(),
                    ..driver.staging_of(&volume, &wanted)
                });
                let _ = driver.call(csi::NodePublishVolumeRequest {
                    secrets: secret.clone(),
                    volume_context: values.clone(),
                    publish_context: values.clone(),
                    ..driver.publishing(&volume, &driver.target(&volume), &wanted)
                });
            }
        }
        assert!(mounts_at(&driver.target(&volume)).len() == 1, "some of that succeeds");
        calls_with_secrets(&driver, &volume, &snapshot, &group.group_snapshot_id);
        driver.take_down(&volume);
        let log = driver.log();
        let said: Vec<_> = log.lines().filter(|line| line.contains(SECRET)).collect();
        assert!(said.is_empty(), "{said:#?}");
        // The log contains these calls, at the highest level.
        for word in ["TRACE", "NodeStageVolume", "GetMetadataDelta", "OK", "INVALID_ARGUMENT"] {
            assert!(log.contains(word), "{word}");
        }
    }
}

#[test]
fn an_error_never_repeats_a_value_that_may_be_secret() {
    with_driver(|driver| {
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        for flags in [&[SECRET][..], &[SECRET, "\0"]] {
            let wanted = with_flags("", Mode::SingleNodeWriter, flags);
            let status = driver.call(driver.staging_of(&volume, &wanted)).unwrap_err();
            assert!(!format!("{status:?}").contains(SECRET), "{status:?}");
            assert!(status.message().contains("mount_flags"), "{status:?}");
        }
        for key in ["colour", "changeTracking"] {
            let status = driver.call(modify(&volume, &[(key, SECRET)])).unwrap_err();
            assert!(!format!("{status:?}").contains(SECRET), "{status:?}");
            assert!(status.message().contains(key), "{status:?}");
        }
    });
}

#[test]
fn each_call_is_one_json_line_with_ids_duration_and_code() {
    let Some(driver) = driver_with(PoolKind::Copy, &["--log-format", "json"]) else { return };
    let volume = driver.volume("v", MIB, block());
    driver.with_device(&volume, |device| write_direct(device, 0, &pattern(1, BLOCK as usize)));
    let a = driver.snapshot("a", &volume);
    let b = driver.snapshot("b", &volume);
    driver.ok(delta(&a, &b));
    driver.ok(allocated(&a));
    driver.refused(get_volume("no-such-volume"), Code::NotFound, "no-such-volume");
    driver.refused(create("", MIB, block()), Code::InvalidArgument, "name");
    let lines: Vec<serde_json::Value> =
        driver.log().lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let calls: Vec<_> = lines.iter().filter(|line| line["rpc"].is_string()).collect();
    for call in &calls {
        assert!(call["duration_ms"].as_f64().is_some_and(|ms| ms >= 0.0), "{call}");
        assert!(call["code"].is_string() && call["timestamp"].is_string(), "{call}");
        assert!(call["timestamp"].as_str().unwrap().ends_with('Z'), "UTC: {call}");
    }
    let has = |fields: &[(&str, &str)]| {
        let found = calls
            .iter()
            .filter(|call| fields.iter().all(|(key, value)| call[*key].as_str() == Some(value)));
        assert_eq!(found.count(), 1, "{fields:?} in {calls:#?}");
    };
    let (staging, target) = (driver.staging(&volume), driver.target(&volume));
    has(&[("rpc", "CreateVolume"), ("name", "v"), ("volume_id", &volume), ("code", "OK")]);
    has(&[("rpc", "NodeStageVolume"), ("volume_id", &volume), ("path", path(&staging))]);
    has(&[("rpc", "NodePublishVolume"), ("volume_id", &volume), ("path", path(&target))]);
    has(&[("rpc", "CreateSnapshot"), ("volume_id", &volume), ("snapshot_id", &a)]);
    has(&[("rpc", "GetMetadataDelta"), ("base_snapshot_id", &a), ("snapshot_id", &b)]);
    has(&[("rpc", "GetMetadataAllocated"), ("snapshot_id", &a), ("code", "OK")]);
    has(&[("rpc", "ControllerGetVolume"), ("volume_id", "no-such-volume"), ("code", "NOT_FOUND")]);
    has(&[("rpc", "CreateVolume"), ("code", "INVALID_ARGUMENT")]);
    let stream = calls.iter().find(|call| call["rpc"] == "GetMetadataAllocated").unwrap();
    assert_eq!((stream["messages"].as_u64(), stream["extents"].as_u64()), (Some(1), Some(1)));
}
