//! Valid and invalid requests for inline volumes.

use std::collections::BTreeSet;
use std::fs;

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use tonic::Code;

use super::device_bytes;
use support::driver::*;
use support::inline::{PodVolume, context, is_mounted, pod_volume};
use support::{GIB, MIB};

use csi::volume_capability::access_mode::Mode;

fn with_context(volume: &PodVolume, context: &[(&str, &str)]) -> csi::NodePublishVolumeRequest {
    csi::NodePublishVolumeRequest { volume_context: map(context), ..volume.publishing(&[]) }
}

#[test]
fn a_malformed_inline_field_is_refused_and_creates_nothing() {
    let Some(driver) = driver_with(PoolKind::Copy, &[]) else { return };
    let volume = pod_volume(&driver, "uid-1", "scratch");
    let good = volume.publishing(&[]);
    let used = |wanted| csi::NodePublishVolumeRequest { volume_capability: wanted, ..good.clone() };
    let at = |place: &str| csi::NodePublishVolumeRequest {
        target_path: place.to_owned(),
        ..good.clone()
    };
    let content = |attributes: &[(&str, &str)], secret: &[(&str, &str)]| {
        volume.publishing_content(attributes, secret)
    };
    let long = "x".repeat(5000);
    let deep = format!("/{}", "x/".repeat(2500));
    let publish_context = map(&[("colour", "red")]);
    let mut cases = vec![
        ("target_path", "required", at("")),
        ("target_path", "absolute", at("relative")),
        ("target_path", "..", at("/a/../b")),
        ("target_path", "path", at("/a\0b")),
        ("target_path", "path", at(&deep)),
        ("volume_capability", "required", used(None)),
        ("volume_capability", "block", used(Some(block()))),
        ("volume_capability", "xfs", used(Some(mounted("ntfs")))),
        ("volume_capability", "xfs", used(Some(mounted(&long)))),
        ("volume_capability", "one node", used(Some(mounted_as("", Mode::MultiNodeMultiWriter)))),
        ("volume_capability", "mode", used(Some(mounted_as("", Mode::Unknown)))),
        ("volume_capability", "volume_mount_group", used(Some(in_group("wheel")))),
        ("mount_flags", "bind", used(Some(with_flags("", Mode::SingleNodeMultiWriter, &["bind"])))),
        (
            "publish_context",
            "colour",
            csi::NodePublishVolumeRequest { publish_context, ..good.clone() },
        ),
        ("readonly", "volumes[].csi.readOnly", volume.publishing(&[("content/a", "x")])),
        ("readonly", "volumes[].csi.readOnly", volume.publishing(&[("readOnlyContent", "true")])),
        (
            "readonly",
            "readOnlyContent",
            content(&[("content/a", "x"), ("readOnlyContent", "false")], &[]),
        ),
        ("secrets", "letters", content(&[], &[("../token", "x")])),
        ("secrets", "\"..\"", content(&[], &[("..data", "x")])),
        ("secrets", "rename", content(&[("content/a", "x")], &[("a", "x")])),
    ];
    for (attribute, value) in [
        ("Size", "1Gi"),
        ("colour", "red"),
        ("", ""),
        (&long, "x"),
        ("csi.storage.k8s.io", "x"),
        ("size", ""),
        ("size", "0"),
        ("size", "-1"),
        ("size", "much"),
        ("size", &long),
        ("size", "99999999999999999999999"),
        ("medium", "memory"),
        ("medium", "disk"),
        ("readOnlyContent", "True"),
        ("readOnlyContent", ""),
        ("fromSnapshot", "snap-a-0123456789abcdef"),
        ("content/", "x"),
        ("content/.", "x"),
        ("content/..", "x"),
        ("content/../../etc/passwd", "x"),
        ("content/a/b", "x"),
        ("content/a\0", "x"),
        ("content/ä", "x"),
    ] {
        let shown: String = attribute.chars().take(20).collect();
        cases.push(("volume_context", shown.leak(), volume.publishing(&[(attribute, value)])));
    }
    for value in ["TRUE", "True", "1", "yes", "", " true", &long] {
        let ephemeral = [("csi.storage.k8s.io/ephemeral", value)];
        cases.push(("volume_context", "ephemeral", with_context(&volume, &ephemeral)));
    }
    for (field, words, request) in cases {
        let said: String = format!("{request:?}").chars().take(2000).collect();
        let status = driver.call(request).expect_err(&said);
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}: {said}");
        let message = status.message();
        assert!(message.contains(field) && message.contains(words), "{message}: {said}");
        assert!(message.len() <= 1100, "{said}");
    }
    assert_eq!(fs::read_dir(driver.data_dir().join("volumes")).unwrap().count(), 0);
    assert!(!volume.target.exists());
    driver.ok(good);
    driver.unpublish(&volume.handle, &volume.target);
}

#[test]
fn a_hostile_handle_reaches_no_path_or_other_volume() {
    let Some(driver) = driver_with(PoolKind::Copy, &[]) else { return };
    let persistent = driver.volume("data", 32 * MIB, mounted(""));
    let snapshot = driver.snapshot("s", &persistent);
    let other = pod_volume(&driver, "uid-1", "other");
    driver.ok(other.publishing(&[("size", "32Mi")]));
    fs::write(other.file("mine"), "x").unwrap();
    let internal = super::internal_id(&other.target);
    let longest = "x".repeat(129);
    let files = || -> BTreeSet<_> {
        let entries = fs::read_dir(driver.data_dir().join("volumes")).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    };
    let before = files();
    let target = driver.scratch().join("pods/uid-2/mount");
    for handle in [
        "",
        "..",
        ".",
        "/",
        "../x",
        "a/b",
        "/etc/passwd",
        "a\0b",
        "a\nb",
        " ",
        "a b",
        " a",
        "a ",
        "-a",
        "--help",
        ".a",
        "ä",
        "\u{202e}txt",
        "%s%n",
        "$(reboot)",
        &longest,
        &persistent,
        &snapshot,
        &internal,
        "vol-x-0123456789abcdef",
        "inline-x-0123456789abcdef",
    ] {
        let volume = PodVolume { handle: handle.to_owned(), target: target.clone() };
        driver.refused(volume.publishing(&[("size", "32Mi")]), Code::InvalidArgument, "volume_id");
        assert!(!target.exists(), "{handle:?}");
        assert_eq!(files(), before, "{handle:?}");
        if (1..=128).contains(&handle.len()) {
            driver.ok(unpublishing(handle, other.target.to_str().unwrap()));
            driver.refused(stats(handle, other.target.to_str().unwrap()), Code::NotFound, "");
        }
    }
    // The target of another volume is refused: it is occupied.
    let stolen = PodVolume { target: target.clone(), ..other.clone() };
    driver.refused(stolen.publishing(&[("size", "32Mi")]), Code::FailedPrecondition, "target_path");
    assert_eq!(fs::read_to_string(other.file("mine")).unwrap(), "x");
    driver.unpublish(&other.handle, &other.target);
    driver.ok(delete_snapshot(&snapshot));
    driver.ok(delete_volume(&persistent));
}

#[test]
fn an_inline_volume_cannot_be_staged_or_expanded() {
    with_driver(|driver| {
        let volume = pod_volume(driver, "uid-1", "scratch");
        driver.ok(volume.publishing(&[("size", "32Mi")]));
        let stage = driver.staging_of(&volume.handle, &mounted(""));
        let inline = csi::NodeStageVolumeRequest { volume_context: context(&[]), ..stage.clone() };
        driver.refused(inline, Code::InvalidArgument, "must not be staged");
        for value in ["TRUE", ""] {
            let volume_context = map(&[("csi.storage.k8s.io/ephemeral", value)]);
            let odd = csi::NodeStageVolumeRequest { volume_context, ..stage.clone() };
            driver.refused(odd, Code::InvalidArgument, "ephemeral");
        }
        driver.refused(stage, Code::NotFound, &volume.handle);
        driver.ok(unstaging(&volume.handle, "/nowhere"));
        let grown = csi::NodeExpandVolumeRequest {
            capacity_range: Some(range((64 * MIB) as i64, 0)),
            ..expand_on_node(&volume.handle, &volume.target)
        };
        driver.refused(grown, Code::FailedPrecondition, "cannot be expanded");
        assert_eq!(device_bytes(&volume.target), 32 * MIB);
        driver.unpublish(&volume.handle, &volume.target);
    });
}

#[test]
fn an_inline_size_is_rounded_up_and_has_a_default() {
    let Some(mut driver) = driver_with(PoolKind::Copy, &[]) else { return };
    let bytes = |driver: &Driver, attributes: &[(&str, &str)], fs_type: &str| {
        let volume = pod_volume(driver, "uid-1", "scratch");
        driver.ok(csi::NodePublishVolumeRequest {
            volume_capability: Some(mounted(fs_type)),
            ..volume.publishing(attributes)
        });
        let bytes = device_bytes(&volume.target);
        driver.unpublish(&volume.handle, &volume.target);
        bytes
    };
    for (size, expected) in [
        ("64Mi", 64 * MIB),
        ("67108865", 64 * MIB + 4096),
        ("0.1Gi", (GIB / 10).div_ceil(4096) * 4096),
        ("100M", 100_003_840),
    ] {
        assert_eq!(bytes(&driver, &[("size", size)], ""), expected, "{size}");
    }
    // The size is raised to the minimum of the filesystem.
    assert!(bytes(&driver, &[("size", "1")], "ext4") >= MIB);
    assert!(bytes(&driver, &[("size", "1")], "xfs") >= 300 * MIB);
    assert_eq!(bytes(&driver, &[], ""), GIB);
    driver.restart_with(&["--inline-max-size", "128Mi"]);
    assert_eq!(bytes(&driver, &[], ""), 128 * MIB);
}

#[test]
fn disabling_inline_volumes_keeps_existing_ones() {
    let Some(mut driver) = driver_with(PoolKind::Copy, &[]) else { return };
    let old = pod_volume(&driver, "uid-1", "old");
    driver.ok(old.publishing(&[("size", "32Mi")]));
    fs::write(old.file("written"), "by the pod").unwrap();
    driver.restart_with(&["--inline=false"]);
    let new = pod_volume(&driver, "uid-1", "new");
    driver.refused(new.publishing(&[]), Code::FailedPrecondition, "--inline=false");
    assert!(!new.target.exists());
    // Invalid requests are still reported, and persistent volumes work.
    driver.refused(new.publishing(&[("colour", "red")]), Code::InvalidArgument, "colour");
    let persistent = driver.volume("data", 32 * MIB, mounted(""));
    driver.publish(&persistent, &mounted(""));
    driver.take_down(&persistent);

    driver.ok(old.publishing(&[("size", "32Mi")]));
    assert_eq!(fs::read_to_string(old.file("written")).unwrap(), "by the pod");
    driver.unpublish(&old.handle, &old.target);
    assert!(!old.target.exists() && !is_mounted(&old.target));
    driver.unpublish(&old.handle, &old.target);
    driver.refused(old.publishing(&[("size", "32Mi")]), Code::FailedPrecondition, "--inline=false");
    driver.restart_with(&["--inline"]);
    driver.ok(old.publishing(&[("size", "32Mi")]));
    driver.unpublish(&old.handle, &old.target);
}
