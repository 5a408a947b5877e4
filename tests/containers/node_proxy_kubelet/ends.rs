//! Components that stop and restart while pods run, start or end.

use super::rig::{Rig, SIZE};
use support::cluster::runtime::{assert_served, demanding, device_of};
use support::cluster::shared;
use support::driver::wait_for;

#[test]
#[ignore = "full tier"]
fn pods_survive_kills_of_kubelet_proxy_driver_and_crust_ops() {
    let Some(mut rig) = shared().and_then(Rig::new) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("runs");
    let device = device_of(&rig, &pod, "main");
    let works = |rig: &Rig<'_>, who: &str| {
        let wrote = rig.exec(&pod, &format!("echo {who} >/data/last; cat /data/last"));
        assert_eq!(wrote, format!("{who}\n"));
        assert_eq!(device_of(rig, &pod, "second"), device, "{who}");
    };
    let is_measured = |rig: &Rig<'_>| rig.wait_for_new_stats(&pod, "data");
    works(&rig, "all");
    is_measured(&rig);

    rig.proxy.kill();
    works(&rig, "without the proxy");
    rig.proxy.start_again();
    rig.proxy.wait_for_stored(1);
    is_measured(&rig);

    rig.driver.kill();
    works(&rig, "without the driver");
    rig.driver.start_again();
    is_measured(&rig);

    rig.kill_ops();
    works(&rig, "without crust_ops");
    rig.start_ops();
    is_measured(&rig);

    rig.node.halt();
    rig.proxy.kill();
    rig.proxy.start_again();
    rig.node.resume();
    // kubelet must find the pod first.
    is_measured(&rig);
    works(&rig, "with another kubelet and another proxy");
    rig.delete_and_wait(&pod, &[]);
    rig.wait_until_detached(&id);
    watch.assert_no_mounts();
}

#[test]
#[ignore = "full tier"]
fn a_pod_deleted_while_kubelet_and_proxy_are_down_is_cleaned_up() {
    let Some(mut rig) = shared().and_then(Rig::new) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("goes");
    rig.exec(&pod, "echo kept >/data/kept; sync");
    rig.node.halt();
    rig.proxy.kill();
    rig.forget(&pod);
    rig.proxy.start_again();
    // The API server has no such pod: the proxy identifies the volume by its state directory.
    rig.proxy.wait_for_stored(1);
    assert_eq!(rig.handed_over(), 1, "not unstaged yet");
    rig.node.resume();
    rig.wait_until_cleaned_up(&pod, &[]);
    rig.wait_until_detached(&id);
    wait_for("deletion of the entry", || rig.handed_over() == 0);
    rig.proxy.wait_for_stored(0);
    let again = rig.run_opted("comes");
    assert_eq!(rig.exec(&again, "cat /data/kept"), "kept\n");
    rig.delete_and_wait(&again, &[]);
    rig.wait_until_detached(&id);
    watch.assert_no_mounts();
}

#[test]
#[ignore = "full tier"]
fn pods_start_and_end_once_the_proxy_is_back() {
    let Some(mut rig) = shared().and_then(Rig::new) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    rig.proxy.kill();
    let spec = demanding(&rig.class, "data");
    let pod = rig.opted("waits", "data", &[rig.claimed("data")], &spec);
    rig.wait_for_event("kubelet", "FailedMount", &pod, &["connection refused"]);
    rig.proxy.start_again();
    rig.wait_until_ready(&pod);
    assert_served(&rig, &pod);
    rig.proxy.wait_for_stored(1);

    rig.proxy.kill();
    rig.cluster.delete(&rig.pods(), &pod.name);
    wait_for("kubelet's log message", || {
        let log = rig.kubelet_log();
        let mut lines = log.lines().filter(|line| line.contains(&pod.uid));
        lines.any(|line| line.contains("UnmountVolume") && line.contains("connection refused"))
    });
    assert!(rig.pod_directory(&pod).exists());
    rig.proxy.start_again();
    rig.wait_until_cleaned_up(&pod, &[]);
    rig.wait_until_detached(&id);
    rig.proxy.wait_for_stored(0);
    watch.assert_no_mounts();
}
