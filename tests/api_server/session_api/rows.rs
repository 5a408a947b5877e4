//! The KEP's tables of errors ("GetAllocated Errors", "GetDelta Errors"), except for offsets, which
//! `a_response_honors_offset_and_max_results` tests.

use std::time::Duration;
use support::cluster::shared;

use csi_loopback::proto::snapshotsession as api;
use tonic::Code;

use super::rig::{CAPACITY, Rig};
use support::cluster::Cluster;
use support::cluster::session::{HOUR, allocated, delta, random_token};
use support::driver::{block, wait_for};

/// Changes a request to an invalid one.
type Change<Q> = fn(&mut Q);

/// Snapshots of one volume that belong to a session, one that does not, and one of another volume
/// that does.
struct Sample<'a> {
    rig: Rig<'a>,
    token: String,
}

impl<'a> Sample<'a> {
    fn new(cluster: &'a Cluster) -> Self {
        let rig = Rig::new(cluster);
        let (first, second) = (rig.snapshot("first"), rig.snapshot("second"));
        rig.snapshot("outside");
        let volume = rig.driver.volume("other", CAPACITY, block());
        cluster.claim(&rig.namespace, "other", &rig.driver_name, &volume, CAPACITY);
        let other = cluster.snapshot(&rig.namespace, "other", "other", &rig.class);
        let token = rig.session(&[&first, &second, &other]);
        Self { rig, token }
    }

    fn of(&self, snapshot: &str) -> api::GetAllocatedRequest {
        allocated(&self.token, snapshot)
    }

    fn between(&self, base: &str, target: &str) -> api::GetDeltaRequest {
        delta(&self.token, base, target)
    }

    /// Invalid tokens, and why they are invalid.
    fn bad_tokens(&self) -> Vec<(&'static str, String)> {
        let rig = &self.rig;
        let first = &rig.cluster.wait_until_ready(&rig.namespace, "first");
        let mut forged = self.token.clone();
        let last = forged.pop().unwrap();
        forged.push(if last == 'a' { 'b' } else { 'a' });
        let expired = rig.session_for(&[first], Duration::from_secs(5));
        rig.ok(allocated(&expired, "first"));
        let revoked = rig.session_for(&[first], HOUR);
        rig.ok(allocated(&revoked, "first"));
        rig.cluster.revoke(&rig.home, &revoked);
        wait_for("the session is over", || rig.ask(allocated(&expired, "first")).is_err());
        wait_for("the session is revoked", || rig.ask(allocated(&revoked, "first")).is_err());
        vec![
            ("guessed", random_token()),
            ("forged", forged),
            ("too short", "a".repeat(51)),
            ("too long", "a".repeat(254)),
            ("of upper case", "A".repeat(52)),
            ("not of its characters", format!("../{}", "a".repeat(60))),
            ("expired", expired),
            ("revoked", revoked),
        ]
    }
}

/// The message is the same for all invalid tokens, so that it reveals nothing.
const WORDS: &str = "session_token: is not a token of a snapshot session of this driver, or the session has ended; \
                     create another SnapshotSessionRequest";

#[test]
fn get_allocated_missing_or_otherwise_invalid_argument() {
    let Some(cluster) = shared() else { return };
    let sample = Sample::new(cluster);
    let cases: [(&str, Change<api::GetAllocatedRequest>); 4] = [
        ("session_token: is required", |it| it.session_token.clear()),
        ("snapshot: is required", |it| it.snapshot.clear()),
        ("snapshot: is not a valid VolumeSnapshot name", |it| it.snapshot = "../first".into()),
        ("volume_id: is not a CSI handle", |it| it.volume_id = "x".repeat(1025)),
    ];
    for (words, change) in cases {
        let mut request = sample.of("first");
        change(&mut request);
        sample.rig.refused(request, Code::InvalidArgument, words);
    }
    sample.rig.ok(sample.of("first"));
}

#[test]
fn get_allocated_invalid_volume_id_or_snapshot() {
    let Some(cluster) = shared() else { return };
    let sample = Sample::new(cluster);
    let rig = &sample.rig;
    let of = |volume: &str| api::GetAllocatedRequest {
        volume_id: volume.to_owned(),
        ..sample.of("first")
    };
    rig.ok(of(&rig.volume));
    rig.refused(of("another-volume"), Code::NotFound, "volume_id: ");
    for name in ["outside", "nowhere"] {
        let words = format!("snapshot: VolumeSnapshot {name} is not part of the session");
        rig.refused(sample.of(name), Code::NotFound, &words);
    }
    let first = cluster.wait_until_ready(&rig.namespace, "first");
    cluster.delete_snapshot(&first);
    wait_for("the sidecar has heard", || {
        rig.ask(sample.of("first")).is_err_and(|it| it.message().contains("first does not exist"))
    });
    rig.refused(sample.of("first"), Code::NotFound, "first does not exist");
}

#[test]
fn get_delta_missing_or_otherwise_invalid_argument() {
    let Some(cluster) = shared() else { return };
    let sample = Sample::new(cluster);
    let cases: [(&str, Change<api::GetDeltaRequest>); 8] = [
        ("session_token: is required", |it| it.session_token.clear()),
        ("base_snapshot: is required", |it| it.base_snapshot.clear()),
        ("target_snapshot: is required", |it| it.target_snapshot.clear()),
        ("base_snapshot: is not a valid VolumeSnapshot name", |it| it.base_snapshot = "a_b".into()),
        ("target_snapshot: is not a valid VolumeSnapshot name", |it| {
            it.target_snapshot = "a/b".into()
        }),
        ("volume_id: is not a CSI handle", |it| it.volume_id = "a\nb".into()),
        ("base_snapshot: belongs to another volume", |it| it.base_snapshot = "other".into()),
        ("is newer than the target", |it| {
            std::mem::swap(&mut it.base_snapshot, &mut it.target_snapshot);
        }),
    ];
    for (words, change) in cases {
        let mut request = sample.between("first", "second");
        change(&mut request);
        sample.rig.refused(request, Code::InvalidArgument, words);
    }
    sample.rig.ok(sample.between("first", "second"));
}

#[test]
fn get_delta_invalid_volume_id_base_snapshot_or_target_snapshot() {
    let Some(cluster) = shared() else { return };
    let sample = Sample::new(cluster);
    let rig = &sample.rig;
    let of = |volume: &str| api::GetDeltaRequest {
        volume_id: volume.to_owned(),
        ..sample.between("first", "second")
    };
    rig.ok(of(&rig.volume));
    rig.refused(of("another-volume"), Code::NotFound, "volume_id: ");
    for name in ["outside", "nowhere"] {
        let words =
            |field: &str| format!("{field}: VolumeSnapshot {name} is not part of the session");
        rig.refused(sample.between(name, "second"), Code::NotFound, &words("base_snapshot"));
        rig.refused(sample.between("first", name), Code::NotFound, &words("target_snapshot"));
    }
    let first = cluster.wait_until_ready(&rig.namespace, "first");
    cluster.delete_snapshot(&first);
    wait_for("the sidecar has heard", || {
        let answer = rig.ask(sample.between("first", "second"));
        answer.is_err_and(|it| it.message().contains("first does not exist"))
    });
    rig.refused(sample.between("first", "second"), Code::NotFound, "first does not exist");
}

#[test]
fn an_invalid_session_token_is_refused_in_the_same_words() {
    let Some(cluster) = shared() else { return };
    let sample = Sample::new(cluster);
    for (what, token) in sample.bad_tokens() {
        let answers = [
            sample.rig.ask(allocated(&token, "first")),
            sample.rig.ask(delta(&token, "first", "second")),
        ];
        for refused in answers.map(Result::unwrap_err) {
            let expected = (Code::Unauthenticated, WORDS);
            assert_eq!((refused.code(), refused.message()), expected, "{what}");
        }
    }
}
