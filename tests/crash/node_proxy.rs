//! Kills the node proxy or injects an error between any two steps. A repeated call converges after
//! the next start, and a deferral is recorded before the driver receives the request.

use std::collections::BTreeSet;
use std::path::Path;

use csi_loopback::proto::csi::v1 as csi;
use tonic::Status;

use support::cluster::node_proxy::{BoundPod, Rig, Volume};
use support::cluster::recorder::{DEFERRING, Recorder};
use support::cluster::{Cluster, NoCluster};
use support::driver::wait_for;
use support::points::Points;
use support::{have_root, path};

/// Fail points of the proxy and of its store.
const ALL: &str = "!socket.";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Publish,
    Unpublish,
}

struct Scene<'a> {
    rig: Rig<'a, Recorder<'a>>,
    points: Points,
}

impl<'a> Scene<'a> {
    fn start(cluster: &'a Cluster) -> Self {
        let points = Points::new();
        let flags = ["--fail-points", path(points.path()), "--collect-every", "1h"];
        let rig = Rig::with_flags(cluster, Recorder::start(cluster, &DEFERRING), &flags);
        Self { rig, points }
    }

    fn take(&self, step: Step, pod: &BoundPod, volume: &Volume) -> Result<(), Status> {
        match step {
            Step::Publish => self.rig.publish(pod, volume),
            Step::Unpublish => self.rig.unpublish(pod, volume),
        }
    }

    /// Checks that every deferred publish is recorded, unless it was unpublished.
    fn deferrals_are_recorded(&self, target: &Path) {
        let published = self.rig.driver.seen::<csi::NodePublishVolumeRequest>();
        let mut left = published.iter().filter(|one| one.target_path == path(target));
        let was_deferred = left.any(|one| one.defer_fs_ops);
        assert!(!was_deferred || self.rig.vol_data(target).is_some(), "{}", target.display());
    }

    /// Runs the steps of one pod, one of which is interrupted at the N-th fail point. Returns false
    /// if it has fewer points.
    fn round(&mut self, step: Step, how: &str, at: usize, seen: &mut BTreeSet<String>) -> bool {
        let name = format!("{step:?}-{how}-{at}").to_lowercase();
        let volume = self.rig.claim(&name);
        let pod = self.rig.pod(&name, &[&volume], Some(&name));
        let target = self.rig.target(&pod, &volume);
        self.rig.stage(&pod, &volume).unwrap();
        if step == Step::Unpublish {
            self.rig.publish(&pod, &volume).unwrap();
        }
        self.points.plan(how, at, ALL);
        let first = self.take(step, &pod, &volume);
        self.points.clear();
        let met = self.points.met();
        seen.extend(met.iter().cloned());
        let reached = met.len() >= at;
        if reached && how == "kill" {
            self.rig.kill_proxy();
        }
        if step == Step::Publish {
            self.deferrals_are_recorded(&target);
        }
        if reached && how == "kill" {
            self.rig.start_proxy();
        }
        assert_eq!(first.is_err(), reached, "{name}: {first:?} {met:?}");
        if reached {
            self.take(step, &pod, &volume).unwrap();
        }
        self.converged(step, &pod, &volume);
        reached
    }

    /// Checks that the step and the remaining steps of the pod complete.
    fn converged(&self, step: Step, pod: &BoundPod, volume: &Volume) {
        let target = self.rig.target(pod, volume);
        let remembered =
            |is: bool| assert_eq!(self.rig.vol_data(&target).is_some(), is, "{step:?}");
        remembered(step == Step::Publish);
        let last = self.rig.driver.seen::<csi::NodePublishVolumeRequest>().pop().unwrap();
        assert!(last.defer_fs_ops && last.target_path == path(&target));
        self.rig.unmount(pod, volume);
        remembered(false);
        // The sweep of each start removes partial entries.
        let entry = self.rig.entry(&target);
        wait_for("the end of the entry", || !entry.path().exists());
    }
}

#[test]
#[ignore = "full tier"]
fn a_node_proxy_call_converges_after_a_crash_at_any_step() {
    if !have_root() {
        return;
    }
    let cluster = match Cluster::start() {
        Ok(cluster) => cluster,
        Err(NoCluster::Unavailable(why)) => return support::skip(&why),
        Err(NoCluster::Failed(why)) => panic!("{why}"),
    };
    let mut seen = BTreeSet::new();
    let mut rounds = 0;
    let mut scene = Scene::start(&cluster);
    for how in ["kill", "error"] {
        for step in [Step::Publish, Step::Unpublish] {
            let mut at = 1;
            while scene.round(step, how, at, &mut seen) {
                at += 1;
            }
            rounds += at;
        }
    }
    support::report(&format!("{rounds} rounds"));
    let own: Vec<&str> =
        seen.iter().filter_map(|point| point.strip_prefix("node_proxy.")).collect();
    assert_eq!(own, ["forgetting", "forgotten", "published", "remembered", "unpublished"]);
}
