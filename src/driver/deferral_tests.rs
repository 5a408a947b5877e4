use super::*;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode as WireMode, BlockVolume};

const KEPT: Volume = Volume::Persistent;

fn used(access: AccessType, mode: Mode) -> Option<csi::VolumeCapability> {
    let access_mode = Some(WireMode { mode: mode.into() });
    Some(csi::VolumeCapability { access_type: Some(access), access_mode })
}

fn mount(group: &str, policy: &str) -> MountVolume {
    MountVolume {
        volume_supplemental_group: group.to_owned(),
        volume_supplemental_group_change_policy: policy.to_owned(),
        ..Default::default()
    }
}

fn asked(mount: MountVolume) -> csi::NodePublishVolumeRequest {
    csi::NodePublishVolumeRequest {
        volume_id: "v".into(),
        volume_capability: used(AccessType::Mount(mount), Mode::SingleNodeSingleWriter),
        ..Default::default()
    }
}

fn deferred(mount: MountVolume) -> csi::NodePublishVolumeRequest {
    csi::NodePublishVolumeRequest { defer_fs_ops: true, ..asked(mount) }
}

/// As the driver does.
fn check(asked: &csi::NodePublishVolumeRequest, volume: Volume) -> Checked<Option<Deferral>> {
    let capability = request::capability("volume_capability", asked.volume_capability.as_ref())?;
    of_publish(asked, &capability, volume)
}

/// The field and the words of a refusal.
fn refused(asked: &csi::NodePublishVolumeRequest, volume: Volume) -> (&'static str, String) {
    match check(asked, volume) {
        Err(Error::Invalid { field, reason }) => (field, reason),
        other => panic!("{other:?}: {asked:?}"),
    }
}

fn group(group: u32, policy: Option<GroupPolicy>) -> Option<Deferral> {
    Some(Deferral { group: Some(group), policy })
}

#[test]
fn a_volume_is_left_to_a_runtime_where_the_field_asks_for_it() {
    for kind in [KEPT, Volume::Inline] {
        assert_eq!(check(&asked(mount("", "")), kind).unwrap(), None);
        assert_eq!(check(&deferred(mount("", "")), kind).unwrap(), Some(Deferral::default()));
    }
}

#[test]
fn group_and_policy_are_passed_on() {
    use GroupPolicy::{Always, OnRootMismatch};
    for (text, policy) in
        [("", None), ("Always", Some(Always)), ("OnRootMismatch", Some(OnRootMismatch))]
    {
        assert_eq!(check(&deferred(mount("2000", text)), KEPT).unwrap(), group(2000, policy));
    }
    let both = |supplemental: &str, of_kubelet: &str| {
        deferred(MountVolume {
            volume_mount_group: of_kubelet.to_owned(),
            ..mount(supplemental, "")
        })
    };
    // Kubelets that know nothing of the other field.
    assert_eq!(check(&both("", "2000"), KEPT).unwrap(), group(2000, None));
    assert_eq!(check(&both("2000", "2000"), KEPT).unwrap(), group(2000, None));
    let (field, words) = refused(&both("2000", "3000"), KEPT);
    assert_eq!(field, "volume_capability");
    assert!(words.contains("volume_supplemental_group and volume_mount_group differ"), "{words}");
}

#[test]
fn a_group_or_policy_without_what_it_needs_is_refused() {
    for (asked, words) in [
        (asked(mount("2000", "")), "set defer_fs_ops"),
        (asked(mount("2000", "Always")), "set defer_fs_ops"),
        (asked(mount("", "Always")), "goes with volume_supplemental_group only"),
        (deferred(mount("", "OnRootMismatch")), "goes with volume_supplemental_group only"),
        (deferred(mount("2000", "Never")), "neither Always nor OnRootMismatch"),
        (deferred(mount("2000", "always")), "neither Always nor OnRootMismatch"),
        (deferred(mount("staff", "")), "volume_supplemental_group is not a group id"),
        (deferred(mount("4294967295", "")), "volume_supplemental_group is not a group id"),
        (deferred(mount("-1", "")), "volume_supplemental_group is not a group id"),
        (deferred(mount("+1", "")), "volume_supplemental_group is not a group id"),
    ] {
        let (field, reason) = refused(&asked, KEPT);
        assert_eq!(field, "volume_capability");
        assert!(reason.contains(words), "{reason}");
    }
    // A policy needs its group itself, and not another one.
    let other = MountVolume { volume_mount_group: "2000".into(), ..mount("", "Always") };
    assert_eq!(refused(&deferred(other), KEPT).0, "volume_capability");
}

#[test]
fn one_writer_or_none() {
    let modes = [
        (Mode::SingleNodeSingleWriter, true),
        (Mode::SingleNodeReaderOnly, true),
        (Mode::MultiNodeReaderOnly, true),
        (Mode::SingleNodeWriter, false),
        (Mode::SingleNodeMultiWriter, false),
    ];
    for (mode, fits) in modes {
        let mut asked = deferred(mount("", ""));
        asked.volume_capability = used(AccessType::Mount(mount("", "")), mode);
        assert_eq!(check(&asked, KEPT).is_ok(), fits, "{mode:?}");
        if !fits {
            let (field, words) = refused(&asked, KEPT);
            assert_eq!(field, "volume_capability");
            assert!(words.contains("access_mode: "), "{words}");
            assert!(words.contains("ReadWriteOncePod"), "{words}");
        }
        let readonly = csi::NodePublishVolumeRequest { readonly: true, ..asked.clone() };
        assert!(check(&readonly, KEPT).is_ok());
        let flags = MountVolume { mount_flags: vec!["ro".into()], ..Default::default() };
        let ro = used(AccessType::Mount(flags), mode);
        let ro = csi::NodePublishVolumeRequest { volume_capability: ro, ..asked.clone() };
        assert!(check(&ro, KEPT).is_ok());
        // There is one pod of it.
        assert!(check(&asked, Volume::Inline).is_ok());
    }
}

#[test]
fn a_secret_and_a_block_device_are_not_left_to_a_runtime() {
    let secrets = [("password".to_owned(), "hunter2".to_owned())];
    let secret =
        csi::NodePublishVolumeRequest { secrets: secrets.into(), ..deferred(mount("", "")) };
    let (field, words) = refused(&secret, KEPT);
    assert!(field == "secrets" && !words.contains("hunter2"), "{words}");
    let block = used(AccessType::Block(BlockVolume {}), Mode::SingleNodeSingleWriter);
    let raw = |defer_fs_ops| csi::NodePublishVolumeRequest {
        volume_capability: block.clone(),
        defer_fs_ops,
        ..Default::default()
    };
    assert_eq!(refused(&raw(true), KEPT).0, "defer_fs_ops");
    assert_eq!(check(&raw(false), KEPT).unwrap(), None);
}

#[test]
fn what_is_off_is_refused_with_the_flag() {
    let metrics = || Metrics::new(Vec::new());
    let (on, off) = (Deferrals::new(true, metrics()), Deferrals::new(false, metrics()));
    assert!(off.check_field(false).is_ok() && on.check_field(true).is_ok());
    let Err(Error::Precondition(words)) = off.check_field(true) else { panic!() };
    assert!(words.starts_with("defer_fs_ops: ") && words.contains("--enable-defer-fs-ops"));
}
