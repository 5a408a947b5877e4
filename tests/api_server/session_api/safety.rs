//! No session token appears in a log, an error or a metric, at any log level.

use std::fmt::Write as _;
use std::time::Duration;
use support::cluster::shared;

use csi_loopback::grpc::fingerprint;
use csi_loopback::proto::snapshotsession as api;
use tonic::Code;

use super::rig::{Options, Rig};
use support::cluster::session::{HOUR, allocated, delta, random_token};
use support::driver::wait_for;

#[test]
fn session_tokens_are_never_logged() {
    let Some(cluster) = shared() else { return };
    // With and without a watch: a lookup puts the token into a URL. With our log flag and with
    // klog's.
    let mut codes = Vec::new();
    for (verbs, loud) in
        [(&["get", "list", "watch"][..], &["--log-level", "trace"][..]), (&["get"], &["-v=10"])]
    {
        let options = Options {
            verbs,
            sidecar: loud,
            driver: &["--log-level", "trace"],
            ..Options::default()
        };
        let rig = Rig::with(cluster, options);
        rig.write(1, [1]);
        let (first, second) = (rig.snapshot("first"), rig.snapshot("second"));
        let elsewhere = cluster.namespace("elsewhere");
        let revoked = rig.session(&[&first]);
        rig.ok(allocated(&revoked, "first"));
        cluster.revoke(&rig.home, &revoked);
        let tokens = [
            rig.session(&[&first, &second]),
            rig.session(&[&second]),
            rig.session_for(&[&first], Duration::ZERO),
            cluster.session(&elsewhere, &rig.driver_name, &[&first], HOUR),
            cluster.session(&rig.home, "another.csi.local", &[&first], HOUR),
            revoked,
            random_token(),
        ];
        let mut shown = String::new();
        for token in &tokens {
            let past = api::GetAllocatedRequest {
                starting_offset: u64::MAX >> 1,
                ..allocated(token, "second")
            };
            let volume =
                api::GetDeltaRequest { volume_id: "x".into(), ..delta(token, "first", "second") };
            let answers = [
                rig.ask(allocated(token, "first")),
                rig.ask(allocated(token, "")),
                rig.ask(delta(token, "second", "first")),
                rig.ask(delta(token, "first", "second")),
                rig.ask(past),
                rig.ask(volume),
            ];
            for answer in answers {
                codes.push(answer.as_ref().err().map_or(Code::Ok, tonic::Status::code));
                writeln!(shown, "{:?}", answer.err()).unwrap();
            }
        }
        // The lines of invalid tokens are limited.
        wait_for("the log of the last call", || {
            let _ = rig.ask(allocated(&tokens[6], "first"));
            rig.sidecar.process.log().contains(&fingerprint(&tokens[6]))
        });
        shown.push_str(&rig.metrics());
        shown.push_str(&rig.sidecar.process.log());
        let driver = rig.driver.log();
        assert!(driver.contains(&fingerprint(&tokens[0])) && driver.contains("TRACE"), "{driver}");
        shown.push_str(&driver);
        assert!(shown.contains("TRACE") || loud == ["-v=10"], "the log is at its most verbose");
        for token in &tokens {
            // A part of a token must not appear either.
            for part in [&token[..16], &token[token.len() - 16..]] {
                let at = shown.find(part);
                assert!(
                    at.is_none(),
                    "shown: {:?}",
                    at.map(|at| &shown[at.saturating_sub(200)..at + 60])
                );
            }
        }
    }
    for code in
        [Code::Ok, Code::NotFound, Code::InvalidArgument, Code::OutOfRange, Code::Unauthenticated]
    {
        assert!(codes.contains(&code), "{code:?} was not provoked: {codes:?}");
    }
}
