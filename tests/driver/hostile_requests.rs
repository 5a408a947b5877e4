//! Missing, malformed and hostile fields: the error names the field, and nothing changes.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use csi_loopback::backend::PoolKind;
use csi_loopback::proto::csi::v1 as csi;
use support::MIB;
use support::driver::*;
use tonic::{Code, Status};

use csi::volume_capability::access_mode::Mode;

type Case = (&'static str, Box<dyn Fn(&Driver) -> Result<(), Status>>);

fn case<R: Rpc + Clone>(field: &'static str, request: R) -> Case {
    (field, Box::new(move |driver| driver.call(request.clone()).map(drop)))
}

/// Requests of every RPC with arguments, each with one field missing or malformed.
fn malformed(volume: &str) -> Vec<Case> {
    let mut cases = missing(volume);
    cases.extend(["", &"x".repeat(129)].into_iter().flat_map(|id| wrong_id(volume, id)));
    for name in ["a\nb", "a\0", "\u{1b}[2J"] {
        cases.extend([
            case("name", create(name, MIB, block())),
            case("name", create_snapshot(name, volume)),
            case("name", create_group_snapshot(name, &[volume])),
        ]);
    }
    let no_mode = csi::VolumeCapability { access_mode: None, ..block() };
    let no_type = csi::VolumeCapability { access_type: None, ..block() };
    let unknown_mode = csi::VolumeCapability {
        access_mode: Some(csi::volume_capability::AccessMode { mode: 99 }),
        ..block()
    };
    let zero_flag = with_flags("", Mode::SingleNodeWriter, &["a\0b"]);
    let many_flags = with_flags("", Mode::SingleNodeWriter, &[&"x".repeat(5000)]);
    let bad = [no_mode, no_type, unknown_mode, zero_flag, many_flags, in_group("wheel")];
    cases.extend(bad.into_iter().flat_map(|wanted| wrong_capability(volume, &wanted)));
    let deep = format!("/{}", "x/".repeat(2500));
    let places = ["relative", "/a/../b", "/a\0b", &deep];
    cases.extend(places.into_iter().flat_map(|place| wrong_path(volume, place)));
    cases
}

/// The request with one field changed.
fn changed<R: Rpc + Clone>(
    field: &'static str,
    mut request: R,
    change: impl FnOnce(&mut R),
) -> Case {
    change(&mut request);
    case(field, request)
}

fn stage(volume: &str) -> csi::NodeStageVolumeRequest {
    csi::NodeStageVolumeRequest {
        volume_id: volume.to_owned(),
        staging_target_path: "/nowhere/staging".to_owned(),
        volume_capability: Some(mounted("")),
        ..Default::default()
    }
}

fn publish(volume: &str) -> csi::NodePublishVolumeRequest {
    csi::NodePublishVolumeRequest {
        volume_id: volume.to_owned(),
        staging_target_path: "/nowhere/staging".to_owned(),
        target_path: "/nowhere/target".to_owned(),
        volume_capability: Some(mounted("")),
        ..Default::default()
    }
}

fn validate(volume: &str) -> csi::ValidateVolumeCapabilitiesRequest {
    csi::ValidateVolumeCapabilitiesRequest {
        volume_id: volume.to_owned(),
        volume_capabilities: vec![block()],
        ..Default::default()
    }
}

fn delete_group(id: &str) -> csi::DeleteVolumeGroupSnapshotRequest {
    csi::DeleteVolumeGroupSnapshotRequest { group_snapshot_id: id.to_owned(), ..Default::default() }
}

fn missing(volume: &str) -> Vec<Case> {
    let new = || create("x", MIB, block());
    vec![
        case("volume_id", get_volume("")),
        changed("capacity_range", expand(volume, 1), |req| req.capacity_range = None),
        changed("volume_capabilities", new(), |req| req.volume_capabilities.clear()),
        changed("volume_content_source", new(), |req| {
            req.volume_content_source = Some(csi::VolumeContentSource { r#type: None });
        }),
        case("snapshot_id", from_source("x", Source::Snapshot(""), 0)),
        case("volume_id", from_source("x", Source::Volume(""), 0)),
        changed("volume_capabilities", validate(volume), |req| req.volume_capabilities.clear()),
        case("source_volume_ids", create_group_snapshot("x", &[])),
        case("source_volume_ids", create_group_snapshot("x", &[""])),
        case("source_volume_ids", create_group_snapshot("x", &[volume, volume])),
        case("staging_target_path", unstaging(volume, "")),
        case("target_path", unpublishing(volume, "")),
        case("volume_path", stats(volume, "")),
        case("volume_path", expand_on_node(volume, Path::new(""))),
        changed("volume_capability", stage(volume), |req| req.volume_capability = None),
        changed("volume_capability", publish(volume), |req| req.volume_capability = None),
        changed("staging_target_path", stage(volume), |req| req.staging_target_path.clear()),
        changed("target_path", publish(volume), |req| req.target_path.clear()),
    ]
}

/// Every call with an id or a name, set to this one.
fn wrong_id(volume: &str, id: &str) -> Vec<Case> {
    vec![
        case("name", create(id, MIB, block())),
        case("name", create_snapshot(id, volume)),
        case("name", create_group_snapshot(id, &[volume])),
        case("volume_id", delete_volume(id)),
        case("volume_id", get_volume(id)),
        changed("volume_id", csi::ControllerGetVolumeHealthRequest::default(), |req| {
            req.volume_id = id.to_owned();
        }),
        changed("volume_id", csi::NodeGetVolumeHealthRequest::default(), |req| {
            req.volume_id = id.to_owned();
        }),
        case("volume_id", expand(id, 1)),
        case("volume_id", modify(id, &[])),
        case("volume_id", validate(id)),
        case("source_volume_id", create_snapshot("x", id)),
        case("snapshot_id", delete_snapshot(id)),
        changed("snapshot_id", csi::GetSnapshotRequest::default(), |req| {
            req.snapshot_id = id.to_owned();
        }),
        changed("group_snapshot_id", csi::GetVolumeGroupSnapshotRequest::default(), |req| {
            req.group_snapshot_id = id.to_owned();
        }),
        case("group_snapshot_id", delete_group(id)),
        case("snapshot_id", allocated(id)),
        case("base_snapshot_id", delta(id, "snap")),
        case("target_snapshot_id", delta("snap", id)),
        case("volume_id", stage(id)),
        case("volume_id", publish(id)),
        case("volume_id", unstaging(id, "/nowhere")),
        case("volume_id", unpublishing(id, "/nowhere")),
        case("volume_id", stats(id, "/nowhere")),
        case("volume_id", expand_on_node(id, Path::new("/nowhere"))),
    ]
}

fn wrong_capability(volume: &str, wanted: &csi::VolumeCapability) -> Vec<Case> {
    const FIELD: &str = "volume_capability";
    let (capability, nowhere) = (|| Some(wanted.clone()), Path::new("/nowhere"));
    vec![
        changed(FIELD, stage(volume), |req| req.volume_capability = capability()),
        changed(FIELD, publish(volume), |req| req.volume_capability = capability()),
        case("volume_capabilities", create("x", MIB, wanted.clone())),
        changed(FIELD, expand(volume, 1), |req| req.volume_capability = capability()),
        changed(FIELD, expand_on_node(volume, nowhere), |req| req.volume_capability = capability()),
    ]
}

fn wrong_path(volume: &str, place: &str) -> Vec<Case> {
    const STAGING: &str = "staging_target_path";
    vec![
        changed(STAGING, stage(volume), |req| req.staging_target_path = place.to_owned()),
        changed("target_path", publish(volume), |req| req.target_path = place.to_owned()),
        changed(STAGING, publish(volume), |req| req.staging_target_path = place.to_owned()),
        case(STAGING, unstaging(volume, place)),
        case("target_path", unpublishing(volume, place)),
    ]
}

/// Every path in a directory, with the content of files.
fn tree(root: &Path) -> BTreeSet<(String, Vec<u8>)> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(tree(&path));
        }
        found.insert((path.display().to_string(), fs::read(&path).unwrap_or_default()));
    }
    found
}

#[test]
fn a_missing_or_malformed_field_is_named_in_the_error() {
    with_driver(|driver| {
        let volume = driver.volume("v", 32 * MIB, mounted(""));
        for (number, (field, call)) in malformed(&volume).into_iter().enumerate() {
            assert_refused(call(driver), Code::InvalidArgument, field, &format!("case {number}"));
        }
        assert_eq!(volume_ids(driver), [volume]);
        assert!(all_snapshots(driver).is_empty());
    });
}

#[test]
fn a_hostile_id_or_name_has_no_effect() {
    let Some(driver) = driver_with(PoolKind::Copy, &[]) else { return };
    let volume = driver.volume("v", MIB, block());
    let precious = driver.scratch().join("precious");
    fs::create_dir_all(precious.join("directory")).unwrap();
    fs::write(precious.join("file"), "precious").unwrap();
    let before = tree(&precious);
    let longest = "x".repeat(128);
    let hostile = [
        "../../../precious/file",
        "../../precious",
        "/etc/passwd",
        "..",
        ".",
        "/",
        "a/b",
        "vol-../../x-0123456789abcdef",
        "\u{202e}txt",
        "%s%n{}$(reboot)`reboot`",
        "'; DROP TABLE volumes; --",
        "--help",
        "ä\u{1F4A9}",
        " ",
        &longest,
    ];
    let known = [
        Code::Ok,
        Code::NotFound,
        Code::InvalidArgument,
        Code::FailedPrecondition,
        Code::AlreadyExists,
    ];
    let mut made = vec![volume.clone()];
    for word in hostile {
        let place = precious.join("file").display().to_string();
        let answers: Vec<Result<(), Status>> = vec![
            driver.call(get_volume(word)).map(drop),
            driver.call(delete_volume(word)).map(drop),
            driver.call(expand(word, MIB)).map(drop),
            driver.call(modify(word, &[(word, word)])).map(drop),
            driver.call(modify(word, &[("changeTracking", "true")])).map(drop),
            driver.call(create_snapshot("x", word)).map(drop),
            driver.call(delete_snapshot(word)).map(drop),
            driver.call(create_group_snapshot("x", &[word])).map(drop),
            driver.call(delete_group(word)).map(drop),
            driver.call(allocated(word)).map(drop),
            driver.call(delta(word, word)).map(drop),
            driver.call(from_source("x", Source::Volume(word), 0)).map(drop),
            driver.call(from_source("x", Source::Snapshot(word), 0)).map(drop),
            driver.call(driver.staging_of("x", &mounted(word))).map(drop),
            driver.call(stats(word, &place)).map(drop),
            driver.call(stats(&volume, &place)).map(drop),
            driver.call(expand_on_node(word, Path::new(&place))).map(drop),
            driver.call(unstaging(word, &place)).map(drop),
            driver.call(unpublishing(word, &place)).map(drop),
        ];
        for (number, answer) in answers.into_iter().enumerate() {
            let code = answer.as_ref().map_or_else(Status::code, |()| Code::Ok);
            assert!(known.contains(&code), "{word:?} {number}: {answer:?}");
        }
        // As a name it is valid, and found again.
        let id = driver.volume(word, MIB, block());
        assert_eq!(driver.volume(word, MIB, block()), id);
        assert!(id.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/'), "{id}");
        let snapshot = driver.snapshot(word, &id);
        assert_eq!(driver.snapshot(word, &id), snapshot);
        driver.ok(create_group_snapshot(word, &[&id]));
        made.push(id);
    }
    assert_eq!(tree(&precious), before);
    let files: BTreeSet<String> = fs::read_dir(driver.data_dir().join("volumes"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(files, made.into_iter().collect());
    assert!(!driver.log().contains("panic"));
}
