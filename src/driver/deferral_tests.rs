use super::*;
use csi::volume_capability::access_mode::Mode;
use csi::volume_capability::{AccessMode as WireMode, BlockVolume, MountVolume};
use storage::GroupPolicy;

const PERSISTENT: Volume = Volume::Persistent;

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

fn publish_request(mount: MountVolume) -> csi::NodePublishVolumeRequest {
    csi::NodePublishVolumeRequest {
        volume_id: "v".into(),
        volume_capability: used(AccessType::Mount(mount), Mode::SingleNodeSingleWriter),
        ..Default::default()
    }
}

fn deferred(mount: MountVolume) -> csi::NodePublishVolumeRequest {
    csi::NodePublishVolumeRequest { defer_fs_ops: true, ..publish_request(mount) }
}

/// Checks a request like the driver.
fn check(req: &csi::NodePublishVolumeRequest, volume: Volume) -> Checked<Option<Deferral>> {
    let capability = request::capability("volume_capability", req.volume_capability.as_ref())?;
    from_publish(req, &capability, volume)
}

/// The field and reason of a refusal.
fn refusal(req: &csi::NodePublishVolumeRequest, volume: Volume) -> (&'static str, String) {
    match check(req, volume) {
        Err(Error::Invalid { field, reason }) => (field, reason),
        other => panic!("{other:?}: {req:?}"),
    }
}

fn group(group: u32, policy: Option<GroupPolicy>) -> Option<Deferral> {
    Some(Deferral { group: Some(group), policy })
}

#[test]
fn the_field_defers_a_volume() {
    for kind in [PERSISTENT, Volume::Inline] {
        assert_eq!(check(&publish_request(mount("", "")), kind).unwrap(), None);
        assert_eq!(check(&deferred(mount("", "")), kind).unwrap(), Some(Deferral::default()));
    }
}

#[test]
fn group_and_policy_are_passed_on() {
    use GroupPolicy::{Always, OnRootMismatch};
    for (text, policy) in
        [("", None), ("Always", Some(Always)), ("OnRootMismatch", Some(OnRootMismatch))]
    {
        assert_eq!(check(&deferred(mount("2000", text)), PERSISTENT).unwrap(), group(2000, policy));
    }
    let both = |supplemental: &str, mount_group: &str| {
        deferred(MountVolume {
            volume_mount_group: mount_group.to_owned(),
            ..mount(supplemental, "")
        })
    };
    // Kubelets that do not know the supplemental group.
    assert_eq!(check(&both("", "2000"), PERSISTENT).unwrap(), group(2000, None));
    assert_eq!(check(&both("2000", "2000"), PERSISTENT).unwrap(), group(2000, None));
    let (field, message) = refusal(&both("2000", "3000"), PERSISTENT);
    assert_eq!(field, "volume_capability");
    assert!(
        message.contains("volume_supplemental_group and volume_mount_group differ"),
        "{message}"
    );
}

#[test]
fn an_incomplete_group_or_policy_is_refused() {
    for (req, message) in [
        (publish_request(mount("2000", "")), "set defer_fs_ops"),
        (publish_request(mount("2000", "Always")), "set defer_fs_ops"),
        (publish_request(mount("", "Always")), "requires volume_supplemental_group"),
        (deferred(mount("", "OnRootMismatch")), "requires volume_supplemental_group"),
        (deferred(mount("2000", "Never")), "neither Always nor OnRootMismatch"),
        (deferred(mount("2000", "always")), "neither Always nor OnRootMismatch"),
        (deferred(mount("staff", "")), "volume_supplemental_group is not a decimal group id"),
        (deferred(mount("4294967295", "")), "volume_supplemental_group is not a decimal group id"),
        (deferred(mount("-1", "")), "volume_supplemental_group is not a decimal group id"),
        (deferred(mount("+1", "")), "volume_supplemental_group is not a decimal group id"),
    ] {
        let (field, reason) = refusal(&req, PERSISTENT);
        assert_eq!(field, "volume_capability");
        assert!(reason.contains(message), "{reason}");
    }
    // A policy needs volume_supplemental_group, not volume_mount_group.
    let other = MountVolume { volume_mount_group: "2000".into(), ..mount("", "Always") };
    assert_eq!(refusal(&deferred(other), PERSISTENT).0, "volume_capability");
}

#[test]
fn a_deferred_volume_has_at_most_one_writer() {
    let modes = [
        (Mode::SingleNodeSingleWriter, true),
        (Mode::SingleNodeReaderOnly, true),
        (Mode::MultiNodeReaderOnly, true),
        (Mode::SingleNodeWriter, false),
        (Mode::SingleNodeMultiWriter, false),
    ];
    for (mode, fits) in modes {
        let mut req = deferred(mount("", ""));
        req.volume_capability = used(AccessType::Mount(mount("", "")), mode);
        assert_eq!(check(&req, PERSISTENT).is_ok(), fits, "{mode:?}");
        if !fits {
            let (field, message) = refusal(&req, PERSISTENT);
            assert_eq!(field, "volume_capability");
            assert!(message.contains("access_mode: "), "{message}");
            assert!(message.contains("ReadWriteOncePod"), "{message}");
        }
        let readonly = csi::NodePublishVolumeRequest { readonly: true, ..req.clone() };
        assert!(check(&readonly, PERSISTENT).is_ok());
        let flags = MountVolume { mount_flags: vec!["ro".into()], ..Default::default() };
        let ro = used(AccessType::Mount(flags), mode);
        let ro = csi::NodePublishVolumeRequest { volume_capability: ro, ..req.clone() };
        assert!(check(&ro, PERSISTENT).is_ok());
        // An inline volume belongs to one pod.
        assert!(check(&req, Volume::Inline).is_ok());
    }
}

#[test]
fn secrets_and_block_volumes_cannot_be_deferred() {
    let secrets = [("password".to_owned(), "hunter2".to_owned())];
    let secret =
        csi::NodePublishVolumeRequest { secrets: secrets.into(), ..deferred(mount("", "")) };
    let (field, message) = refusal(&secret, PERSISTENT);
    assert!(field == "secrets" && !message.contains("hunter2"), "{message}");
    let block = used(AccessType::Block(BlockVolume {}), Mode::SingleNodeSingleWriter);
    let raw = |defer_fs_ops| csi::NodePublishVolumeRequest {
        volume_capability: block.clone(),
        defer_fs_ops,
        ..Default::default()
    };
    assert_eq!(refusal(&raw(true), PERSISTENT).0, "defer_fs_ops");
    assert_eq!(check(&raw(false), PERSISTENT).unwrap(), None);
}
