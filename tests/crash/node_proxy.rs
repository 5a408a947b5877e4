//! The node proxy, killed or failed between any two steps of what it does: what is repeated after the next start converges, and the
//! driver is never told to leave a volume to a runtime before that is written down.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use csi_loopback::proto::csi::v1 as csi;
use tonic::Status;

use support::cluster::node_proxy::{Bound, Rig, Volume};
use support::cluster::recorder::{DEFERRING, Recorder};
use support::cluster::{Cluster, NoCluster};
use support::driver::wait_for;
use support::{have_root, path};

/// Those of the proxy's own and those of the files that it keeps.
const ALL: &str = "!socket.";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Publish,
    Unpublish,
}

struct Scene<'a> {
    rig: Rig<'a, Recorder<'a>>,
    plan: PathBuf,
}

impl<'a> Scene<'a> {
    fn start(cluster: &'a Cluster) -> Self {
        let plan = cluster.scratch().join(cluster.unique("plan"));
        fs::create_dir(&plan).unwrap();
        let flags = ["--fail-points", path(&plan), "--collect-every", "1h"];
        let rig = Rig::with_flags(cluster, Recorder::start(cluster, &DEFERRING), &flags);
        Self { rig, plan }
    }

    fn plan(&self, how: &str, at: usize) {
        let _ = fs::remove_file(self.plan.join("met"));
        let temporary = self.plan.join("plan.part");
        fs::write(&temporary, format!("{how} {at} {ALL}")).unwrap();
        fs::rename(temporary, self.plan.join("plan")).unwrap();
    }

    fn met(&self) -> Vec<String> {
        let met = fs::read_to_string(self.plan.join("met")).unwrap_or_default();
        met.lines().map(str::to_owned).collect()
    }

    fn take(&self, step: Step, pod: &Bound, volume: &Volume) -> Result<(), Status> {
        match step {
            Step::Publish => self.rig.publish(pod, volume),
            Step::Unpublish => self.rig.unpublish(pod, volume),
        }
    }

    /// What the driver was told to leave is written down, unless it was taken back since.
    fn what_was_left_is_known(&self, target: &Path) {
        let published = self.rig.behind.seen::<csi::NodePublishVolumeRequest>();
        let mut left = published.iter().filter(|one| one.target_path == path(target));
        let told = left.any(|one| one.defer_fs_ops);
        assert!(!told || self.rig.vol_data(target).is_some(), "{}", target.display());
    }

    /// One pod, and one step of its life that is ended or failed at the N-th point. False when it has fewer.
    fn round(&mut self, step: Step, how: &str, at: usize, seen: &mut BTreeSet<String>) -> bool {
        let name = format!("{step:?}-{how}-{at}").to_lowercase();
        let volume = self.rig.claim(&name);
        let pod = self.rig.pod(&name, &[&volume], Some(&name));
        let target = self.rig.target(&pod, &volume);
        self.rig.stage(&pod, &volume).unwrap();
        if step == Step::Unpublish {
            self.rig.publish(&pod, &volume).unwrap();
        }
        self.plan(how, at);
        let first = self.take(step, &pod, &volume);
        fs::remove_file(self.plan.join("plan")).unwrap();
        let met = self.met();
        seen.extend(met.iter().cloned());
        let reached = met.len() >= at;
        if reached && how == "kill" {
            self.rig.kill_proxy();
        }
        if step == Step::Publish {
            self.what_was_left_is_known(&target);
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

    /// That the step has come to its end, and the rest of the pod's life to its own.
    fn converged(&self, step: Step, pod: &Bound, volume: &Volume) {
        let target = self.rig.target(pod, volume);
        let remembered =
            |is: bool| assert_eq!(self.rig.vol_data(&target).is_some(), is, "{step:?}");
        remembered(step == Step::Publish);
        let last = self.rig.behind.seen::<csi::NodePublishVolumeRequest>().pop().unwrap();
        assert!(last.defer_fs_ops && last.target_path == path(&target));
        self.rig.unmount(pod, volume);
        remembered(false);
        // Half of an entry goes in the round that each start makes.
        let entry = self.rig.entry(&target);
        wait_for("the end of the entry", || !entry.path().exists());
    }
}

#[test]
#[ignore = "full tier"]
fn a_crash_of_the_node_proxy_at_any_step_converges_when_the_call_is_repeated() {
    if !have_root() {
        return;
    }
    let cluster = match Cluster::start() {
        Ok(cluster) => cluster,
        Err(NoCluster::Lacking(why)) => return support::skip(&why),
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
