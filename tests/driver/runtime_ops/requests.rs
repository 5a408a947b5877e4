//! Accepted and refused requests.

use std::fs;
use std::os::unix::fs::{chown, symlink};

use csi_loopback::proto::crust as api;
use serde_json::{Value, json};
use tonic::Code;

use super::{mode, with_ops};
use api::volume_group_change_policy::Policy;
use support::ops::{assert_code, policy};

#[test]
fn an_entry_is_written_and_removed_as_proposed() {
    with_ops(&[], |ops| {
        let target = ops.target("mount");
        let req = api::RuntimeStageVolumeRequest {
            volume_supplemental_group: "4059".into(),
            volume_supplemental_group_change_policy: policy(Policy::OnRootMismatch),
            mount_flags: vec!["noatime,nodiratime".into(), "ro".into()],
            ..ops.staging(&target)
        };
        ops.stage(req.clone()).unwrap();
        let entry = ops.entry(&target);
        let written = fs::read(entry.path().join("mountInfo.json")).unwrap();
        let expected = json!({
            "volume-type": "block", "device": ops.device.path(), "fstype": "ext4",
            "options": ["noatime", "nodiratime", "ro"],
            "metadata": {"fsGroup": "4059", "fsGroupChangePolicy": "OnRootMismatch"},
        });
        assert_eq!(serde_json::from_slice::<Value>(&written).unwrap(), expected);
        assert_eq!((mode(&ops.socket()), mode(&ops.crust_dir())), (0o600, 0o700));
        assert_eq!(mode(entry.path()), 0o700);
        for file in ["mountInfo.json", "target"] {
            assert_eq!(mode(&entry.path().join(file)), 0o600);
        }
        assert_eq!(fs::read_to_string(entry.path().join("target")).unwrap(), target);
        // Repeated, and then changed: a reader sees one or the other.
        ops.stage(req).unwrap();
        ops.stage(ops.staging(&target)).unwrap();
        let info = entry.mount_info().unwrap().unwrap();
        assert_eq!((info.group().unwrap(), info.options), (None, vec!["noatime".to_owned()]));
        entry.write("claim-of-a-container", b"x").unwrap();
        fs::create_dir(entry.path().join("state")).unwrap();
        ops.unstage(&target).unwrap();
        assert!(!entry.path().exists());
        ops.unstage(&target).unwrap();
        ops.unstage("/never/staged").unwrap();
        assert_eq!(fs::read_dir(ops.crust_dir()).unwrap().count(), 0, "no other file remains");
    });
}

#[test]
fn each_invalid_field_is_named_in_the_error() {
    with_ops(&[], |ops| {
        type Change = fn(&mut api::RuntimeStageVolumeRequest);
        let target = ops.target("mount");
        let file = ops.target("file") + "/file";
        fs::write(&file, "").unwrap();
        let cases: &[(&str, Change)] = &[
            ("volume_type", |req| req.volume_type = None),
            ("volume_type", |req| req.volume_type = Some(api::VolumeType { r#type: 0 })),
            ("volume_type", |req| req.volume_type = Some(api::VolumeType { r#type: 2 })),
            ("volume_type", |req| req.volume_type = Some(api::VolumeType { r#type: 9 })),
            ("volume_target_path", |req| req.volume_target_path = String::new()),
            ("volume_target_path", |req| req.volume_target_path += "/"),
            ("volume_target_path", |req| req.volume_target_path += "\n"),
            ("volume_target_path", |req| req.volume_target_path += "/none"),
            ("volume_target_path", |req| req.volume_target_path += "/../../file/file"),
            ("volume_backing_path", |req| req.volume_backing_path = String::new()),
            ("volume_backing_path", |req| req.volume_backing_path = "/dev/null".into()),
            ("fs_type", |req| req.fs_type = String::new()),
            ("fs_type", |req| req.fs_type = "../../ext4".into()),
            ("mount_flags", |req| req.mount_flags = vec!["bind".into()]),
            ("volume_supplemental_group", |req| req.volume_supplemental_group = "x".into()),
            ("volume_supplemental_group", |req| req.volume_supplemental_group = "-1".into()),
            ("volume_supplemental_group", |req| {
                req.volume_supplemental_group = u32::MAX.to_string();
            }),
            ("volume_supplemental_group_change_policy", |req| {
                req.volume_supplemental_group_change_policy = policy(Policy::Always);
            }),
            ("volume_supplemental_group_change_policy", |req| {
                req.volume_supplemental_group = "1".into();
                req.volume_supplemental_group_change_policy =
                    Some(api::VolumeGroupChangePolicy { policy: 7 });
            }),
        ];
        for (field, change) in cases {
            let mut req = ops.staging(&target);
            change(&mut req);
            assert_code(ops.stage(req), Code::InvalidArgument, field);
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
fn unknown_policies_are_ignored_and_device_links_resolved() {
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
fn a_secret_mount_flag_reaches_no_error_log_or_disk() {
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
            let req = api::RuntimeStageVolumeRequest {
                mount_flags: vec![flag.into()],
                ..ops.staging(&target)
            };
            let status = ops.stage(req).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(status.message().contains("mount_flags"), "{status:?}");
            assert!(!format!("{status:?}").contains("hunter2"), "{status:?}");
        }
        // An accepted flag is on disk, but not in the log.
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
fn foreign_files_in_an_entry_are_ignored() {
    with_ops(&[], |ops| {
        let outside = ops.scratch().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("mountInfo.json"), "precious").unwrap();
        // A link instead of an entry.
        let linked = ops.target("linked");
        symlink(&outside, ops.entry(&linked).path()).unwrap();
        assert_code(ops.stage(ops.staging(&linked)), Code::Internal, "is not a directory");
        assert_code(ops.stats(&linked), Code::Internal, "is not a directory");
        ops.unstage(&linked).unwrap();
        assert!(fs::symlink_metadata(ops.entry(&linked).path()).is_err());
        assert_eq!(fs::read_to_string(outside.join("mountInfo.json")).unwrap(), "precious");
        // Files in it that are links, belong to others or are not files.
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
