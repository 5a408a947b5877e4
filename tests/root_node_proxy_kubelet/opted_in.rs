//! Pods that opt in.

use crate::cluster::Cluster;
use crate::cluster::runtime::{assert_served, demanding, device_of};
use crate::rig::Rig;
use crate::support::MIB;
use crate::support::driver::loops_named;

/// The least that an xfs has.
const SIZE: u64 = 320 * MIB;

pub fn a_claim_of_any_class_is_mounted_by_the_runtime_alone_since_its_pod_says_so(
    cluster: &Cluster,
) {
    const TEST: &str = "a_claim_of_any_class_is_mounted_by_the_runtime_alone_since_its_pod_says_so";
    let Some(rig) = Rig::new(cluster, TEST) else { return };
    let id = rig.claim("data", SIZE);
    let watch = rig.watch();
    let pod = rig.run_opted("first");
    assert_served(&rig, &pod);
    let device = device_of(&rig, &pod, "main");
    assert_eq!(
        (&device, loops_named(&id)),
        (&device_of(&rig, &pod, "second"), vec![device.clone()])
    );
    let [left] = rig.proxy.remembered().try_into().unwrap();
    assert_eq!(
        (&left["volumeHandle"], &left["podUid"]),
        (&id.as_str().into(), &pod.uid.as_str().into())
    );
    assert!(rig.proxy.number("volumes_published_with_deferred_ops_total ") >= 1);
    rig.exec(&pod, "dd if=/dev/zero of=/data/large bs=1M count=64 2>/dev/null; sync");
    let (bytes, used) = cluster.wait_for("kubelet's figures", || {
        rig.summary(&pod, "data").filter(|(_, used)| *used >= 64 * MIB)
    });
    assert!(bytes > 200 * MIB && bytes <= SIZE && used < 128 * MIB, "{bytes} {used}");
    let target = rig.target_of_claim(&pod, "data");
    assert!(target.join("deep/part").is_dir() && !target.join("init").exists());
    rig.gone(&pod, &[]);
    rig.wait_until_detached(&id);
    watch.saw_nothing();

    // Who does not ask for it has it as ever.
    let plain = rig.run("second", &[rig.claimed("data")], &demanding(&rig.class, "data"));
    assert_served(&rig, &plain);
    assert!(rig.is_on_the_host(&rig.target_of_claim(&plain, "data")));
    rig.proxy.remembers(0);
    assert_eq!(rig.exec(&plain, "cat /data/init"), "by init\nby init\n");
    rig.gone(&plain, &[]);
    rig.wait_until_detached(&id);
}
