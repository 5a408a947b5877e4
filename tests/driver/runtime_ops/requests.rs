//! What is handed over, and what is refused.

use std::fs;
use std::os::unix::fs::{chown, symlink};

use csi_loopback::proto::crust as api;
use serde_json::{Value, json};
use tonic::Code;

use super::{mode, with_ops};
use api::volume_group_change_policy::Policy;
use support::ops::{assert_code, policy};

#[test]
fn a_volume_is_handed_over_as_the_proposal_says_and_taken_back_with_all_that_a_runtime_left() {
    with_ops(&[], |ops| {
        let target = ops.target("mount");
        let asked = api::RuntimeStageVolumeRequest {
            volume_supplemental_group: "4059".into(),
            volume_supplemental_group_change_policy: policy(Policy::OnRootMismatch),
            mount_flags: vec!["noatime,nodiratime".into(), "ro".into()],
            ..ops.staging(&target)
        };
        ops.stage(asked.clone()).unwrap();
        let entry = ops.entry(&target);
        let written = fs::read(entry.path().join("mountInfo.json")).unwrap();
        let expected = json!({
            "volume-type": "block", "device": ops.device.path(), "fstype": "ext4",
            "options": ["noatime", "nodiratime", "ro"],
            "metadata": {"fsGroup": "4059", "fsGroupChangePolicy": "OnRootMismatch"},
        });
        assert_eq!(serde_json::from_slice::<Value>(&written).unwrap(), expected);
        assert_eq!(mode(&ops.crust_dir()), 0o700);
        assert_eq!(mode(entry.path()), 0o700);
        for file in ["mountInfo.json", "target"] {
            assert_eq!(mode(&entry.path().join(file)), 0o600);
        }
        assert_eq!(fs::read_to_string(entry.path().join("target")).unwrap(), target);
        // Again, and then otherwise: whoever reads sees one or the other.
        ops.stage(asked).unwrap();
        ops.stage(ops.staging(&target)).unwrap();
        let info = entry.mount_info().unwrap().unwrap();
        assert_eq!((info.group().unwrap(), info.options), (None, vec!["noatime".to_owned()]));
        entry.write("claim-of-a-container", b"x").unwrap();
        fs::create_dir(entry.path().join("state")).unwrap();
        ops.unstage(&target).unwrap();
        assert!(!entry.path().exists());
        ops.unstage(&target).unwrap();
        ops.unstage("/never/staged").unwrap();
        assert_eq!(fs::read_dir(ops.crust_dir()).unwrap().count(), 0, "nothing is left beside");
    });
}

#[test]
fn each_part_of_a_request_that_cannot_be_is_refused_by_its_name() {
    with_ops(&[], |ops| {
        type Change = fn(&mut api::RuntimeStageVolumeRequest);
        let target = ops.target("mount");
        let file = ops.target("file") + "/file";
        fs::write(&file, "").unwrap();
        let cases: &[(&str, Change)] = &[
            ("volume_type", |asked| asked.volume_type = None),
            ("volume_type", |asked| asked.volume_type = Some(api::VolumeType { r#type: 0 })),
            ("volume_type", |asked| asked.volume_type = Some(api::VolumeType { r#type: 2 })),
            ("volume_type", |asked| asked.volume_type = Some(api::VolumeType { r#type: 9 })),
            ("volume_target_path", |asked| asked.volume_target_path = String::new()),
            ("volume_target_path", |asked| asked.volume_target_path = "relative".into()),
            ("volume_target_path", |asked| asked.volume_target_path += "/../other"),
            ("volume_target_path", |asked| asked.volume_target_path += "/"),
            ("volume_target_path", |asked| asked.volume_target_path += "\n"),
            ("volume_target_path", |asked| asked.volume_target_path += "/none"),
            ("volume_target_path", |asked| asked.volume_target_path += "/../../file/file"),
            ("volume_backing_path", |asked| asked.volume_backing_path = String::new()),
            ("volume_backing_path", |asked| asked.volume_backing_path = "loop0".into()),
            ("volume_backing_path", |asked| {
                asked.volume_backing_path = "/dev/../etc/passwd".into()
            }),
            ("volume_backing_path", |asked| asked.volume_backing_path = "/etc/passwd".into()),
            ("volume_backing_path", |asked| asked.volume_backing_path = "/dev/null".into()),
            ("volume_backing_path", |asked| asked.volume_backing_path = "/dev/none-such".into()),
            ("fs_type", |asked| asked.fs_type = String::new()),
            ("fs_type", |asked| asked.fs_type = "../../ext4".into()),
            ("mount_flags", |asked| asked.mount_flags = vec!["bind".into()]),
            ("mount_flags", |asked| asked.mount_flags = vec!["ro,remount".into()]),
            ("mount_flags", |asked| asked.mount_flags = vec!["a\nb".into()]),
            ("mount_flags", |asked| asked.mount_flags = vec!["a".into(); 100]),
            ("volume_supplemental_group", |asked| asked.volume_supplemental_group = "x".into()),
            ("volume_supplemental_group", |asked| asked.volume_supplemental_group = "-1".into()),
            ("volume_supplemental_group", |asked| {
                asked.volume_supplemental_group = u32::MAX.to_string();
            }),
            ("volume_supplemental_group_change_policy", |asked| {
                asked.volume_supplemental_group_change_policy = policy(Policy::Always);
            }),
            ("volume_supplemental_group_change_policy", |asked| {
                asked.volume_supplemental_group = "1".into();
                asked.volume_supplemental_group_change_policy =
                    Some(api::VolumeGroupChangePolicy { policy: 7 });
            }),
        ];
        for (field, change) in cases {
            let mut asked = ops.staging(&target);
            change(&mut asked);
            assert_code(ops.stage(asked), Code::InvalidArgument, field);
        }
        assert_eq!(fs::read_dir(ops.crust_dir()).unwrap().count(), 0, "nothing was written");
        for path in ["", "relative", "/a/../b", "/a\u{7}"] {
            assert_code(ops.unstage(path), Code::InvalidArgument, "volume_target_path");
            assert_code(ops.stats(path), Code::InvalidArgument, "volume_target_path");
            assert_code(ops.expand(path, 0, 0), Code::InvalidArgument, "volume_target_path");
        }
        assert_code(ops.expand(&target, -1, 0), Code::InvalidArgument, "required_bytes");
        assert_code(ops.expand(&target, 0, -1), Code::InvalidArgument, "limit_bytes");
        assert_code(ops.expand(&target, 2, 1), Code::InvalidArgument, "limit_bytes");
    });
}

#[test]
fn a_policy_that_is_unknown_is_none_and_a_link_to_a_device_is_the_device() {
    with_ops(&[], |ops| {
        let target = ops.target("mount");
        let link = format!("/dev/csi-loopback-test-{}", std::process::id());
        symlink(ops.device.path(), &link).unwrap();
        let staged = ops.stage(api::RuntimeStageVolumeRequest {
            volume_backing_path: link.clone(),
            volume_supplemental_group_change_policy: policy(Policy::Unknown),
            ..ops.staging(&target)
        });
        fs::remove_file(&link).unwrap();
        staged.unwrap();
        let info = ops.entry(&target).mount_info().unwrap().unwrap();
        assert_eq!(info.device, ops.device.path());
        assert_eq!(info.group().unwrap(), None);
    });
}

#[test]
fn a_mount_flag_that_is_a_secret_reaches_no_error_no_log_and_no_disk() {
    with_ops(&[], |ops| {
        let target = ops.target("mount");
        for flag in [
            "password=hunter2",
            "credentials=/hunter2",
            "secret=hunter2",
            "username=hunter2",
            "keyring=hunter2",
            "hunter2 token",
            "ro,pass=hunter2",
        ] {
            let asked = api::RuntimeStageVolumeRequest {
                mount_flags: vec![flag.into()],
                ..ops.staging(&target)
            };
            let status = ops.stage(asked).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(status.message().contains("mount_flags"), "{status:?}");
            assert!(!format!("{status:?}").contains("hunter2"), "{status:?}");
        }
        // What is taken is on disk, and not in the log either.
        let noted = api::RuntimeStageVolumeRequest {
            mount_flags: vec!["data=hunter2".into()],
            ..ops.staging(&target)
        };
        ops.stage(noted).unwrap();
        let log = ops.log();
        assert!(log.contains("RuntimeStageVolume") && log.contains(&target), "{log}");
        assert!(log.contains("code=\"OK\"") && log.contains("INVALID_ARGUMENT"), "{log}");
        assert!(!log.contains("hunter2"), "{log}");
    });
}

#[test]
fn what_lies_in_an_entry_that_is_not_ours_is_not_followed_and_not_believed() {
    with_ops(&[], |ops| {
        let outside = ops.scratch().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("mountInfo.json"), "precious").unwrap();
        // A link in the place of an entry.
        let linked = ops.target("linked");
        symlink(&outside, ops.entry(&linked).path()).unwrap();
        assert_code(ops.stage(ops.staging(&linked)), Code::Internal, "is not a directory");
        assert_code(ops.stats(&linked), Code::Internal, "is not a directory");
        ops.unstage(&linked).unwrap();
        assert!(fs::symlink_metadata(ops.entry(&linked).path()).is_err());
        assert_eq!(fs::read_to_string(outside.join("mountInfo.json")).unwrap(), "precious");
        // Files in it that are links, others' or no files.
        let hostile = ops.target("hostile");
        ops.stage(ops.staging(&hostile)).unwrap();
        let info = ops.entry(&hostile).path().join("mountInfo.json");
        let good = fs::read(&info).unwrap();
        let spoil: [(&str, &dyn Fn()); 6] = [
            ("a link", &|| symlink(outside.join("mountInfo.json"), &info).unwrap()),
            ("a directory", &|| fs::create_dir(&info).unwrap()),
            ("a pipe", &|| nix::unistd::mkfifo(&info, nix::sys::stat::Mode::S_IRWXU).unwrap()),
            ("another's", &|| {
                fs::write(&info, &good).unwrap();
                chown(&info, Some(65534), Some(65534)).unwrap();
            }),
            ("too large", &|| fs::write(&info, vec![b' '; 70_000]).unwrap()),
            ("nonsense", &|| {
                fs::write(
                    &info,
                    r#"{"volume-type":"block","device":"/etc/passwd","fstype":"ext4"}"#,
                )
                .unwrap()
            }),
        ];
        for (what, spoil) in spoil {
            fs::remove_file(&info).or_else(|_| fs::remove_dir(&info)).unwrap();
            spoil();
            assert_code(ops.stats(&hostile), Code::Internal, "");
            if what == "a directory" {
                assert_code(ops.stage(ops.staging(&hostile)), Code::Internal, "mountInfo.json");
                continue;
            }
            ops.stage(ops.staging(&hostile)).unwrap_or_else(|status| panic!("{what}: {status:?}"));
            assert_eq!(fs::read(&info).unwrap(), good, "{what}");
        }
        assert_eq!(fs::read_to_string(outside.join("mountInfo.json")).unwrap(), "precious");
    });
}
