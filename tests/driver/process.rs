//! The driver as a process: its socket, log and endpoints, and volumes across start, stop and kill.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::Duration;

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use nix::sys::signal::Signal;
use support::driver::*;
use support::http::{HTTP, fetch, http_address};
use support::{BLOCK, MIB, have_root, path, pattern, read_all, write_direct};
use tonic::{Code, Request};

/// All values of a label in the metrics.
fn label_values(metrics: &str, label: &str) -> BTreeSet<String> {
    let start = format!("{label}=\"");
    let values = metrics.lines().filter_map(|line| line.split_once(&start)?.1.split_once('"'));
    values.map(|(value, _)| value.to_owned()).collect()
}

#[test]
fn a_driver_advertises_exactly_what_it_serves() {
    with_driver(|driver| {
        use csi::controller_service_capability::rpc::Type as C;
        use csi::node_service_capability::rpc::Type as N;
        use csi::plugin_capability::{Type as Plugin, service::Type as S};
        let info = driver.ok(csi::GetPluginInfoRequest {});
        assert_eq!(info.name, "loopback.csi.local");
        assert_eq!(info.vendor_version, env!("CARGO_PKG_VERSION"));
        assert_eq!(driver.ok(csi::ProbeRequest {}).ready, Some(true));

        let node = driver.ok(csi::NodeGetInfoRequest {});
        assert_eq!(node.node_id, "node-1");
        let segments = node.accessible_topology.unwrap().segments;
        assert_eq!(segments, map(&[("topology.loopback.csi.local/node", "node-1")]));

        let plugin = driver.ok(csi::GetPluginCapabilitiesRequest {}).capabilities;
        let services: Vec<_> = plugin
            .iter()
            .map(|one| match one.r#type.as_ref().unwrap() {
                Plugin::Service(service) => service.r#type(),
                Plugin::VolumeExpansion(expansion) => {
                    use csi::plugin_capability::volume_expansion::Type::Online;
                    assert_eq!(expansion.r#type(), Online);
                    S::Unknown
                }
            })
            .collect();
        let expected = [
            S::ControllerService,
            S::VolumeAccessibilityConstraints,
            S::GroupControllerService,
            S::SnapshotMetadataService,
            S::SnapshotAccessibilityConstraints,
            S::Unknown,
        ];
        assert_eq!(services, expected);

        let expected = [
            C::CreateDeleteVolume,
            C::ListVolumes,
            C::GetCapacity,
            C::CreateDeleteSnapshot,
            C::ListSnapshots,
            C::GetSnapshot,
            C::CloneVolume,
            C::ExpandVolume,
            C::GetVolume,
            C::VolumeCondition,
            C::GetVolumeHealth,
            C::ListVolumeHealth,
            C::SingleNodeMultiWriter,
            C::ModifyVolume,
        ]
        .map(i32::from);
        assert_eq!(BTreeSet::from_iter(controller_capabilities(driver)), BTreeSet::from(expected));
        let publish = csi::ControllerPublishVolumeRequest::default();
        driver.refused(publish, Code::Unimplemented, "ControllerPublishVolume");
        let unpublish = csi::ControllerUnpublishVolumeRequest::default();
        driver.refused(unpublish, Code::Unimplemented, "ControllerUnpublishVolume");

        let expected = [
            N::StageUnstageVolume,
            N::GetVolumeStats,
            N::ExpandVolume,
            N::VolumeCondition,
            N::GetVolumeHealth,
            N::GetStorageHealth,
            N::SingleNodeMultiWriter,
            N::VolumeMountGroup,
        ]
        .map(i32::from);
        assert_eq!(BTreeSet::from_iter(node_capabilities(driver)), BTreeSet::from(expected));
        let group = driver.ok(csi::GroupControllerGetCapabilitiesRequest {}).capabilities;
        assert_eq!(group.len(), 1);
    });
}

#[test]
fn a_second_driver_on_the_same_directory_is_refused() {
    with_driver(|driver| {
        let other_socket = driver.scratch().join("other.sock");
        let output = driver.run_another(&["--endpoint", path(&other_socket)]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("in use"), "{said}");
        assert!(!said.contains("panic"), "{said}");
        assert!(!other_socket.exists());
        driver.ok(csi::ProbeRequest {});
        driver.volume("v", MIB, block());
    });
}

#[test]
fn a_failed_start_creates_no_pool() {
    with_driver(|driver| {
        let data = driver.scratch().join("other-data");
        let file = driver.scratch().join("file");
        fs::write(&file, "precious").unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let taken = port.local_addr().unwrap().to_string();
        let socket = driver.scratch().join("other.sock");
        let (below_a_file, answering) = (file.join("csi.sock"), driver.socket());
        let flags: [(&[&str], &str); 6] = [
            (&["--endpoint", path(&socket), "--http-endpoint", &taken], "--http-endpoint"),
            (&["--endpoint", path(&below_a_file)], "failed to create the directory"),
            (&["--endpoint", path(&file)], "is not a socket"),
            (&["--endpoint", path(&answering)], "in use"),
            (&["--endpoint", path(&socket), "--socket-group", "no such group"], "--socket-group"),
            (&["--log-level", "foo"], "\"foo\""),
        ];
        for (flags, words) in flags {
            let output = driver.run_another(&[flags, &["--data-dir", path(&data)]].concat());
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && said.contains(words), "{flags:?}: {said}");
            assert!(!data.exists(), "{flags:?}");
            assert!(!socket.exists(), "{flags:?}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
        driver.ok(csi::ProbeRequest {});
    });
}

#[test]
fn the_socket_is_private_unless_flags_open_it() {
    with_driver(|driver| {
        let found = fs::metadata(driver.socket()).unwrap();
        assert_eq!(found.permissions().mode() & 0o7777, 0o600);
        driver.restart_with(&["--socket-mode", "0660", "--socket-group", "4242"]);
        let found = fs::metadata(driver.socket()).unwrap();
        assert_eq!((found.permissions().mode() & 0o7777, found.gid()), (0o660, 4242));
        // Only root can read the data of volumes, whatever the mode of the socket.
        let mode = fs::metadata(driver.data_dir()).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{mode:o}");
    });
}

#[test]
fn sigterm_exits_with_0_and_keeps_volumes_attached() {
    for_each_driver(|driver| {
        let (fs_volume, raw_volume) =
            (driver.volume("f", 32 * MIB, mounted("")), driver.volume("r", MIB, block()));
        let target = driver.publish(&fs_volume, &mounted(""));
        let device = driver.publish(&raw_volume, &block());
        assert_eq!(driver.stop().code(), Some(0));
        assert!(!driver.socket().exists());
        fs::write(target.join("file"), pattern(1, 100_000)).unwrap();
        write_direct(&device, 0, &pattern(2, BLOCK as usize));
        driver.start_again();
        assert_eq!(fs::read(target.join("file")).unwrap(), pattern(1, 100_000));
        // The next driver knows the volumes: they remain usable and can be removed.
        driver.ok(driver.staging_of(&fs_volume, &mounted("")));
        driver.ok(driver.publishing(&fs_volume, &target, &mounted("")));
        assert_eq!(mounts_at(&target).len(), 1);
        let raw = driver.snapshot("r", &raw_volume);
        assert_eq!(driver.ok(allocated(&raw)).extents(), [(0, BLOCK)]);
        driver.refused(delete_volume(&fs_volume), Code::FailedPrecondition, "unpublish");
        for volume in [&fs_volume, &raw_volume] {
            driver.take_down(volume);
            driver.ok(delete_volume(volume));
        }
        assert!(!target.exists() && !device.exists());
    });
}

#[test]
fn a_running_call_completes_after_sigterm() {
    with_driver(|driver| {
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        let staging = driver.stage(&volume, &mounted(""));
        let frozen = Freeze::new(&staging);
        let target = driver.target(&volume);
        std::thread::scope(|scope| {
            // It waits for the frozen filesystem to give the tree to the group.
            let request = driver.publishing(&volume, &target, &in_group("4242"));
            let slow = scope.spawn(|| driver.call_patiently(request));
            wait_for("the slow call runs", || {
                let req = driver.call(driver.staging_of(&volume, &mounted("")));
                req.is_err_and(|status| status.code() == Code::Aborted)
            });
            driver.signal(Signal::SIGTERM);
            wait_for("the driver drains", || driver.log().contains("draining"));
            drop(frozen);
            slow.join().unwrap().unwrap();
        });
        assert_eq!(driver.wait().code(), Some(0));
        driver.start_again();
        assert_eq!(fs::metadata(&target).unwrap().gid(), 4242);
    });
}

#[test]
fn health_is_served_over_http_and_by_probe() {
    let Some(driver) = driver_with(PoolKind::Copy, &HTTP) else { return };
    let address = http_address(&driver);
    assert!(fetch(address, "/healthz").0.contains(" 200 "));
    assert_eq!(driver.ok(csi::ProbeRequest {}).ready, Some(true));
    let away = driver.scratch().join("away");
    fs::rename(driver.data_dir(), &away).unwrap();
    let (status, body) = fetch(address, "/healthz");
    let probed = driver.call(csi::ProbeRequest {});
    fs::rename(&away, driver.data_dir()).unwrap();
    assert!(status.contains(" 503 ") && body.contains("data"), "{status}: {body}");
    assert_refused(probed, Code::FailedPrecondition, "healthy", "Probe");
    assert!(fetch(address, "/healthz").0.contains(" 200 "));
    assert!(fetch(address, "/").0.contains(" 404 "));
}

#[test]
fn rpc_metrics_have_bounded_labels() {
    let Some(driver) = driver_with(PoolKind::Copy, &HTTP) else { return };
    let address = http_address(&driver);
    let volume = driver.volume("v", MIB, block());
    driver.with_device(&volume, |device| write_direct(device, 0, &pattern(1, BLOCK as usize)));
    let snapshot = driver.snapshot("a", &volume);
    driver.ok(allocated(&snapshot));
    driver.refused(get_volume("no-such-volume"), Code::NotFound, "no-such-volume");
    let scrape = || {
        let (status, body) = fetch(address, "/metrics");
        assert!(status.contains(" 200 ") && body.ends_with("# EOF\n"), "{status}: {body}");
        body
    };
    let before = scrape();
    for line in [
        r#"csi_loopback_rpc_duration_seconds_count{method="CreateVolume",code="OK"} 1"#,
        r#"csi_loopback_rpc_duration_seconds_count{method="GetMetadataAllocated",code="OK"} 1"#,
        r#"csi_loopback_rpc_duration_seconds_count{method="ControllerGetVolume",code="NOT_FOUND"} 1"#,
        r#"csi_loopback_rpc_failures_total{code="NOT_FOUND"} 1"#,
        r#"csi_loopback_rpc_failures_total{code="DATA_LOSS"} 0"#,
        "csi_loopback_streamed_extents_total 1",
        "csi_loopback_pool_available_bytes",
    ] {
        assert!(before.contains(line), "{line} is not in\n{before}");
    }
    for number in 0..20 {
        driver.refused(
            get_volume(&format!("no-such-volume-{number}")),
            Code::NotFound,
            "no-such-volume",
        );
        let path: tonic::codegen::http::uri::PathAndQuery =
            format!("/csi.v1.Controller/Method{number}").parse().unwrap();
        let unknown = driver.block_on(async {
            let mut client = tonic::client::Grpc::new(driver.channel());
            client.ready().await.unwrap();
            let codec = tonic_prost::ProstCodec::<csi::ProbeRequest, csi::ProbeResponse>::default();
            client.unary(Request::new(csi::ProbeRequest {}), path, codec).await
        });
        assert_eq!(unknown.unwrap_err().code(), Code::Unimplemented);
    }
    let after = scrape();
    const LABELS: [&str; 6] = ["code", "le", "listener", "method", "share", "version"];
    for label in LABELS {
        assert_eq!(label_values(&after, label), label_values(&before, label), "{label}");
    }
    assert_eq!(after.lines().count(), before.lines().count());
    let names: BTreeSet<_> = after
        .split(['{', ','])
        .filter_map(|part| part.split_once("=\""))
        .map(|(label, _)| label.to_owned())
        .collect();
    assert_eq!(names.iter().map(String::as_str).collect::<Vec<_>>(), LABELS);
}

#[test]
#[ignore = "full tier"]
fn the_commands_accept_names_and_ids() {
    with_driver(|driver| {
        let run = |arguments: &[&str]| {
            let output = driver.cli(arguments);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{arguments:?}: {said}");
            String::from_utf8(output.stdout).unwrap()
        };
        let id = |made: &serde_json::Value| made["id"].as_str().unwrap().to_owned();
        let made = driver.cli_json(&["volume", "create", "data", "--fs", "xfs"]);
        let volume_id = id(&made);
        let (staging, target) = (driver.staging(&volume_id), driver.target(&volume_id));
        driver.will_use(&volume_id);
        let mut snapshots = ["a", "b"].map(str::to_owned);
        for (round, volume) in ["data", &volume_id].into_iter().enumerate() {
            run(&["volume", "stage", volume, "--staging", path(&staging)]);
            let publish = ["volume", "publish", volume, "--staging", path(&staging), "--target"];
            run(&[&publish[..], &[path(&target)]].concat());
            if round == 0 {
                driver.cli_json(&["snapshot", "create", "a", "--volume", volume]);
                fs::write(target.join("file"), pattern(1, 100_000)).unwrap();
            }
            // The second time it exists already.
            let b = driver.cli_json(&["snapshot", "create", "b", "--volume", volume]);
            let size = ["1100Mi", "1200Mi"][round];
            run(&["volume", "expand", volume, "--size", size, "--path", path(&target)]);
            assert!(run(&["volume", "list"]).contains(&volume_id));
            assert!(run(&["snapshot", "list", "--volume", volume]).contains("snap-a-"));
            let [from, to] = &snapshots;
            let allocated = driver.cli_json(&["snapshot", "allocated", to]);
            assert!(!allocated["extents"].as_array().unwrap().is_empty(), "{allocated}");
            let delta = driver.cli_json(&["snapshot", "delta", from, to]);
            assert!(!delta["extents"].as_array().unwrap().is_empty(), "{delta}");
            run(&["snapshot", "verify", from, to]);
            for source in [["--from-snapshot", from], ["--from-volume", volume]] {
                run(&[&["volume", "create", "copy", "--fs", "xfs"], &source[..]].concat());
                run(&["volume", "delete", "copy"]);
            }
            run(&["volume", "unpublish", volume, "--target", path(&target)]);
            run(&["volume", "unstage", volume, "--staging", path(&staging)]);
            assert!(mounts_at(&staging).is_empty() && mounts_at(&target).is_empty());
            let listed = driver.ok(csi::ListSnapshotsRequest::default()).entries;
            snapshots = ["snap-a-", "snap-b-"].map(|start| {
                let mut ids =
                    listed.iter().map(|entry| &entry.snapshot.as_ref().unwrap().snapshot_id);
                ids.find(|id| id.starts_with(start)).unwrap().clone()
            });
            assert_eq!(id(&b), snapshots[1]);
        }
        for arguments in [["snapshot", "delete", "a"], ["snapshot", "delete", &snapshots[1]]] {
            run(&arguments);
        }
        assert!(driver.ok(csi::ListSnapshotsRequest::default()).entries.is_empty());
        run(&["volume", "delete", "data"]);
        assert!(driver.ok(csi::ListVolumesRequest::default()).entries.is_empty());
        for command in ["stage", "delete"] {
            let staging: &[&str] =
                if command == "stage" { &["--staging", path(&staging)] } else { &[] };
            let unknown = driver.cli(&[&["volume", command, "no-such-volume"], staging].concat());
            let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
            assert!(!unknown.status.success() && said.contains("no volume named"), "{said}");
        }
    });
}

#[test]
fn pool_check_refuses_a_pool_in_use() {
    for_each_driver(|driver| {
        let volume = driver.volume("v", 8 * MIB, block());
        let mut snapshots = Vec::new();
        for round in 0..4 {
            driver.with_device(&volume, |device| {
                write_direct(device, round * BLOCK, &pattern(round, BLOCK as usize));
            });
            snapshots.push(driver.snapshot(&format!("s{round}"), &volume));
        }
        driver.ok(delete_snapshot(&snapshots[1]));
        driver.ok(create_group_snapshot("g", &[&volume]));
        driver.copy("clone", Source::Volume(&volume), block());
        driver.ok(delete_volume(&volume));
        let data_dir = driver.data_dir();
        let check = ["pool", "check", "--data-dir", path(&data_dir)];
        let refused = driver.cli(&check);
        assert_eq!(refused.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&refused.stderr).contains("in use"));
        driver.ok(csi::ProbeRequest {});

        driver.kill();
        driver.start_again();
        assert!(driver.stop().success());
        let output = driver.cli(&check);
        assert!(output.status.success(), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains("none"), "{output:?}");
        driver.start_again();
        assert_eq!(driver.ok(delta(&snapshots[0], &snapshots[3])).extents(), [(BLOCK, 3 * BLOCK)]);
    });
}

#[test]
fn environment_variables_set_socket_and_node() {
    with_driver(|driver| {
        let socket = driver.scratch().join("environment.sock");
        let data = driver.scratch().join("environment-data");
        let mut child = std::process::Command::new(binary())
            .args(["--mode", "driver", "--pool", "copy", "--data-dir", path(&data)])
            .env("CSI_ENDPOINT", format!("unix://{}", socket.display()))
            .env("NODE_ID", "node-of-environment")
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        wait_for("the socket exists", || socket.exists());
        let channel = driver.channel_to(socket);
        let req = driver.block_on(csi::NodeGetInfoRequest {}.send(channel));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(req.unwrap().node_id, "node-of-environment");
    });
}

#[test]
fn a_restart_keeps_ids_and_content() {
    for_each_driver(|driver| {
        let volume = driver.volume("v", MIB, block());
        let content = pattern(9, MIB as usize);
        driver.with_device(&volume, |device| write_direct(device, 0, &content));
        let snapshot = driver.snapshot("a", &volume);
        let lists = |driver: &Driver| {
            let volumes = driver.ok(csi::ListVolumesRequest::default()).entries;
            (volumes, driver.ok(csi::ListSnapshotsRequest::default()).entries)
        };
        let before = lists(driver);
        driver.restart();
        driver.kill();
        driver.start_again();
        assert_eq!(lists(driver), before);
        assert_eq!(driver.volume("v", MIB, block()), volume);
        assert_eq!(driver.snapshot("a", &volume), snapshot);
        assert_eq!(driver.with_device(&volume, read_all), content);
        let restored = driver.copy("restored", Source::Snapshot(&snapshot), block());
        assert_eq!(driver.with_device(&restored, read_all), content);
    });
}

/// As a unit of `Type=notify` (deploy/systemd): units after it find the socket.
#[test]
fn readiness_is_reported_when_the_socket_exists() {
    if !have_root() {
        return;
    }
    let directory = tempfile::TempDir::with_prefix("csi-loopback-").unwrap();
    let notify = directory.path().join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&notify).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let socket = directory.path().join("csi.sock");
    let variable = format!("NOTIFY_SOCKET={}", notify.display());
    let mut line = std::process::Command::new("env");
    line.args([&variable, binary(), "--mode", "driver", "--pool", "copy", "--endpoint"]);
    line.arg(&socket).arg("--data-dir").arg(directory.path().join("data"));
    let mut driver = line.stderr(std::process::Stdio::null()).spawn().unwrap();
    let mut message = [0; 32];
    let received = manager.recv(&mut message);
    let exists = socket.exists();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(driver.id() as i32), Signal::SIGTERM)
        .unwrap();
    assert!(driver.wait().unwrap().success());
    assert_eq!(&message[..received.unwrap()], b"READY=1");
    assert!(exists, "before its socket exists");
}
