//! The meaning and the lifetime of tokens.

use std::thread::spawn;
use std::time::{Duration, Instant};
use support::cluster::shared;

use csi_loopback::kubernetes::session::SnapshotSessionData;
use csi_loopback::kubernetes::snapshot::VolumeSnapshotContent;
use csi_loopback::proto::snapshotsession as api;
use serde_json::json;
use tonic::Code;

use super::rig::{Options, Rig};
use support::cluster::session::{HOUR, allocated, call_through, delta};
use support::cluster::sidecar::channel;
use support::driver::wait_for;
use support::requests::Metadata;

/// The first stream stalls for 12 s after its second extent.
const STALL: [&str; 3] =
    ["--enable-faults", "--fault", "stream-stall,after=2,for=12s,method=GetAllocated,times=1"];

#[test]
fn a_session_of_another_namespace_or_driver_is_refused() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let first = rig.snapshot("first");
    let elsewhere = cluster.namespace("elsewhere");
    let foreign = [
        cluster.session(&elsewhere, &rig.driver_name, &[&first], HOUR),
        cluster.session(&rig.home, "another.csi.local", &[&first], HOUR),
        // One that a finalizer holds is in deletion, too.
        {
            let token = rig.session(&[&first]);
            let sessions = cluster.api_in::<SnapshotSessionData>(&rig.home);
            let hold = json!({ "metadata": { "finalizers": ["example.com/hold"] } });
            cluster.merge(&sessions, &token, &hold);
            rig.ok(allocated(&token, "first"));
            cluster.revoke(&rig.home, &token);
            wait_for("it is over", || rig.ask(allocated(&token, "first")).is_err());
            token
        },
    ];
    let said = foreign.map(|token| {
        let refused = rig.ask(allocated(&token, "first")).unwrap_err();
        (refused.code(), refused.message().to_owned())
    });
    assert!(said.iter().all(|one| *one == said[0] && one.0 == Code::Unauthenticated), "{said:?}");
    let release = json!({ "metadata": { "finalizers": null } });
    let sessions = cluster.api_in::<SnapshotSessionData>(&rig.home);
    let held = cluster.list(&sessions);
    for one in held.iter().filter(|one| one.metadata.deletion_timestamp.is_some()) {
        cluster.merge(&sessions, one.metadata.name.as_deref().unwrap(), &release);
    }
    rig.ok(allocated(&rig.session(&[&first]), "first"));
}

/// Starts a stalling stream, runs `meanwhile`, and returns the result with its duration.
fn stalled(rig: &Rig<'_>, token: &str, meanwhile: impl FnOnce()) -> (Metadata, Duration) {
    let (port, authority) = (rig.sidecar.port, rig.authority.pem());
    let request = api::GetAllocatedRequest { max_results: 1, ..allocated(token, "first") };
    let begun = Instant::now();
    let answer = spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { call_through(channel(port, &authority), request).await })
    });
    wait_for("the answer has begun", || rig.metrics().contains("sidecar_streams_open 1"));
    meanwhile();
    assert!(rig.metrics().contains("sidecar_streams_open 1"), "it is still under way");
    (answer.join().unwrap().unwrap(), begun.elapsed())
}

#[test]
#[ignore = "full tier"]
fn a_stream_outlives_its_expired_session() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { driver: &STALL, ..Options::default() });
    rig.write(1, (0..10).map(|number| number * 2));
    let token = rig.session_for(&[&rig.snapshot("first")], Duration::from_secs(5));
    let (answer, took) = stalled(&rig, &token, || {
        wait_for("the end of the session", || {
            rig.ask(allocated(&token, "none")).is_err_and(|it| it.code() == Code::Unauthenticated)
        });
        rig.refused(allocated(&token, "first"), Code::Unauthenticated, "session_token");
    });
    assert_eq!(answer.extents().len(), 10);
    assert!(took > Duration::from_secs(11), "{took:?}");
    // The object still exists: it need not be deleted.
    let sessions = cluster.api_in::<SnapshotSessionData>(&rig.home);
    assert!(cluster.get(&sessions, &token).is_some());
}

#[test]
#[ignore = "full tier"]
fn a_revoked_session_refuses_the_next_call() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::with(cluster, Options { driver: &STALL, ..Options::default() });
    rig.write(1, (0..10).map(|number| number * 2));
    let token = rig.session(&[&rig.snapshot("first")]);
    // Let the watch report the session first.
    wait_for("a known token", || {
        let before = rig.session_requests("get");
        rig.ask(allocated(&token, "none")).is_err_and(|it| it.code() == Code::NotFound)
            && rig.session_requests("get") == before
    });
    let (answer, took) = stalled(&rig, &token, || {
        cluster.revoke(&rig.home, &token);
        let revoked = Instant::now();
        let mut longest = Duration::ZERO;
        wait_for("the refusal", || {
            let begun = Instant::now();
            let refused = rig.ask(allocated(&token, "none")).unwrap_err();
            longest = longest.max(begun.elapsed());
            refused.code() == Code::Unauthenticated
        });
        // Only the watch's delay, without the time of a cache. On a busy machine, calls take long.
        let delay = revoked.elapsed().saturating_sub(2 * longest);
        assert!(delay < Duration::from_millis(900), "{delay:?}, {longest:?}");
        rig.refused(allocated(&token, "first"), Code::Unauthenticated, "session_token");
    });
    assert_eq!(answer.extents().len(), 10);
    assert!(took > Duration::from_secs(11), "{took:?}");
}

#[test]
fn a_recreated_snapshot_is_not_in_the_session() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let (first, second) = (rig.snapshot("first"), rig.snapshot("second"));
    let token = rig.session(&[&first, &second]);
    rig.ok(delta(&token, "first", "second"));
    cluster.delete_snapshot(&second);
    let again = rig.snapshot("second");
    assert_ne!(again.handle, second.handle);
    wait_for("the sidecar has heard", || rig.ask(allocated(&token, "second")).is_err());
    rig.refused(
        allocated(&token, "second"),
        Code::NotFound,
        "was replaced since the session began",
    );
    rig.refused(
        delta(&token, "first", "second"),
        Code::NotFound,
        "was replaced since the session began",
    );
    rig.refused(
        delta(&token, "second", "first"),
        Code::NotFound,
        "was replaced since the session began",
    );
    rig.ok(allocated(&token, "first"));
    // A snapshot with another handle is another one, too; here the session has the wrong handle.
    let mut object = cluster.session_data(
        &support::cluster::session::random_token(),
        &rig.driver_name,
        &[&again],
        HOUR,
    );
    object["spec"]["snapshots"][0]["handle"] = first.handle.clone().into();
    let token = object["metadata"]["name"].as_str().unwrap().to_owned();
    cluster.create(&cluster.api_in::<SnapshotSessionData>(&rig.home), object);
    rig.refused(
        allocated(&token, "second"),
        Code::NotFound,
        "was replaced since the session began",
    );
}

#[test]
fn an_imported_snapshot_does_not_name_its_volume() {
    let Some(cluster) = shared() else { return };
    let rig = Rig::new(cluster);
    let first = rig.snapshot("first");
    // Otherwise the driver would lose the snapshot with its original object.
    let contents = cluster.api::<VolumeSnapshotContent>();
    cluster.merge(&contents, &first.content, &json!({ "spec": { "deletionPolicy": "Retain" } }));
    let brought =
        cluster.adopt_snapshot(&rig.namespace, "brought", &rig.driver_name, &first.handle, None);
    let token = rig.session(&[&first, &brought]);
    let of = |volume: &str| api::GetAllocatedRequest {
        volume_id: volume.to_owned(),
        ..allocated(&token, "brought")
    };
    rig.ok(of(""));
    rig.refused(of(&rig.volume), Code::NotFound, "does not name its volume; leave it empty");
}
