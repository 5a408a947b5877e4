//! The client commands against a driver: they report what they changed, and fail where nothing was
//! to change.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::admin::v1 as admin;
use csi_loopback::proto::csi::v1 as csi;
use serde_json::Value;
use support::driver::*;
use support::{MIB, path, pattern, read_all, write_direct};

/// The output of a command that must succeed.
#[track_caller]
fn ok(output: Output) -> String {
    assert!(output.status.success(), "{}", error(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// The error of a command that must exit with 1.
#[track_caller]
fn fails(output: Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stdout));
    error(&output)
}

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn id(made: &Value) -> String {
    made["id"].as_str().unwrap().to_owned()
}

#[test]
fn unpublish_and_unstage_of_a_wrong_path_fail() {
    with_driver(|driver| {
        let volume = id(&driver.cli_json(&["volume", "create", "v", "--size", "64Mi"]));
        let (staging, target) = (driver.staging(&volume), driver.target(&volume));
        driver.will_use(&volume);
        let other = driver.scratch().join("other");
        let unstage = |at: &PathBuf| driver.cli(&["volume", "unstage", "v", "--staging", path(at)]);
        let unpublish =
            |at: &PathBuf| driver.cli(&["volume", "unpublish", "v", "--target", path(at)]);
        assert!(fails(unstage(&staging)).contains("is not staged (--if-staged accepts this)"));
        assert!(fails(unpublish(&target)).contains("is not published (--if-published"));

        let stage = ["volume", "stage", "v", "--staging", path(&staging)];
        assert_eq!(ok(driver.cli(&stage)), format!("volume {volume} staged\n"));
        assert_eq!(ok(driver.cli(&stage)), format!("volume {volume} is already staged\n"));
        let publish =
            ["volume", "publish", "v", "--staging", path(&staging), "--target", path(&target)];
        assert_eq!(driver.cli_json(&publish)["changed"], true);
        assert_eq!(driver.cli_json(&publish)["changed"], false);

        let wrong = fails(unpublish(&other));
        assert!(wrong.contains(&format!("not published at {} but at", other.display())), "{wrong}");
        assert!(wrong.contains(path(&target)), "{wrong}");
        let wrong = fails(unstage(&other));
        assert!(wrong.contains(path(&staging)) && !mounts_at(&staging).is_empty(), "{wrong}");
        let elsewhere = driver.scratch().join("t");
        let at = ["--staging", path(&other), "--target", path(&elsewhere)];
        let wrong = fails(driver.cli(&[&["volume", "publish", "v"], &at[..]].concat()));
        assert!(wrong.contains("stage it first: csi-loopback volume stage v"), "{wrong}");

        ok(unpublish(&target));
        fails(unpublish(&target));
        let accepting = ["volume", "unpublish", "v", "--target", path(&target), "--if-published"];
        assert_eq!(driver.cli_json(&accepting)["changed"], false);
        ok(unstage(&staging));
        let accepting = ["volume", "unstage", "v", "--staging", path(&staging), "--if-staged"];
        assert_eq!(driver.cli_json(&accepting)["changed"], false);
    });
}

#[test]
fn a_repeated_creation_or_deletion_is_reported_as_such() {
    with_driver(|driver| {
        let create = ["volume", "create", "v", "--size", "8Mi", "--block"];
        let volume = id(&driver.cli_json(&create));
        assert!(ok(driver.cli(&create)).contains("exists already, 8Mi"));
        let snapshot = ["snapshot", "create", "s", "--volume", "v"];
        assert_eq!(driver.cli_json(&snapshot)["changed"], true);
        assert_eq!(driver.cli_json(&snapshot)["changed"], false);
        assert_eq!(driver.cli_json(&["volume", "list"]).as_array().unwrap().len(), 1);
        for (kind, name) in [("snapshot", "s"), ("volume", volume.as_str())] {
            ok(driver.cli(&[kind, "delete", name]));
            assert!(fails(driver.cli(&[kind, "delete", name])).contains("list"));
            let gone = driver.cli_json(&[kind, "delete", name, "--if-exists"]);
            assert_eq!(gone["changed"], false);
        }
    });
}

#[test]
fn a_raw_block_volume_is_neither_formatted_nor_called_empty() {
    with_driver(|driver| {
        let volume = id(&driver.cli_json(&["volume", "create", "v", "--size", "32Mi", "--block"]));
        driver.will_use(&volume);
        let staging = driver.staging(&volume);
        let stage = ["volume", "stage", "v", "--staging", path(&staging)];
        let refused = fails(driver.cli(&stage));
        assert!(refused.contains("--block") && refused.contains("--fs TYPE"), "{refused}");
        ok(driver.cli(&[&stage[..], &["--block"]].concat()));
        let stats = ["volume", "stats", "v", "--path", path(&staging)];
        let shown = driver.cli_json(&stats);
        assert_eq!(
            (&shown["total_bytes"], &shown["used_bytes"]),
            (&(32 * MIB).into(), &Value::Null)
        );
        assert!(ok(driver.cli(&stats)).contains("unknown: raw block volume"));
        let shown = driver.cli_json(&["volume", "show", "v"]);
        assert_eq!((&shown["access"], &shown["filesystem"]), (&"block".into(), &Value::Null));
        ok(driver.cli(&["volume", "unstage", "v", "--staging", path(&staging)]));
        // On request a filesystem is created.
        ok(driver.cli(&[&stage[..], &["--fs", "ext4"]].concat()));
        ok(driver.cli(&["volume", "unstage", "v", "--staging", path(&staging)]));
    });
}

#[test]
fn an_expansion_that_succeeds_in_part_reports_both_parts() {
    with_driver(|driver| {
        driver.cli_json(&["volume", "create", "v", "--size", "8Mi", "--block"]);
        let unused = driver.scratch().join("unused");
        let expand = ["volume", "expand", "v", "--size", "16Mi", "--path", path(&unused)];
        let output = driver.cli(&[&expand[..], &["--output", "json"]].concat());
        let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(shown["capacity_bytes"], 16 * MIB);
        let message = fails(output);
        assert!(message.contains("partial success") && message.contains("NOT_FOUND"), "{message}");
        assert_eq!(message.matches("is not in use").count(), 1, "the cause once: {message}");
        for command in ["create", "expand"] {
            let output = driver.cli(&["volume", command, "v", "--size", "0"]);
            assert_eq!(output.status.code(), Some(2), "{}", error(&output));
        }
    });
}

#[test]
fn volume_show_reports_filesystem_paths_and_use() {
    with_driver(|driver| {
        let volume = driver.volume("v", 64 * MIB, mounted("ext4"));
        let target = driver.publish(&volume, &mounted("ext4"));
        fs::write(target.join("file"), pattern(1, 3 << 20)).unwrap();
        driver.snapshot("a", &volume);
        let shown = driver.cli_json(&["volume", "show", "v"]);
        assert_eq!((&shown["id"], &shown["filesystem"]), (&volume.as_str().into(), &"ext4".into()));
        assert_eq!(shown["staging_path"], path(&driver.staging(&volume)));
        assert_eq!(shown["published"][0]["path"], path(&target));
        assert!(shown["device"].as_str().unwrap().starts_with("/dev/loop"), "{shown}");
        assert!(shown["used_bytes"].as_u64().unwrap() > 3 << 20, "{shown}");
        assert!(shown["allocated_bytes"].as_u64().unwrap() >= 3 << 20, "{shown}");
        assert_eq!((&shown["change_tracking"], &shown["abnormal"]), (&true.into(), &false.into()));
        let copy = driver.cli_json(&["volume", "create", "copy", "--from-snapshot", "a"]);
        let shown = driver.ok(admin::GetVolumeRequest { volume_id: id(&copy) });
        assert!(shown.source_snapshot_id.starts_with("snap-a-"), "{shown:?}");
        assert_eq!((shown.staging_path.as_str(), shown.used_bytes), ("", None));
        driver.refused(
            admin::GetVolumeRequest { volume_id: NO_VOLUME.to_owned() },
            tonic::Code::NotFound,
            NO_VOLUME,
        );
        driver.take_down(&volume);
    });
}

#[test]
fn bases_and_group_snapshots_are_listed_by_the_commands() {
    with_driver(|driver| {
        let volumes = ["v", "w"].map(|name| driver.volume(name, 8 * MIB, block()));
        let create = ["snapshot", "group", "create", "g", "--volume", "v", "--volume", "w"];
        let group = driver.cli_json(&create);
        assert_eq!(group["snapshots"].as_array().unwrap().len(), 2);
        assert_eq!(
            (&group["changed"], &driver.cli_json(&create)["changed"]),
            (&true.into(), &false.into())
        );
        let members = driver.cli_json(&["snapshot", "group", "list", "g"]);
        assert_eq!(members[0]["volume_id"].as_str(), Some(volumes[0].as_str()));
        assert!(ok(driver.cli(&["snapshot", "group", "list"])).contains("snap-"));
        driver.cli_json(&["snapshot", "group", "delete", "g"]);
        assert!(fails(driver.cli(&["snapshot", "group", "delete", "g"])).contains("no group"));
        let bases = driver.cli_json(&["snapshot", "list", "--bases"]);
        assert_eq!(bases.as_array().unwrap().len(), 2, "{bases}");
        let bases = driver.cli_json(&["snapshot", "list", "--bases", "--volume", "w"]);
        assert_eq!(bases[0]["volume_id"].as_str(), Some(volumes[1].as_str()));
        assert!(bases[0]["deleted"].is_string(), "{bases}");
        assert!(driver.ok(csi::ListSnapshotsRequest::default()).entries.is_empty());
    });
}

#[test]
fn a_map_shows_allocated_and_changed_blocks_of_snapshots() {
    with_driver(|driver| {
        let volume = driver.volume("v", 64 * MIB, block());
        let device = driver.publish(&volume, &block());
        write_direct(&device, 0, &pattern(1, 8 << 20));
        driver.snapshot("a", &volume);
        write_direct(&device, 32 * MIB, &pattern(2, 4096));
        driver.snapshot("b", &volume);
        let rows = driver.cli_json(&["snapshot", "map", "--volume", "v", "--width", "8"]);
        assert_eq!((&rows[0]["kind"], &rows[1]["kind"]), (&"allocated".into(), &"changed".into()));
        assert_eq!((&rows[0]["cells"][0], &rows[1]["cells"][4]), (&(8 * MIB).into(), &4096.into()));
        let shown = ok(driver.cli(&["snapshot", "map", "a", "b", "--width", "8"]));
        assert!(shown.contains("█·······") && shown.contains("····░···"), "{shown}");
        assert!(ok(driver.cli(&["snapshot", "map", "a"])).contains("one cell is 64Ki"));
        for file in ["map.svg", "map.html"] {
            let file = driver.scratch().join(file);
            ok(driver.cli(&["snapshot", "map", "a", "b", "--file", path(&file), "--quiet"]));
            assert!(fs::read_to_string(file).unwrap().contains("b changed"));
        }
        let strip = ok(driver.cli(&["snapshot", "delta", "a", "b"]));
        let line = strip.lines().find(|line| line.starts_with("map")).unwrap();
        assert_eq!(line.chars().filter(|symbol| *symbol == '░').count(), 1, "{strip}");
        driver.take_down(&volume);
    });
}

#[test]
fn verify_accepts_one_snapshot_a_sample_and_devices() {
    with_driver(|driver| {
        let volume = driver.volume("v", 64 * MIB, block());
        let device = driver.publish(&volume, &block());
        write_direct(&device, 0, &pattern(1, 8 << 20));
        let a = driver.snapshot("a", &volume);
        write_direct(&device, 32 * MIB, &pattern(2, 8192));
        let b = driver.snapshot("b", &volume);
        let whole = driver.cli_json(&["snapshot", "verify", "b"]);
        assert_eq!((&whole["proven"], &whole["reported_blocks"]), (&true.into(), &2050.into()));
        let sampled = driver.cli_json(&["snapshot", "verify", "a", "b", "--sample", "20"]);
        assert!(sampled["compared_bytes"].as_u64().unwrap() < 64 * MIB, "{sampled}");

        let image = |snapshot: &str, name: &str| {
            let copy = driver.copy(name, Source::Snapshot(snapshot), block());
            let file = driver.scratch().join(name);
            fs::write(&file, driver.with_device(&copy, read_all)).unwrap();
            file
        };
        let (source, target) = (image(&a, "source"), image(&b, "target"));
        let verify = |extra: &[&str]| driver.cli(&[&["snapshot", "verify"], extra].concat());
        let devices = ["--source", path(&source), "--target", path(&target)];
        assert!(ok(verify(&[&["a", "b"], &devices[..]].concat())).contains("proven"));
        let mut bytes = fs::read(&target).unwrap();
        bytes[20 << 20] = 1;
        fs::write(&target, bytes).unwrap();
        for snapshots in [&["a", "b"][..], &["b"]] {
            let flags = if snapshots.len() == 2 { &devices[..] } else { &devices[2..] };
            let output = verify(&[snapshots, flags].concat());
            assert_eq!(output.status.code(), Some(1));
            let shown = String::from_utf8(output.stdout).unwrap();
            assert!(shown.contains("WRONG") && shown.ends_with("20971520\n"), "{shown}");
        }
        let missing = fails(verify(&["a", "b", "--target", path(&target)]));
        assert!(missing.contains("--source DEV is missing"), "{missing}");
        driver.take_down(&volume);
    });
}

#[test]
fn leftovers_of_a_killed_verification_are_removed() {
    // The listing stalls, so that the temporary volumes exist when the process is killed.
    let stall = [
        "--enable-faults",
        "--fault",
        "stream-stall,after=1,for=30s,method=GetMetadataDelta,times=1",
    ];
    let Some(driver) = driver_with(PoolKind::Image, &stall) else { return };
    let volume = driver.volume("v", 8 * MIB, block());
    let device = driver.publish(&volume, &block());
    write_direct(&device, 0, &pattern(1, 4096));
    driver.snapshot("a", &volume);
    write_direct(&device, 0, &pattern(2, 4096));
    write_direct(&device, 4 * MIB, &pattern(3, 4096));
    driver.snapshot("b", &volume);
    let temporary = driver.scratch().join("tmp");
    fs::create_dir(&temporary).unwrap();
    let verify = || {
        let mut command = Command::new(binary());
        command
            .args(["snapshot", "verify", "a", "b"])
            .env("CSI_ENDPOINT", driver.endpoint())
            .env("TMPDIR", &temporary)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    };
    let listing = csi::ListVolumesRequest::default;
    let mut child = verify().spawn().unwrap();
    let published = || {
        let directories = fs::read_dir(&temporary).unwrap().flatten();
        directories
            .flat_map(|one| fs::read_dir(one.path()).unwrap().flatten())
            .filter(|one| one.path().join("device").exists())
            .count()
    };
    wait_for("both temporary volumes are published", || published() == 2);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(driver.ok(listing()).entries.len(), 3);

    let output = verify().output().unwrap();
    let note = error(&output);
    assert!(note.contains("and 2 volumes of a killed command"), "{note}");
    assert!(ok(output).contains("proven"));
    assert_eq!(driver.ok(listing()).entries.len(), 1);
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0);
    driver.take_down(&volume);
}

#[test]
fn progress_and_color_appear_only_on_a_terminal() {
    let slow = ["--enable-faults", "--fault", "slow-snapshot,for=3s"];
    let Some(driver) = driver_with(PoolKind::Copy, &slow) else { return };
    driver.volume("v", MIB, block());
    let on_terminal = |line: &str, variables: &[(&str, &str)]| {
        let mut command = Command::new("script");
        let line = format!("{} {line}", binary());
        command.args(["-qec", &line, "/dev/null"]).env("CSI_ENDPOINT", driver.endpoint());
        command.env("TERM", "xterm").env_remove("NO_COLOR").stdin(Stdio::null());
        command.envs(variables.iter().copied());
        String::from_utf8_lossy(&command.output().unwrap().stdout).into_owned()
    };
    const SHOWN: &str = "waiting for the driver";
    let shown = on_terminal("snapshot create a --volume v", &[]);
    assert!(shown.contains(SHOWN) && shown.contains("created"), "{shown}");
    assert!(!on_terminal("snapshot create b --volume v --quiet", &[]).contains(SHOWN));
    let plain = driver.cli(&["snapshot", "create", "c", "--volume", "v"]);
    assert_eq!(error(&plain), "");
    assert!(on_terminal("--help", &[]).contains("\x1b["));
    assert!(!on_terminal("--help", &[("NO_COLOR", "1")]).contains("\x1b["));
}

#[test]
fn reflection_lists_the_services_of_the_socket() {
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    with_driver(|driver| {
        let ask = |message: MessageRequest| {
            let request =
                ServerReflectionRequest { host: String::new(), message_request: Some(message) };
            let mut client = ServerReflectionClient::new(driver.channel());
            let call = async {
                let requests = tokio_stream::iter([request]);
                let mut responses =
                    client.server_reflection_info(requests).await.unwrap().into_inner();
                responses.message().await.unwrap().unwrap().message_response.unwrap()
            };
            driver
                .block_on(async { tokio::time::timeout(Duration::from_secs(60), call).await })
                .unwrap()
        };
        let services = ask(MessageRequest::ListServices(String::new()));
        let MessageResponse::ListServicesResponse(services) = services else { panic!() };
        let names: Vec<_> = services.service.iter().map(|one| one.name.as_str()).collect();
        for name in ["csi.v1.Controller", "csiloopback.admin.v1.VolumeAdmin"] {
            assert!(names.contains(&name), "{names:?}");
        }
        assert!(!names.contains(&"snapshotmetadata.SnapshotMetadata"), "{names:?}");
        let symbol = "csi.v1.Node.NodeStageVolume".to_owned();
        let file = ask(MessageRequest::FileContainingSymbol(symbol));
        assert!(matches!(file, MessageResponse::FileDescriptorResponse(_)), "{file:?}");
    });
}
