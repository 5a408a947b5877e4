//! Who ends while pods run, begin or end, and comes back.

use super::rig::{Rig, SIZE};
use support::cluster::runtime::{assert_served, demanding, device_of};
use support::cluster::shared;
use support::driver::wait_for;

#[test]
#[ignore = "full tier"]
fn whoever_of_kubelet_proxy_driver_and_crust_ops_is_killed_the_pod_runs_on_and_all_is_as_before() {
    let Some(cluster) = shared() else { return };
    let Some(mut rig) = Rig::new(cluster) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("runs");
    let device = device_of(&rig, &pod, "main");
    let works = |rig: &Rig<'_>, who: &str| {
        let wrote = rig.exec(&pod, &format!("echo {who} >/data/last; cat /data/last"));
        assert_eq!(wrote, format!("{who}\n"));
        assert_eq!(device_of(rig, &pod, "second"), device, "{who}");
    };
    let is_measured = |rig: &Rig<'_>| rig.is_measured_again(&pod, "data");
    works(&rig, "all");
    is_measured(&rig);

    rig.proxy.kill();
    works(&rig, "without the proxy");
    rig.proxy.start_again();
    rig.proxy.remembers(1);
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
    // Kubelet has to find the pod first.
    is_measured(&rig);
    works(&rig, "with another kubelet and another proxy");
    rig.gone(&pod, &[]);
    rig.wait_until_detached(&id);
    watch.saw_nothing();
}

#[test]
#[ignore = "full tier"]
fn a_pod_that_goes_while_kubelet_and_proxy_are_away_leaves_nothing() {
    let Some(cluster) = shared() else { return };
    let Some(mut rig) = Rig::new(cluster) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("goes");
    rig.exec(&pod, "echo kept >/data/kept; sync");
    rig.node.halt();
    rig.proxy.kill();
    rig.forget(&pod);
    rig.proxy.start_again();
    // The API server knows nothing of the pod: what is known of its volume is what was written down.
    rig.proxy.remembers(1);
    assert_eq!(rig.handed_over(), 1, "nobody has taken it back yet");
    rig.node.resume();
    rig.wait_until_nothing_is_left(&pod, &[]);
    rig.wait_until_detached(&id);
    assert_eq!(rig.handed_over(), 0);
    rig.proxy.remembers(0);
    let again = rig.run_opted("comes");
    assert_eq!(rig.exec(&again, "cat /data/kept"), "kept\n");
    rig.gone(&again, &[]);
    watch.saw_nothing();
}

#[test]
#[ignore = "full tier"]
fn a_pod_that_begins_or_ends_while_the_proxy_is_away_does_so_once_it_is_back() {
    let Some(cluster) = shared() else { return };
    let Some(mut rig) = Rig::new(cluster) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    rig.proxy.kill();
    let spec = demanding(&rig.class, "data");
    let pod = rig.opted("waits", "data", &[rig.claimed("data")], &spec);
    rig.told_by("kubelet", "FailedMount", &pod, &["connection refused"]);
    rig.proxy.start_again();
    rig.wait_until_ready(&pod);
    assert_served(&rig, &pod);
    rig.proxy.remembers(1);

    rig.proxy.kill();
    cluster.delete(&rig.pods(), &pod.name);
    wait_for("kubelet's word of it", || {
        let log = rig.kubelet_log();
        let mut lines = log.lines().filter(|line| line.contains(&pod.uid));
        lines.any(|line| line.contains("UnmountVolume") && line.contains("connection refused"))
    });
    assert!(rig.pod_directory(&pod).exists());
    rig.proxy.start_again();
    rig.wait_until_nothing_is_left(&pod, &[]);
    rig.wait_until_detached(&id);
    rig.proxy.remembers(0);
    watch.saw_nothing();
}
