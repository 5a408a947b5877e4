//! `--publish-bases`: the bases that backup products find in VolumeSnapshotContents, and their
//! requests.

use std::sync::Arc;

use bytes::Bytes;
use csi_loopback::kubernetes::snapshot::VolumeSnapshotContent;
use csi_loopback::proto::admin::v1 as admin;
use serde_json::{Value, json};
use support::cluster::access::{rule, sidecar_rules};
use support::cluster::fake_driver::Fake;
use support::cluster::shared;
use support::cluster::sidecar::spawn;
use support::cluster::sidecar_rig::{Options, Rig};
use support::cluster::storage::Ready;
use support::cluster::tls::Authority;
use support::driver::PATIENCE;
use tonic::Code;

const FLAGS: [&str; 3] = ["--publish-bases", "--publish-bases-interval", "1s"];
const BASES: &str = "cbt.storage.k8s.io/bases";
const RETENTION: &str = "cbt.storage.k8s.io/base-retention";
const ERROR: &str = "cbt.storage.k8s.io/base-retention-error";
const DAY: u64 = 86_400;

fn options() -> Options<'static> {
    let patch = rule("snapshot.storage.k8s.io", &["volumesnapshotcontents"], &["patch"]);
    let rules = [sidecar_rules(), vec![patch]].concat();
    Options { sidecar: &FLAGS, rules, ..Options::default() }
}

fn annotation(rig: &Rig<'_>, content: &str, name: &str) -> Option<String> {
    let content = rig.cluster.get(&rig.cluster.api::<VolumeSnapshotContent>(), content)?;
    content.metadata.annotations?.get(name).cloned()
}

fn ask(rig: &Rig<'_>, content: &str, retention: &str) {
    let patch = json!({ "metadata": { "annotations": { RETENTION: retention } } });
    rig.cluster.merge(&rig.cluster.api::<VolumeSnapshotContent>(), content, &patch);
}

/// Waits until these bases are published: handles, and whether each expires.
fn wait_for_bases(rig: &Rig<'_>, content: &str, expected: &[(&str, bool)]) -> Value {
    rig.cluster.wait_for(&format!("{expected:?} of {content}"), || {
        let said: Value = serde_json::from_str(&annotation(rig, content, BASES)?).unwrap();
        let bases = said["bases"].as_array().unwrap().iter();
        let bases: Vec<_> = bases
            .map(|base| (base["handle"].as_str().unwrap(), base["expires"].is_string()))
            .collect();
        (bases == expected).then(|| said.clone())
    })
}

fn kept(rig: &Rig<'_>, handle: &str) -> Option<admin::base::Retention> {
    let volume_id = rig.volume.clone();
    let answer = rig.driver.ok(admin::ListBasesRequest { volume_id, ..Default::default() });
    answer.bases.into_iter().find(|base| base.snapshot_id == handle).unwrap().retention
}

#[test]
fn the_newest_content_lists_bases_and_expiry() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, options());
    let [first, second]: [Ready; 2] = ["first", "second"].map(|name| rig.snapshot(name));
    let (a, b) = (first.handle.as_str(), second.handle.as_str());
    let said = wait_for_bases(&rig, &second.content, &[(b, false), (a, false)]);
    assert_eq!((said["volume"].as_str(), said.get("more")), (Some(rig.volume.as_str()), None));
    cluster.wait_for("only the newest says so", || {
        annotation(&rig, &first.content, BASES).is_none().then_some(())
    });
    // After its deletion in Kubernetes it remains a base, with an expiry.
    cluster.delete_snapshot(&first);
    wait_for_bases(&rig, &second.content, &[(b, false), (a, true)]);
    let third = rig.snapshot("third");
    wait_for_bases(&rig, &third.content, &[(&third.handle, false), (b, false), (a, true)]);
    cluster.wait_for("the former newest says nothing", || {
        annotation(&rig, &second.content, BASES).is_none().then_some(())
    });
    // An unchanged annotation is not written.
    let version = || {
        let content = cluster.get(&cluster.api::<VolumeSnapshotContent>(), &third.content);
        content.unwrap().metadata.resource_version
    };
    let before = version();
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(version(), before);
}

#[test]
fn a_content_requests_the_retention_of_its_base() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, options());
    let snapshot = rig.snapshot("first");
    let wait_until_kept = |retention: Option<admin::base::Retention>| {
        cluster.wait_for(&format!("{retention:?}"), || {
            (kept(&rig, &snapshot.handle) == retention).then_some(())
        });
    };
    let error = || annotation(&rig, &snapshot.content, ERROR);
    ask(&rig, &snapshot.content, "30days");
    wait_until_kept(Some(admin::base::Retention::ForSeconds(30 * DAY)));
    for (bad, words) in [("soon", "neither a duration"), ("101years", "100 years")] {
        ask(&rig, &snapshot.content, bad);
        let said = cluster.wait_for("the error", || error().filter(|said| said.contains(words)));
        assert!(said.len() < 600, "{said}");
        wait_until_kept(Some(admin::base::Retention::ForSeconds(30 * DAY)));
    }
    ask(&rig, &snapshot.content, "default");
    wait_until_kept(None);
    cluster.wait_for("no error is left", || error().is_none().then_some(()));
}

#[test]
fn without_the_service_the_sidecar_exits() {
    let Some(cluster) = shared() else { return };
    let name = cluster.unique("fake");
    let lacks = |method: &str, _: Bytes| {
        (method == "ListBases").then(|| Err((Code::Unimplemented, String::new())))
    };
    let driver = cluster
        .block_on(async { Fake::answering(cluster.scratch(), &name, true, Arc::new(lacks)) });
    let namespace = cluster.namespace("apps");
    let own = cluster.account(&namespace, "sidecar");
    cluster.grant(&own, &options().rules);
    let certificate = Authority::new("authority").certify(cluster.scratch(), &name);
    let kubeconfig = cluster.kubeconfig_of(&own);
    let mut sidecar = spawn(cluster, &driver.socket, &kubeconfig, &certificate, &FLAGS);
    assert!(!sidecar.process.wait(PATIENCE).unwrap().success());
    let log = sidecar.process.log();
    assert!(log.contains("does not have the service csiloopback.admin.v1.BaseAdmin"), "{log}");
}
