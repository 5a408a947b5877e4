//! The node permissions in deploy/node-proxy: root's files, but none of root's capabilities.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use support::cluster::shared;

use tonic::Code;

use support::cluster::node_proxy::Rig;
use support::cluster::node_proxy::node_proxy_rules;
use support::cluster::recorder::{DEFERRING, Recorder};
use support::driver::{assert_refused, wait_for};

/// The group of the driver's socket, and the owner of a volume's content.
const OTHER_USER: u32 = 65532;

#[test]
fn root_without_capabilities_is_enough() {
    let Some(cluster) = shared() else { return };
    let recorder = Recorder::start(cluster, &DEFERRING);
    // The socket as deploy/base configures the driver.
    let mode = |path: &std::path::Path, mode| {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap()
    };
    chown(recorder.socket(), None, Some(OTHER_USER)).unwrap();
    mode(&recorder.socket(), 0o660);
    let mut rig = Rig::prepare(cluster, recorder, &node_proxy_rules());
    // Kubelet's pod directory and the container's state directory.
    mode(&rig.kubelet().join("pods"), 0o750);
    fs::create_dir(rig.state_dir()).unwrap();
    mode(&rig.state_dir(), 0o755);
    rig.confined = true;
    rig.set_flags(&["--collect-every", "100ms"]);
    rig.start_proxy();
    let status = format!("/proc/{}/status", rig.proxy().pid());
    let status = fs::read_to_string(status).unwrap();
    for set in ["CapPrm", "CapEff", "CapBnd"] {
        assert!(status.contains(&format!("{set}:\t0000000000000000")), "{status}");
    }

    let (left, plain, mounted) = (rig.claim("left"), rig.claim("plain"), rig.claim("mounted"));
    let pod = rig.pod("app", &[&left], Some("left"));
    let host = rig.pod("host", &[&plain], None);
    let target = rig.mount(&pod, &left).unwrap();
    rig.mount(&host, &plain).unwrap();
    assert!(rig.vol_data(&target).is_some());
    // A volume's content may belong to any user.
    chown(&target, Some(OTHER_USER), Some(OTHER_USER)).unwrap();
    mode(&target, 0o700);
    rig.restart_proxy();
    assert_eq!(rig.metric("csi_loopback_deferred_volumes"), 1.0);
    rig.unmount(&pod, &left);
    assert!(rig.vol_data(&target).is_none());

    // The proxy sees that a target is missing, and what is mounted.
    let pod = rig.pod("gone", &[&mounted], Some("mounted"));
    let target = rig.mount(&pod, &mounted).unwrap();
    fs::remove_dir(&target).unwrap();
    wait_for("the volume is forgotten", || rig.vol_data(&target).is_none());
    fs::create_dir(&target).unwrap();
    let tmpfs =
        std::process::Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&target).status();
    assert!(tmpfs.unwrap().success());
    let refused = rig.publish(&pod, &mounted);
    nix::mount::umount(&target).unwrap();
    assert_refused(refused, Code::FailedPrecondition, "mounted on the host", "a mounted target");
    rig.unmount(&host, &plain);
}
