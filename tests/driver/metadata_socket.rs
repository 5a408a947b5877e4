//! What limits a compromised client of the driver: the socket of `--metadata-endpoint` serves no
//! call that changes or mounts a volume, and `--target-root` confines mounts.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::admin::v1::pool_admin_client::PoolAdminClient;
use csi_loopback::proto::admin::v1::set_base_retention_request::Retention;
use csi_loopback::proto::admin::v1::{GrowPoolRequest, SetBaseRetentionRequest};
use csi_loopback::proto::csi::v1 as csi;
use support::driver::*;
use support::requests::{Rpc, session_allocated};
use support::{BLOCK, MIB, have_root, path, pattern, write_direct};
use tonic::Code;

#[test]
fn the_metadata_socket_serves_no_call_that_changes_a_volume() {
    with_driver(|driver| {
        let socket = driver.scratch().join("metadata.sock");
        driver.restart_with(&[
            "--metadata-endpoint",
            path(&socket),
            "--metadata-socket-group",
            "65533",
            "--socket-mode",
            "0660",
        ]);
        let found = std::fs::metadata(&socket).unwrap();
        assert_eq!((found.gid(), found.permissions().mode() & 0o777), (65_533, 0o660));
        let volume = driver.volume("v", MIB, block());
        driver.with_device(&volume, |device| write_direct(device, 0, &pattern(1, BLOCK as usize)));
        let snapshot = driver.snapshot("s", &volume);
        let channel = driver.channel_to(socket.clone());
        driver.block_on(async {
            // What the sidecar calls.
            csi::ProbeRequest {}.send(channel.clone()).await.unwrap();
            csi::GetPluginInfoRequest {}.send(channel.clone()).await.unwrap();
            csi::ControllerGetCapabilitiesRequest {}.send(channel.clone()).await.unwrap();
            let blocks = allocated(&snapshot).send(channel.clone()).await.unwrap();
            assert!(!blocks.messages.is_empty());
            session_allocated(&snapshot).send(channel.clone()).await.unwrap();
            // What it does not.
            let refused = [
                csi::DeleteSnapshotRequest { snapshot_id: snapshot.clone(), ..Default::default() }
                    .send(channel.clone())
                    .await
                    .unwrap_err(),
                csi::DeleteVolumeRequest { volume_id: volume.clone(), ..Default::default() }
                    .send(channel.clone())
                    .await
                    .unwrap_err(),
                csi::CreateVolumeRequest::default().send(channel.clone()).await.unwrap_err(),
                csi::ListVolumesRequest::default().send(channel.clone()).await.unwrap_err(),
                csi::NodeStageVolumeRequest::default().send(channel.clone()).await.unwrap_err(),
                csi::NodePublishVolumeRequest::default().send(channel.clone()).await.unwrap_err(),
                csi::NodeGetInfoRequest {}.send(channel.clone()).await.unwrap_err(),
                csi::CreateVolumeGroupSnapshotRequest::default()
                    .send(channel.clone())
                    .await
                    .unwrap_err(),
                PoolAdminClient::new(channel.clone())
                    .grow_pool(GrowPoolRequest::default())
                    .await
                    .unwrap_err(),
                // It would end the deltas from all deleted snapshots.
                SetBaseRetentionRequest {
                    snapshot_id: snapshot.clone(),
                    retention: Some(Retention::ForSeconds(0)),
                }
                .send(channel.clone())
                .await
                .unwrap_err(),
            ];
            for status in refused {
                assert_eq!(status.code(), Code::Unimplemented, "{status:?}");
            }
        });
        assert_eq!(driver.ok(csi::ListSnapshotsRequest::default()).entries.len(), 1);
        assert_eq!(driver.stop().code(), Some(0));
        assert!(!socket.exists());
    });
}

#[test]
fn a_target_outside_the_root_is_not_removed() {
    if !have_root() {
        return;
    }
    let outside = tempfile::tempdir().unwrap();
    let root = tempfile::tempdir().unwrap();
    let driver = Driver::with(PoolKind::Copy, &["--target-root", path(root.path())]);
    let volume = driver.volume("v", 4 * MIB, block());
    symlink(outside.path(), root.path().join("link")).unwrap();
    let (file, directory) = (outside.path().join("file"), outside.path().join("directory"));
    std::fs::write(&file, "").unwrap();
    std::fs::create_dir(&directory).unwrap();
    for target in [&file, &directory, &root.path().join("link/file"), &root.path().join("link")] {
        driver.ok(support::requests::unpublishing(&volume, path(target)));
        driver.ok(support::requests::unstaging(&volume, path(target)));
        let _ = driver.call(stats(&volume, path(target)));
        let _ = driver.call(expand_on_node(&volume, target));
    }
    assert!(file.exists() && directory.exists() && root.path().join("link").exists());
    let dotted = root.path().join("a/../../file");
    let refused = support::requests::unpublishing(&volume, path(&dotted));
    driver.refused(refused, Code::InvalidArgument, "target_path");
    // What an earlier mount left in the root is removed.
    let left = root.path().join("left");
    std::fs::write(&left, "").unwrap();
    driver.ok(support::requests::unpublishing(&volume, path(&left)));
    assert!(!left.exists());
}

#[test]
fn paths_outside_the_target_root_are_refused() {
    if !have_root() {
        return;
    }
    let outside = tempfile::tempdir().unwrap();
    let root = tempfile::tempdir().unwrap();
    let mut driver = Driver::with(PoolKind::Copy, &["--target-root", path(root.path())]);
    let volume = driver.volume("v", 4 * MIB, block());
    symlink(outside.path(), root.path().join("link")).unwrap();
    let wanted = block();
    let staging = |at: &std::path::Path| csi::NodeStageVolumeRequest {
        volume_id: volume.clone(),
        staging_target_path: path(at).to_owned(),
        volume_capability: Some(wanted.clone()),
        ..Default::default()
    };
    let inside = root.path().join("staging");
    for bad in [outside.path().join("staging"), root.path().join("link/staging")] {
        driver.refused(
            staging(&bad),
            Code::InvalidArgument,
            "staging_target_path: is not a path in",
        );
    }
    driver.ok(staging(&inside));
    let publishing = |at: &std::path::Path| csi::NodePublishVolumeRequest {
        volume_id: volume.clone(),
        staging_target_path: path(&inside).to_owned(),
        target_path: path(at).to_owned(),
        volume_capability: Some(wanted.clone()),
        ..Default::default()
    };
    for bad in [outside.path().join("target"), root.path().join("link/target")] {
        driver.refused(publishing(&bad), Code::InvalidArgument, "target_path: is not a path in");
    }
    let target = root.path().join("target");
    driver.ok(publishing(&target));
    // A volume that was published before the flag was set can still be unpublished.
    driver.restart_with(&["--target-root", path(outside.path())]);
    driver.ok(support::requests::unpublishing(&volume, path(&target)));
    driver.ok(support::requests::unstaging(&volume, path(&inside)));
}
