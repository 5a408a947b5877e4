//! The volume of a restored claim changes its claim: a fault at every step.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Output;
use std::thread::sleep;
use std::time::{Duration, Instant};

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use serde_json::{Value, json};
use support::cluster::shared;
use support::driver::PATIENCE;

use super::rig::{BYTES, Run, Stage, ended};

/// The steps of a rebinding.
const STEPS: [&str; 6] = [
    "mover.old_retained",
    "mover.new_volume_created",
    "mover.new_claim_created",
    "mover.new_claim_bound",
    "mover.old_claim_deleted",
    "mover.old_volume_deleted",
];

/// The controllers of a cluster, for the volumes of one namespace.
struct Controllers<'s> {
    stage: &'s Stage<'s>,
    /// Jobs that are done.
    done: BTreeSet<String>,
    /// Handles of volumes that the driver has deleted.
    destroyed: BTreeSet<String>,
}

fn handle(volume: &PersistentVolume) -> String {
    volume.spec.as_ref().unwrap().csi.as_ref().unwrap().volume_handle.clone()
}

fn policy(volume: &PersistentVolume) -> &str {
    volume.spec.as_ref().unwrap().persistent_volume_reclaim_policy.as_deref().unwrap()
}

impl<'s> Controllers<'s> {
    fn new(stage: &'s Stage<'s>) -> Self {
        Self { stage, done: BTreeSet::new(), destroyed: BTreeSet::new() }
    }

    fn claims(&self) -> BTreeMap<String, PersistentVolumeClaim> {
        let claims = self.stage.cluster.api_in::<PersistentVolumeClaim>(&self.stage.namespace);
        let all = self.stage.cluster.list(&claims);
        all.into_iter().map(|claim| (claim.metadata.name.clone().unwrap(), claim)).collect()
    }

    /// The PersistentVolumes of the namespace.
    fn volumes(&self) -> Vec<PersistentVolume> {
        let volumes = self.stage.cluster.api::<PersistentVolume>();
        let all = self.stage.cluster.list(&volumes);
        let is_here = |volume: &PersistentVolume| {
            let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
            claim.is_some_and(|claim| claim.namespace.as_ref() == Some(&self.stage.namespace))
        };
        all.into_iter().filter(is_here).collect()
    }

    /// One round of all controllers.
    fn step(&mut self) {
        let jobs = self.stage.movers.jobs();
        // Before their pods run, as in a cluster: the claim of a Job exists before it.
        for (name, claim) in &self.claims() {
            self.bind(name, claim);
        }
        for job in jobs {
            if self.done.insert(job.metadata.name.clone().unwrap()) {
                self.complete(&job);
            }
        }
        self.stage.movers.collect_garbage();
        self.reclaim();
    }

    fn complete(&self, job: &Job) {
        let spec = job.spec.as_ref().unwrap().template.spec.as_ref().unwrap();
        let log = match spec.containers[0].args.as_ref().unwrap()[1].as_str() {
            "show" => json!({ "id": "b", "volume": "v", "capacity_bytes": BYTES }),
            _ => json!({
                "backup": "b", "to": "d", "capacity_bytes": BYTES, "written_bytes": 0,
                "kept_bytes": 0,
            }),
        };
        let pod = self.stage.movers.pod(job, 0, &log.to_string());
        self.stage.set(&pod, "Succeeded", &[("mover", ended(0))]);
    }

    /// Provisions a volume for a claim without one, and binds claims.
    fn bind(&self, name: &str, claim: &PersistentVolumeClaim) {
        let cluster = self.stage.cluster;
        if claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound") {
            return;
        }
        let claims = cluster.api_in::<PersistentVolumeClaim>(&self.stage.namespace);
        if claim.spec.as_ref().unwrap().volume_name.is_none() {
            let uid = claim.metadata.uid.clone().unwrap();
            let volume = format!("pvc-{uid}");
            let reference = json!({
                "kind": "PersistentVolumeClaim", "namespace": self.stage.namespace, "name": name,
                "uid": uid,
            });
            let csi = json!({ "driver": "d", "volumeHandle": format!("h-{uid}") });
            let spec = json!({
                "accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "csi": csi,
                "capacity": { "storage": BYTES.to_string() }, "claimRef": reference,
                "persistentVolumeReclaimPolicy": "Delete", "storageClassName": "none",
            });
            let object = json!({ "metadata": { "name": volume }, "spec": spec });
            cluster.create(&cluster.api::<PersistentVolume>(), object);
            cluster.merge(&claims, name, &json!({ "spec": { "volumeName": volume } }));
        }
        // The command may have deleted it.
        let patch = json!({ "status": { "phase": "Bound" } });
        let _ = cluster.merge_at_status(&claims, name, &patch);
    }

    /// Deletes volumes whose claim is gone, if their policy says so.
    fn reclaim(&mut self) {
        let volumes = self.stage.cluster.api::<PersistentVolume>();
        let found = self.volumes();
        // After the volumes: a claim is created after its volume, or before and is bound.
        let claims = self.claims();
        for volume in found {
            let claim = volume.spec.as_ref().unwrap().claim_ref.as_ref().unwrap();
            let is_there = claims.contains_key(claim.name.as_deref().unwrap());
            if !is_there && policy(&volume) == "Delete" {
                self.destroyed.insert(handle(&volume));
                let name = volume.metadata.name.unwrap();
                let _ = self.stage.cluster.block_on(volumes.delete(&name, &Default::default()));
            }
        }
    }

    /// Runs until all commands have ended.
    fn run(&mut self, runs: &mut [Run<'_>]) {
        let until = Instant::now() + PATIENCE;
        while !runs.iter_mut().all(Run::has_ended) {
            assert!(Instant::now() < until, "the commands do not end");
            self.step();
            sleep(Duration::from_millis(50));
        }
        (0..3).for_each(|_| self.step());
    }

    /// The PersistentVolumes of a claim's volume, by the policy.
    fn of_claim(&self, claim: &str) -> Vec<(String, String)> {
        let volumes = self.volumes();
        let is_of = |volume: &&PersistentVolume| {
            let reference = volume.spec.as_ref().unwrap().claim_ref.as_ref();
            reference.and_then(|reference| reference.name.as_deref()) == Some(claim)
        };
        let Some(own) = volumes.iter().find(is_of) else { return Vec::new() };
        let same = volumes.iter().filter(|one| handle(one) == handle(own));
        same.map(|one| (one.metadata.name.clone().unwrap(), policy(one).to_owned())).collect()
    }

    /// No two PersistentVolumes of a volume have the policy Delete, no claim a destroyed volume.
    fn assert_safe(&self) {
        let volumes = self.volumes();
        for one in &volumes {
            assert!(!self.destroyed.contains(&handle(one)), "{one:?}");
            let same = volumes.iter().filter(|other| handle(other) == handle(one)).count();
            assert!(same == 1 || policy(one) == "Retain", "{volumes:?}");
        }
    }
}

/// Starts a restore for each step, which has a fault after this step.
fn start<'s>(stage: &'s Stage<'s>, action: &str) -> Vec<Run<'s>> {
    let kubeconfig = stage.kubeconfig();
    let steps = STEPS.iter().map(|step| {
        let directory = stage.cluster.scratch().join(stage.cluster.unique("plan"));
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("plan"), format!("{action} 1 {step}")).unwrap();
        let to = claim_of(step);
        let restore = ["restore", "b", "--to-claim", &to, "--volume-mode", "filesystem"];
        let mut command = stage.command(&kubeconfig, &restore);
        command.env("CSI_LOOPBACK_FAIL_POINTS", directory);
        stage.spawn(command)
    });
    steps.collect()
}

/// The new claim of the restore with a fault at this step.
fn claim_of(step: &str) -> String {
    step.replace(['.', '_'], "-")
}

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_killed_rebinding_destroys_no_volume() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    let mut controllers = Controllers::new(&stage);
    let mut runs = start(&stage, "kill");
    controllers.run(&mut runs);
    let killed = runs.into_iter().all(|run| run.wait().status.code().is_none());
    assert!(killed, "every fail point is met");
    controllers.assert_safe();
    assert!(controllers.destroyed.is_empty());
    let claims = controllers.claims();
    for step in &STEPS[2..] {
        let of = controllers.of_claim(&claim_of(step));
        assert!(claims.contains_key(&claim_of(step)), "{step}");
        assert!(of.iter().all(|(_, policy)| policy == "Retain"), "{step}: {of:?}");
    }
    // The next restore to the claim says what there is.
    let to = claim_of(STEPS[3]);
    let names = controllers.of_claim(&to);
    let words: Vec<&str> = names.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(words.len(), 2);
    let again = ["restore", "b", "--to-claim", &to, "--volume-mode", "filesystem"];
    stage.start(&again).refused(&[&words[..], &["was interrupted", "reclaim policy"]].concat());
    // A user deletes the claims one after the other: the volume of the rest stays.
    let api = cluster.api_in::<PersistentVolumeClaim>(&stage.namespace);
    for step in STEPS {
        if controllers.claims().contains_key(&claim_of(step)) {
            cluster.delete(&api, &claim_of(step));
        }
        controllers.step();
    }
    assert!(controllers.destroyed.is_empty());
}

#[test]
fn after_a_failed_rebinding_both_claims_are_intact_or_gone() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    let mut controllers = Controllers::new(&stage);
    let mut runs = start(&stage, "error");
    controllers.run(&mut runs);
    controllers.assert_safe();
    let claims = controllers.claims();
    for (at, (step, run)) in STEPS.iter().zip(runs).enumerate() {
        let output = run.wait();
        let text = error(&output);
        assert_eq!(output.status.code(), Some(1), "{step}: {text}");
        let is_there = claims.contains_key(&claim_of(step));
        // Up to the fourth step nothing of the old claim is removed.
        assert_eq!(is_there, at >= 4, "{step}: {text}");
        if is_there {
            let names = controllers.of_claim(&claim_of(step));
            assert!(names.iter().all(|(name, _)| text.contains(name)), "{step}: {text}");
            assert!(names.iter().all(|(_, policy)| policy == "Retain"), "{step}: {names:?}");
            assert!(text.contains("reclaim policy") && text.contains("to Delete"), "{text}");
        }
    }
    assert_eq!(controllers.destroyed.len(), 4, "those of the claims that are gone");
    assert_eq!(claims.len(), 2, "{:?}", claims.keys());
}

#[test]
fn a_rebound_volume_has_its_policy_when_it_has_one_claim() {
    let Some(cluster) = shared() else { return };
    let stage = Stage::new(cluster);
    let mut controllers = Controllers::new(&stage);
    let restore = ["restore", "b", "--to-claim", "restored", "--volume-mode", "filesystem"];
    let mut runs = [stage.start(&restore)];
    controllers.run(&mut runs);
    let [run] = runs;
    let output = run.wait();
    assert!(output.status.success(), "{}", error(&output));
    let restored: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(restored["to"], "claim restored");
    let of = controllers.of_claim("restored");
    assert!(matches!(&of[..], [(_, policy)] if policy == "Delete"), "{of:?}");
    let volumes = controllers.volumes();
    let annotations = volumes[0].metadata.annotations.clone().unwrap();
    assert!(!annotations.keys().any(|key| key.ends_with("/rebinding")), "{annotations:?}");
    assert_eq!(controllers.claims().into_keys().collect::<Vec<_>>(), ["restored"]);
}
