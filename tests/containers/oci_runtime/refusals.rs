//! Refusals: the caller gets the reason, and no mount or claim remains.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use serde_json::json;

use support::runtime::{bind, bind_with, info, on_node};
use support::{MIB, path};

#[test]
fn a_container_that_shares_its_mounts_is_refused() {
    on_node(|node| {
        let (device, target) = node.volume("v", &[]);
        let mounts = [bind(target.as_path(), "/v")];
        let other = node.path("rootfs");
        let propagating =
            node.container(&[mounts[0].clone(), bind_with(&other, "/o", &["rbind", "rshared"])]);
        propagating.refused("Bidirectional");
        node.container(&[bind_with(target.as_path(), "/v", &["rbind", "shared"])])
            .refused("/v is shared");
        let mut rootfs = node.container(&mounts);
        rootfs.spec["linux"]["rootfsPropagation"] = json!("rshared");
        rootfs.refused("rootfsPropagation");
        let mut user = node.container(&mounts);
        user.spec["linux"]["namespaces"] = json!([{"type": "mount"}, {"type": "user"}]);
        user.spec["linux"]["uidMappings"] = json!([{"containerID": 0, "hostID": 1000, "size": 1}]);
        user.refused("hostUsers");
        let mut joins = node.container(&mounts);
        joins.spec["linux"]["namespaces"] = json!([{"type": "mount", "path": "/proc/1/ns/mnt"}]);
        joins.refused("joins a mount namespace");
        let mut none = node.container(&mounts);
        none.spec["linux"]["namespaces"] = json!([{"type": "pid"}]);
        none.refused("mount namespace");
        node.assert_gone(&device, &target);
    });
}

#[test]
fn a_label_is_refused_without_selinux() {
    on_node(|node| {
        if std::path::Path::new("/sys/fs/selinux/status").exists() {
            println!("SKIPPED: label refused: SELinux is enabled; labels are not tested then");
            return;
        }
        let (device, target) = node.volume("v", &[]);
        let mut labelled = node.container(&[bind(target.as_path(), "/v")]);
        labelled.spec["linux"]["mountLabel"] = json!("system_u:object_r:container_file_t:s0:c1,c2");
        labelled.refused("SELinux is disabled");
        node.assert_gone(&device, &target);
    });
}

#[test]
fn entries_are_validated_before_use() {
    on_node(|node| {
        let (device, target) = node.volume("v", &[]);
        let entry = node.entry(&target);
        let mounts = [bind(target.as_path(), "/v")];
        let good = fs::read(entry.path().join("mountInfo.json")).unwrap();
        let of = |device: &str, fs_type: &str, options: &[&str]| {
            info(std::path::Path::new(device), fs_type, options).to_json()
        };
        let loop_device = path(&device);
        for (text, words) in [
            (b"".to_vec(), "mountInfo.json"),
            (vec![b' '; 1 << 20], "larger than"),
            (br#"{"volume-type":"network","device":"a","fstype":"nfs"}"#.to_vec(), "volume-type"),
            (of("/etc/passwd", "ext4", &[]), "device: must be a path below /dev"),
            (of("/dev/null", "ext4", &[]), "device: is not a block device"),
            (of(loop_device, "proc", &[]), "fstype"),
            (of(loop_device, "xfs", &[]), "xfs"),
            (of(loop_device, "ext4", &["bind"]), "options"),
            (of(loop_device, "ext4", &["no-such-option"]), "ext4"),
        ] {
            entry.write("mountInfo.json", &text).unwrap();
            node.container(&mounts).refused(words);
        }
        // A file that others can write to.
        let file = entry.path().join("mountInfo.json");
        entry.write("mountInfo.json", &good).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o622)).unwrap();
        node.container(&mounts).refused("only its owner may write to");
        fs::remove_file(&file).unwrap();
        symlink("/etc/hostname", &file).unwrap();
        node.container(&mounts).refused("mountInfo.json");
        fs::remove_file(&file).unwrap();
        node.container(&mounts).refused("crust_ops is staging or unstaging");
        entry.write("mountInfo.json", &good).unwrap();
        // An entry in a directory that others can write to.
        let crust = node.path("crust");
        fs::set_permissions(&crust, fs::Permissions::from_mode(0o777)).unwrap();
        node.container(&mounts).refused("is writable by its group or by others");
        fs::set_permissions(&crust, fs::Permissions::from_mode(0o700)).unwrap();
        let container = node.container(&mounts);
        container.start();
        container.delete();
        node.assert_gone(&device, &target);
    });
}

#[test]
fn hostile_claims_are_reported_and_removed() {
    on_node(|node| {
        let (device, target) = node.volume("v", &[]);
        let entry = node.entry(&target);
        let mounts = [bind(target.as_path(), "/v")];
        let name = format!("container-{}", "0".repeat(64));
        for bad in ["", "{}", "[[[", r#"{"container":{"root":null,"id":"x"}}"#] {
            entry.write(&name, bad.as_bytes()).unwrap();
            node.container(&mounts).refused(&name);
        }
        entry.remove(&name).unwrap();
        symlink("/etc/passwd", entry.path().join(&name)).unwrap();
        node.container(&mounts).refused(&name);
        entry.remove(&name).unwrap();
        // A foreign runtime-cli is replaced, and removed in the end.
        entry.write("runtime-cli", b"/bin/rm -rf /").unwrap();
        let container = node.container(&mounts);
        container.start();
        assert_eq!(entry.runtime_cli().unwrap(), Some(node.program.clone()));
        container.delete();
        node.assert_gone(&device, &target);
    });
}

#[test]
fn a_duplicate_create_keeps_the_first_containers_volume() {
    on_node(|node| {
        let (device, target) = node.volume("v", &[]);
        let container = node.container(&[bind(target.as_path(), "/v")]);
        container.start();
        let output = container.create();
        assert_eq!(output.status.code(), Some(1));
        assert!(node.logged().contains("delete it first"), "{}", node.logged());
        container.sh("echo x >/v/file");
        assert!(node.entry(&target).runtime_cli().unwrap().is_some());
        container.delete();
        node.assert_gone(&device, &target);
    });
}

#[test]
fn invalid_directories_and_settings_are_refused() {
    on_node(|node| {
        let (device, target) = node.volume("v", &[]);
        let mounts = [bind(target.as_path(), "/v")];
        let work = node.path("work");
        fs::create_dir(&work).unwrap();
        fs::set_permissions(&work, fs::Permissions::from_mode(0o777)).unwrap();
        node.container(&mounts).refused("workDir");
        fs::remove_dir(&work).unwrap();
        symlink("/tmp", &work).unwrap();
        node.container(&mounts).refused("workDir");
        fs::remove_file(&work).unwrap();
        node.configure_as("crustDirectory: /nowhere\n");
        node.container(&mounts).refused("oci-runtime.yaml");
        node.configure(path(&node.path("no-such-runtime")));
        node.container(&mounts).refused("no-such-runtime");
        node.configure("runc");
        // The program must have the name by which crust_ops calls it.
        let container = node.container(&mounts);
        container.write();
        let command = node.command(std::path::Path::new(support::driver::binary()));
        let words = command.get_args().map(|word| word.to_owned()).collect::<Vec<_>>();
        let mut command = std::process::Command::new(command.get_program());
        command.env("CSI_LOOPBACK_RUNC_CONFIG", node.path("oci-runtime.yaml"));
        let output = command
            .args(["oci-runtime", "--"])
            .args(words)
            .args(container.creation())
            .output()
            .unwrap();
        assert!(!output.status.success());
        assert!(node.logged().contains("csi-loopback-runc"), "{}", node.logged());
        node.assert_gone(&device, &target);
    });
}

#[test]
fn restore_with_a_deferred_volume_is_refused() {
    on_node(|node| {
        let device = node.device("v", "ext4", 32 * MIB);
        let target = node.stage("v", &info(&device, "ext4", &[]));
        let container = node.container(&[bind(target.as_path(), "/v")]);
        container.write();
        let output = node.call(&["restore", "--bundle", path(&container.bundle), &container.id]);
        assert!(!output.status.success());
        assert!(node.logged().contains("cannot be restored"), "{}", node.logged());
        node.assert_gone(&device, &target);
    });
}
