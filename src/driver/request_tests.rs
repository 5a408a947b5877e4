use super::*;
use csi::volume_capability::{AccessMode as WireMode, BlockVolume};

fn wire(mode: Mode, access: Option<AccessType>) -> csi::VolumeCapability {
    csi::VolumeCapability { access_type: access, access_mode: Some(WireMode { mode: mode.into() }) }
}

fn mounted(mount: MountVolume) -> csi::VolumeCapability {
    wire(Mode::SingleNodeWriter, Some(AccessType::Mount(mount)))
}

fn with_fs(fs_type: &str) -> csi::VolumeCapability {
    mounted(MountVolume { fs_type: fs_type.into(), ..Default::default() })
}

fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
}

fn message<T: std::fmt::Debug, E: Into<Error>>(result: Result<T, E>) -> String {
    result.expect_err("is refused").into().to_string()
}

#[test]
fn malformed_and_unsupported_capabilities_differ() {
    let block = || Some(AccessType::Block(BlockVolume {}));
    let check = |wanted: &csi::VolumeCapability| capability("volume_capability", Some(wanted));
    let mut unset = wire(Mode::SingleNodeWriter, block());
    unset.access_mode = None;
    let group =
        |text: &str| mounted(MountVolume { volume_mount_group: text.into(), ..Default::default() });
    let flag =
        |text: &str| mounted(MountVolume { mount_flags: vec![text.into()], ..Default::default() });
    let malformed = [
        unset,
        wire(Mode::Unknown, block()),
        wire(Mode::SingleNodeWriter, None),
        group("users"),
        group("-1"),
        group("+1"),
        group("4294967295"),
        flag(""),
        flag(&"x".repeat(5000)),
    ];
    for wanted in &malformed {
        assert!(matches!(check(wanted), Err(Refusal::Malformed { .. })), "{wanted:?}");
    }
    assert!(matches!(capability("volume_capability", None), Err(Refusal::Malformed { .. })));
    let mut future = wire(Mode::SingleNodeWriter, block());
    future.access_mode = Some(WireMode { mode: 99 });
    let unsupported = [
        wire(Mode::MultiNodeSingleWriter, block()),
        wire(Mode::MultiNodeMultiWriter, block()),
        with_fs("ntfs"),
        future,
    ];
    for wanted in &unsupported {
        assert!(matches!(check(wanted), Err(Refusal::Unsupported { .. })), "{wanted:?}");
    }
    assert!(message(check(&unsupported[0])).contains("MULTI_NODE_SINGLE_WRITER"));
}

#[test]
fn capabilities_agree_on_one_filesystem() {
    let block = wire(Mode::SingleNodeWriter, Some(AccessType::Block(BlockVolume {})));
    let common =
        |wanted: &[csi::VolumeCapability]| common_filesystem(&capabilities(wanted).unwrap());
    assert_eq!(common(std::slice::from_ref(&block)), Ok(None));
    assert_eq!(common(&[block, with_fs("xfs")]), Ok(Some(FsType::Xfs)));
    assert_eq!(common(&[with_fs(""), with_fs("xfs")]), Ok(Some(FsType::Xfs)));
    assert_eq!(common(&[with_fs("")]), Ok(Some(FsType::Ext4)));
    assert!(common(&[with_fs("ext4"), with_fs("xfs")]).is_err());
    assert!(capabilities(&[]).is_err());
}

#[test]
fn kubernetes_keys_pass_and_unknown_keys_are_named() {
    let known = map(&[
        ("csi.storage.k8s.io/pvc/name", "x"),
        ("storage.kubernetes.io/csiProvisionerIdentity", "y"),
        ("csi.storage.k8s.io/ephemeral", "false"),
    ]);
    assert!(volume_context(&known).is_ok());
    let refused = message(keys("parameters", &map(&[("zeta", "1"), ("alpha", "s3cret")]), &[]));
    assert_eq!(refused, "parameters: unknown key \"alpha\"");
    let near = map(&[("csi.storage.k8s.io", "x")]);
    assert!(keys("parameters", &near, &[]).is_err());
    let inline = map(&[("csi.storage.k8s.io/ephemeral", "true")]);
    assert!(message(volume_context(&inline)).starts_with("volume_context: "));
}

#[test]
fn parameters_have_the_documented_values() {
    let fixed = |pairs: &[(&str, &str)]| parameters(&map(pairs)).map(|(tracking, _)| tracking);
    let sector = |text| parameters(&map(&[("sectorSize", text)])).map(|(_, sector)| sector);
    let mutable = |pairs: &[(&str, &str)]| mutable_parameters(&map(pairs));
    assert_eq!(fixed(&[]).unwrap(), ModifyVolume::default());
    assert_eq!(mutable(&[]).unwrap(), ModifyVolume::default());
    let off = ModifyVolume { change_tracking: Some(false), change_precision: None };
    assert_eq!(fixed(&[("changeTracking", "false")]).unwrap(), off);
    assert_eq!(mutable(&[("changeTracking", "false")]).unwrap(), off);
    for (value, precision) in [("exact", Precision::Exact), ("block", Precision::Block)] {
        let wanted = ModifyVolume { change_tracking: None, change_precision: Some(precision) };
        assert_eq!(mutable(&[("changePrecision", value)]).unwrap(), wanted);
        assert_eq!(fixed(&[("changePrecision", value)]).unwrap(), wanted);
    }
    for bad in ["", "yes", "True"] {
        for key in ["changeTracking", "changePrecision"] {
            let error = message(fixed(&[(key, bad)]));
            assert!(error.starts_with("parameters: ") && error.contains(key), "{error}");
            assert!(message(mutable(&[(key, bad)])).starts_with("mutable_parameters: "));
        }
    }
    assert_eq!(sector("512").unwrap(), Some(SectorSize::Bytes512));
    assert_eq!(sector("4096").unwrap(), Some(SectorSize::Bytes4096));
    for bad in ["", "0", "1024", "512B", "4Ki"] {
        let error = message(sector(bad));
        assert!(error.contains("sectorSize is neither 512 nor 4096"), "{error}");
    }
    assert!(message(mutable(&[("sectorSize", "512")])).contains("unknown key"), "immutable");
    for unknown in ["changetracking", "changeprecision", "sectorsize"] {
        assert!(message(fixed(&[(unknown, "true")])).contains("unknown key"));
    }
}

#[test]
fn a_page_is_bounded_by_the_message_size() {
    assert_eq!((page(0), page(7), page(usize::MAX)), (MAX_ENTRIES, 7, MAX_ENTRIES));
}
